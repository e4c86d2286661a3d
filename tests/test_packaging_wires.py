"""Shipped code never deserialises arbitrary objects: no pickle on a wire or in a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = ("sglang_jax", "torch_backend", "tpu")

MODULES = {
    "pickle": "runs what its bytes ask for",
    "cloudpickle": "is pickle",
    "dill": "is pickle",
    "joblib": "is pickle",
    "shelve": "is pickle",
    "marshal": "is not made for bytes of strangers",
    "xmlrpc": "is not made for strangers",
    "multiprocessing.managers": "is pickle",
}
FUNCTIONS = {
    "recv_pyobj": "unpickles",
    "send_pyobj": "pickles",
    "all_gather_object": "unpickles",
    "gather_object": "unpickles",
    "broadcast_object_list": "unpickles",
    "scatter_object_list": "unpickles",
    "send_object_list": "pickles",
    "recv_object_list": "unpickles",
}
NAMED = {
    ("torch", "load"): "unpickles",
    ("yaml", "load"): "makes objects of tags; safe_load does not",
    ("yaml", "unsafe_load"): "makes objects of tags; safe_load does not",
}
FROM_CONNECTION = {"Connection", "Pipe"}
"""`Listener` and `Client` authenticate while accepting connections, and use MD5 on Python 3.11."""

ALLOWED = {
    ("tpu/worker.py", "Connection.recv"),  # a pipe to its child process, which multiprocessing starts by pickle anyway
}


def found(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, the forbidden use, the reason)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from _module(node.lineno, alias.name)
            case ast.ImportFrom(module=str(module), names=names):
                yield from _module(node.lineno, module)
                for alias in names:
                    yield from _module(node.lineno, f"{module}.{alias.name}")
                    if alias.name in FUNCTIONS:
                        yield node.lineno, alias.name, FUNCTIONS[alias.name]
                    if (module, alias.name) in NAMED:
                        yield node.lineno, f"{module}.{alias.name}", NAMED[module, alias.name]
                    if module == "multiprocessing.connection" and alias.name not in FROM_CONNECTION:
                        yield node.lineno, f"{module}.{alias.name}", "waits where connections are accepted"
            case ast.Attribute(attr=name) if name in FUNCTIONS:
                yield node.lineno, name, FUNCTIONS[name]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in NAMED:
                yield node.lineno, f"{owner}.{name}", NAMED[owner, name]
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                yield node.lineno, "Connection.recv", "unpickles; recv_bytes does not"
            case ast.Call(keywords=keywords) if any(
                keyword.arg in ("allow_pickle", "authkey") and not _is_false(keyword.value) for keyword in keywords
            ):
                yield node.lineno, "allow_pickle or authkey", "lets pickle in"


def _module(line: int, name: str) -> Iterator[tuple[int, str, str]]:
    for forbidden, reason in MODULES.items():
        if name == forbidden or name.startswith(f"{forbidden}."):
            yield line, forbidden, reason


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_shipped_code_does_not_unpickle() -> None:
    wrong = []
    for path in (path for package in SHIPPED for path in (ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        wrong += [
            f"{name}:{line}: {what} {reason}"
            for line, what, reason in found(ast.parse(path.read_text()))
            if (name, what) not in ALLOWED
        ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "def lazy(): from pickle import loads",
        "from multiprocessing.connection import Listener",
        "from multiprocessing import managers",
        "torch.distributed.all_gather_object(values, value)",
        "from torch.distributed import broadcast_object_list",
        "order = connection.recv()",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_code_that_unpickles_is_detected(line: str) -> None:
    assert list(found(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["connection.recv_bytes()", "socket.recv(4)", "yaml.safe_load(text)", "np.load(path, allow_pickle=False)"]
)
def test_harmless_code_is_not_reported(line: str) -> None:
    assert not list(found(ast.parse(line)))

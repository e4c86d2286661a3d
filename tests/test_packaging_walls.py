"""The import contracts hold, and a violation of any of them is detected."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("sglang_jax", "torch_backend", "tpu")
PRIVATE_NAME = re.compile(r"_[^_]")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run([*command, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in ("sglang_jax", "torch_backend", "tpu"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("sglang_jax/scheduler/messages.py", "import jax", "neither jax nor torch"),
        ("sglang_jax/mem_cache/page_pool.py", "def lazy(): import torch", "neither jax nor torch"),
        ("sglang_jax/checkpoint/tensors.py", "import sglang_jax.layers.batch", "neither jax nor torch"),
        ("sglang_jax/architectures/manifest.py", "import sglang_jax.layers.batch", "neither jax nor torch"),
        (
            "sglang_jax/architectures/manifest.py",
            "import sglang_jax.checkpoint.reader",
            "downwards only",
        ),
        (
            "sglang_jax/mem_cache/page_table.py",
            "import sglang_jax.scheduler.messages",
            "downwards only",
        ),
        ("sglang_jax/scheduler/messages.py", "import sglang_jax.engine.types", "downwards only"),
        ("sglang_jax/engine/types.py", "import sglang_jax.server.errors", "downwards only"),
        ("sglang_jax/replies/forms.py", "import sglang_jax.engine.types", "downwards only"),
        ("sglang_jax/server/errors.py", "import sglang_jax.batch.lines", "downwards only"),
        ("sglang_jax/batch/work_queue.py", "import sglang_jax.cli.main", "downwards only"),
        ("sglang_jax/batch/work_queue.py", "def lazy(): import torch", "neither jax nor torch"),
        ("sglang_jax/server/errors.py", "import sglang_jax.cli.main", "downwards only"),
        ("sglang_jax/layers/batch.py", "import sglang_jax.scheduler.messages", "know only the seam"),
        ("sglang_jax/layers/batch.py", "import sglang_jax.jax_runner.runner", "import downwards"),
        ("sglang_jax/layers/batch.py", "import torch_backend.batch", "JAX backend know only the seam"),
        ("sglang_jax/layers/block_matrix.py", "def lazy(): import numba", "no compiler of CPU kernels"),
        ("sglang_jax/cpu_kernels/work.py", "import jax", "CPU kernels of both backends"),
        ("sglang_jax/checkpoint/encoding.py", "import sglang_jax.cpu_kernels.work", "neither jax nor torch"),
        ("sglang_jax/runner/backends.py", "import torch_backend.runner", "neither jax nor torch"),
        ("sglang_jax/cli/serve.py", "import tpu.topologies", "rented and checked"),
        ("sglang_jax/server/context.py", "def lazy(): import opentelemetry.trace", "knows OpenTelemetry"),
        ("tpu/topologies.py", "import torch_backend.batch", "imports no torch"),
        ("torch_backend/step.py", "def lazy(): import jax", "torch backend knows only the seam"),
        ("torch_backend/step.py", "import sglang_jax.layers.batch", "torch backend knows only the seam"),
        ("torch_backend/step.py", "import sglang_jax.scheduler.messages", "torch backend knows only the seam"),
    ],
)
def test_a_violation_is_detected(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    broken = " ".join(result.stdout.partition("Broken contracts")[2].split())
    assert contract in broken


def test_command_line_and_server_load_neither_jax_torch_nor_opentelemetry() -> None:
    script = (
        "import sglang_jax.launch_server, sglang_jax.server.serve, sys; "
        "print([m for m in ('jax', 'torch', 'opentelemetry.sdk') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


PRIVATE = {
    "os._exit": "documented: ends a process without its cleanup",
    "aten._to_copy": "an operator of ATen, whose name starts so",
    "aten._unsafe_view": "an operator of ATen, whose name starts so",
    "torch.ops.mkldnn._linear_pointwise": "an operator: oneDNN's products with packed weights have no other",
    "torch.ops.mkldnn._reorder_linear_weight": "an operator: packs weights for these products",
    "torch._int_mm": "the only product of int8 matrices for CUDA; torch documents it in torch.ao",
    "torch._ops": "the type of operators in graphs of torch.export",
    "torch._subclasses.fake_tensor": "torch's documentation imports FakeTensorMode from there",
    "torch.distributed._symmetric_memory": "torch's documentation imports symmetric memory from there",
    "model._keys_to_ignore_on_load_unexpected": "transformers' models declare there which tensors to ignore",
    "ray.data._internal.execution.interfaces": "the type of an argument of Ray's Datasink, for writers of datasinks",
    "self._paths": "Ray's FileBasedDatasource gives its files to subclasses only so",
    "self._file_sizes": "Ray's FileBasedDatasource gives its files to subclasses only so",
}
"""Private names of libraries that the product uses, each with the reason."""


def private_names() -> set[str]:
    """Names with a leading underscore that the product reads and does not define."""
    paths = [path for package in ("sglang_jax", "torch_backend", "tpu") for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = set()
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name not in own:
                found |= {ast.unparse(node)} if PRIVATE_NAME.match(name) else set()
            case ast.ImportFrom(module=str(module), level=0):
                hidden = [part for part in module.split(".") if PRIVATE_NAME.match(part)]
                hidden += [] if module.startswith(OURS) else [each.name for each in node.names if each.name[0] == "_"]
                found |= {module} if hidden else set()
            case ast.Import():
                found |= {each.name for each in node.names if "._" in each.name or each.name.startswith("_")}
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found |= {name} if PRIVATE_NAME.match(name) and name not in own else set()
    return found


def test_private_names_of_libraries_are_the_known_ones() -> None:
    assert private_names() == set(PRIVATE)

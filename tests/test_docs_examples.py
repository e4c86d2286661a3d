"""The examples and the README's code run against an engine and a server that echo prompts."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from helpers.echo_server import serve_echo
from helpers.engine_fakes import load_echo, load_tokenizer

import sglang_jax
from sglang_jax import Engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RAY_EXAMPLES = {"ray_serve.py": ROOT / "tests/on_ray/test_ray_serve.py"}
"""Examples that need Ray, and the tests that run them by `make ray-test`."""

RAY_PACKAGE = ast.parse((ROOT / "sglang_jax/batch/ray/__init__.py").read_text()).body
PUBLIC = {
    "sglang_jax": set(sglang_jax.__all__),
    "sglang_jax.batch.ray": set(
        next(ast.literal_eval(line.value) for line in RAY_PACKAGE if isinstance(line, ast.Assign))  # __all__
    ),
    "sglang_jax.config": {"EngineConfig", "ServerConfig"},
    "sglang_jax.server.embedded": {"EmbeddedServer"},
}
"""The names that examples and pages may import, by module."""

README_BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


async def launch_echo(config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load_echo, load_tokenizer=load_tokenizer)


@pytest.fixture
def echo_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from sglang_jax import Engine` gives an echo engine, for any model path."""

    def engine(model_path: str) -> Engine:
        assert model_path == "demo"
        return Engine(model_path="echo", launch=launch_echo)

    monkeypatch.setattr(sglang_jax, "Engine", engine)


def run(example: str, *arguments: str) -> None:
    main: Callable[..., None] = runpy.run_path(str(ROOT / "examples" / example))["main"]
    main(*arguments)


def imported_names(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import from the package, at any depth."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "sglang_jax":
                found += [(module, alias.name) for alias in names]
            case ast.Import(names=names):
                found += [(alias.name, "") for alias in names if alias.name.split(".")[0] == "sglang_jax"]
    return found


def python_sources() -> list[Any]:
    blocks = [
        pytest.param(block, id=f"{page.name} {number}")
        for page in PAGES
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), start=1
        )
    ]
    return blocks + [pytest.param(path.read_text(), id=path.name) for path in EXAMPLES]


@pytest.mark.parametrize("source", python_sources())
def test_only_public_names_are_imported(source: str) -> None:
    for module, name in imported_names(source):
        assert name in PUBLIC.get(module, ()), f"{name} of {module}"


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert EXAMPLES
    elsewhere = {name for name, test in RAY_EXAMPLES.items() if f'"{name}"' in test.read_text()}
    assert not [path.name for path in EXAMPLES if f'run("{path.name}"' not in source and path.name not in elsewhere]


@pytest.mark.usefixtures("echo_engine")
def test_generate_offline(capsys: pytest.CaptureFixture[str]) -> None:
    run("generate_offline.py")
    assert capsys.readouterr().out == "The capital of France is\n24 tokens, ended by length\n"


@pytest.mark.usefixtures("echo_engine")
def test_stream_chat(capsys: pytest.CaptureFixture[str]) -> None:
    run("stream_chat.py")
    answer = capsys.readouterr().out
    assert answer == "system: You answer in one short paragraph.\nuser: Why does bread rise?\n\n"


@pytest.mark.usefixtures("echo_engine")
def test_custom_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_sampling.py")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "greedy: 'Once upon a time there w'"
    assert len(lines) == 4 + 5
    assert lines[4] == "'O' -7.90 (most likely: 'O' -7.90, 'P' -8.00)"


@pytest.mark.usefixtures("echo_engine")
def test_many_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    run("many_prompts.py")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "France: You are"
    assert re.fullmatch(r"8 answers in .* s; 16 of \d+ prompt tokens came from the prefix cache", lines[-1])


def test_openai_client(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_echo() as server:
        run("openai_client.py", server.url)
    answer, cached, streamed, *tokens, refusal = capsys.readouterr().out.splitlines()
    assert answer == streamed == "user: What is the capital of Jap"
    assert cached == "2 prompt tokens came from the prefix cache"
    assert tokens[0] == "'u': -11.700"
    assert refusal.startswith("refused: temperature must be in [0, 100]")


@pytest.mark.usefixtures("echo_engine")
def test_the_engine_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in README_BLOCKS if "Engine" in block]
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "The capital of France is\nOnce upon a timeOne, two,\nRed, green,\n"


def test_the_client_of_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in README_BLOCKS if "OpenAI" in block]
    with serve_echo() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: client)
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "user: What is the capital of Japan?\n\n"


def test_the_curl_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"curl http://127.0.0.1:30000(\S+) -H '(\S+): (\S+)' \\\n  -d '(.*)'", readme)
    assert command is not None
    path, header, value, body = command.groups()
    with serve_echo() as server:
        answer = httpx2.post(server.url + path, headers={header: value}, content=body)
    assert answer.status_code == 200, answer.text

"""Scripts that start an engine in its own process, with and without the guard that multiprocessing needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = f"""
import sys
sys.path[:0] = {sys.path!r}
import asyncio, multiprocessing
from helpers.engine_fakes import load_echo, load_tokenizer
from sglang_jax import Engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.launch import launch_core

def launch(config):
    return launch_core(config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer)

async def serve():
    client = await launch(EngineConfig(model_path="echo"))
    await client.close()

def generate(dp_size=2):
    with Engine(model_path="echo", dp_size=dp_size, launch=launch) as engine:
        print(engine.generate("abc").text, flush=True)

def attempt():
    try:
        generate()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""

OWN_CHILD = """
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
"""


def run(arguments: list[str], script: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=script, capture_output=True, text=True, timeout=120, check=False
    )


def run_file(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(HEAD + body)
    return run([*options, str(path)])


@pytest.mark.parametrize("body", ["generate()", "generate(1)", "asyncio.run(serve())"])
def test_a_script_without_the_guard_gets_one_error_about_it(body: str, tmp_path: Path) -> None:
    done = run_file(tmp_path, body)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("Traceback") == 1, done.stderr
    last = done.stderr.partition("sglang_jax.errors.ConfigError: ")[2]
    assert last.startswith("this script needs a guard: "), done.stderr
    assert 'if __name__ == "__main__":\n' in last


def test_a_process_that_the_script_itself_spawned_gets_the_error_too(tmp_path: Path) -> None:
    """It runs the script once more by itself, and no other process reports the error."""
    lines = run_file(tmp_path, 'if __name__ != "__main__":\n    attempt()\n' + OWN_CHILD).stdout.splitlines()
    assert lines[0].startswith("ConfigError this script needs a guard: ")


BY_ANOTHER = ["-c", "import multiprocessing, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"]


@pytest.mark.parametrize("options", [[], BY_ANOTHER], ids=["plain", "run by another, as profilers do"])
def test_a_script_with_the_guard_generates(options: list[str], tmp_path: Path) -> None:
    done = run_file(tmp_path, 'if __name__ == "__main__":\n    generate()', *options)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["abc"]), done.stderr


def test_a_spawned_process_may_start_an_engine_after_its_imports(tmp_path: Path) -> None:
    done = run_file(tmp_path, OWN_CHILD.replace("target=print", "target=generate"))
    assert (done.returncode, done.stdout) == (0, "abc\n"), done.stderr


def test_a_script_from_standard_input_cannot_start_an_engine_process() -> None:
    done = run(["-"], HEAD + "generate()")
    assert done.stderr.splitlines()[-1].endswith(
        "and this one has no file (<stdin>): write it to a file, or use one engine in this process"
    )


def test_a_command_line_needs_no_guard() -> None:
    """Nothing of it is run again."""
    done = run(["-c", HEAD + "generate()"])
    assert (done.returncode, done.stdout) == (0, "abc\n"), done.stderr

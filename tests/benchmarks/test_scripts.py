"""The scripts of benchmarks/ start, and those that need no model run on small sizes, so that a script that calls
removed code is noticed before its figures are needed."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.documented_commands import documented_commands

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

READ_OPTIONS = """
import argparse, contextlib, io, json, runpy, sys

def read_and_end(parser, *arguments):
    unknown = read(parser, *arguments)[1]
    if unknown:
        parser.error(f"unknown arguments: {unknown}")
    parser.exit(message="read")

def read_known_and_end(parser, *arguments):
    read(parser, *arguments)
    parser.exit(message="read")

read = argparse.ArgumentParser.parse_known_args
argparse.ArgumentParser.parse_args = read_and_end
argparse.ArgumentParser.parse_known_args = read_known_and_end
told = []
for command in json.loads(sys.argv[1]):
    sys.argv = command
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_path(command[0], run_name="__main__")
        told.append("")
    except SystemExit as ended:
        told.append(out.getvalue() if not ended.code else f"status {ended.code}: {out.getvalue()}")
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
print(json.dumps(told))
"""
"""All in one process: most of the time is one import of JAX, torch and transformers."""


@pytest.mark.slow
def test_each_script_has_help_and_accepts_the_commands_of_the_docs() -> None:
    scripts = [str(path.relative_to(ROOT)) for path in sorted(BENCHMARKS.glob("*.py"))]
    documented = [list(each.words[1:]) for each in documented_commands() if each.words[0] == "python"]
    by_click = {"-m", "benchmarks/tpu_tune.py"}  # their options are read by test_docs_commands
    documented = [words for words in documented if words[0] not in by_click]
    assert len(documented) > 20
    done = subprocess.run(
        [sys.executable, "-c", READ_OPTIONS, json.dumps([[script, "--help"] for script in scripts] + documented)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{BENCHMARKS}", "PATH": "/usr/bin:/bin", "HOME": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout.splitlines()[-1])
    helps = dict(zip(scripts, told, strict=False))
    commands = {script for script in scripts if "__main__" in (ROOT / script).read_text()}
    assert len(commands) > 30
    starts = {name: "usage: " * (name in commands) for name in helps}
    assert {name: text for name, text in helps.items() if not text.lower().startswith(starts[name])} == {}
    assert {name: text for name, text in helps.items() if name not in commands and text} == {}
    read = [" ".join([*words, "->", text]) for words, text in zip(documented, told[len(scripts) :], strict=True)]
    assert [line for line in read if not line.endswith("-> read")] == []


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script and shrinks its workload."""

    def make(name: str, **small: object) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module(name)
        for constant, value in small.items():
            monkeypatch.setattr(module, constant, value)
        return module

    return make


def rows_written(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> list[Any]:
    """Runs the script's `main`; returns the rows of its table."""
    file = folder / "rows.json"
    monkeypatch.setattr(sys, "argv", ["script", "--json", str(file), *arguments])
    module.main()
    rows: list[Any] = json.loads(file.read_text())["rows"]
    return rows


def test_arrivals(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load("arrivals")
    rows = rows_written(module, monkeypatch, tmp_path, "--part", "128", "--repeats", "1")
    assert [row["burst"] for row in rows] == list(module.CASES)
    assert all(row["us per request"] > 0 for row in rows)


def test_batch_driver(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = rows_written(load("batch_driver"), monkeypatch, tmp_path, "--lines", "20", "--repeats", "1")
    assert [(row["way"], row["lines"]) for row in rows] == [("driver", 20), ("batch", 20), ("ordered", 20)]


def test_host_step(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load("host_step", STEPS=40, CONTEXTS=(96, 160), WINDOW=64)
    rows = rows_written(module, monkeypatch, tmp_path)
    assert [(row["rows"], row["second group"]) for row in rows] == [
        (rows, second) for rows in (64, 256) for second in ("", "", "window", "window", "state", "state")
    ]
    assert all(row["median us"] > 0 for row in rows)


def test_prefix_cache(load: Any) -> None:
    rows = load("prefix_cache", NODES=60, PROMPT=512, REPEATS=2, EVICTIONS=100).measure(64)
    assert [(row["groups"], row["evicts"]) for row in rows] == [(1, "full"), (2, "full"), (2, "swa")]
    assert all(row["match us"] > 0 and row["evict page us"] > 0 for row in rows)


def test_page_frees(load: Any) -> None:
    row = load("page_frees", POOL=2048).measure(512, 16, 2)
    assert row["pool us"] > 0
    assert row["unique and cat us"] > 0


def test_fair_prefill(load: Any) -> None:
    module = load("fair_prefill")
    for chunk, target, plain in ((512, None, True), (8192, 50.0, False)):
        row = module.run(chunk, target, 7.0, plain=plain)
        assert row["ITL p50"] > 8
        assert row["short TTFT p50"] > 8


def test_grammar_host(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("grammar_host").main(rows=2, steps=3)
    assert "a row and step: median" in capsys.readouterr().out


def test_expert_exchange(load: Any) -> None:
    """Counted chunk by chunk and row by row, of tokens that choose each expert equally often."""
    layer = load("tpu_expert_estimate").Layer.parse("qwen3-235b-a22b:v6e-32:32:64")
    found = load("tpu_expert_estimate").exchange(layer, layer.slice_, 250_000)
    experts, chosen, hidden = 128, 8, 4096
    reduced = sum(4 * 64 * hidden / 32 for _step in range(31)) * 2  # chunks of the sums, then of their totals
    choices = [(token, expert) for token in range(64) for expert in range(experts)]
    away = sum(token // 2 != expert // 4 for token, expert in choices) / 32 * chosen / experts
    assert found["sent"] * 1e3 == reduced == 2_031_616
    assert found["by_rows"] * 1e3 == away * 2 * hidden * 2 == 253_952
    cycles = reduced / 200e9 * 1.75e9  # a corner of the 4x8 grid has two links of 100 GB/s
    assert found["links"] * 1e3 == pytest.approx(cycles)
    assert found["exposed"] == pytest.approx(cycles / (250_000 + cycles))
    with pytest.raises(ValueError, match=r"v6e:2x4 has 8 devices, not 4"):
        load("tpu_expert_estimate").Layer.parse("qwen3-30b-a3b:v6e-8:4:64")


def test_stream_host(load: Any) -> None:
    module = load("stream_host", LENGTHS=(1024, 2048), TURNS=1, STREAMS=2)
    for times in (module.measure_completions(), module.measure_cumulative(), module.measure_scripts()):
        assert all(value > 0 for turns in times for value in turns)
        assert [row["output"] for row in module.table("what", times, "")] == [1024, 2048]
    assert len(asyncio.run(module.measure_clients())) == 2
    found = asyncio.run(module.measure_server(1024, 0.3, sockets=False))
    assert found["tokens/s"] > 0

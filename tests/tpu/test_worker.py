"""The compiling process when it ends early, and the report of `tpu.check` on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_jax.cli.main import run
from tpu import check as command
from tpu import worker
from tpu.figures import CacheEntries, Deployment, Message, ProgramFailure, ProgramFigures, Request
from tpu.shapes import load_shape

_DEPLOYMENT = Deployment(
    config=load_shape("llama-3.1-8b"),
    device_kind="TPU v6 lite",
    devices=1,
    box=(1, 1),
    hbm=2**34,
    weights=2**30,
    page=2**20,
    page_size=64,
    slot=0,
    num_pages=101,
    kv=101 * 2**20,
    pools="",
    max_rows=8,
    token_budget=32,
    max_context=1024,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    attention="pallas",
    programs=("decode 8", "mixed 32 tokens, 8 rows"),
    all_programs=2,
)
_FIGURES = ProgramFigures(
    name="decode 8",
    tokens=8,
    rows=8,
    seconds=1.0,
    arguments=2**30,
    temporaries=0,
    outputs=0,
    aliased=0,
    code=0,
    flops=1.0,
    accessed=1.0,
    collectives=(),
    kernels=(),
    estimate=None,
)


@pytest.fixture(autouse=True)
def _no_libtpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests compile nothing."""
    for module in (command, worker):
        monkeypatch.setattr(module, "require_compiler", lambda: None)


def _dies_at_the_second(folder: Path, send: Callable[[Message], None], request: object) -> None:
    send(_DEPLOYMENT)
    send(_FIGURES)
    os.write(2, b"Check failed: the tile is small\n")
    os.abort()


def _dies_at_once(folder: Path, send: Callable[[Message], None], request: object) -> None:
    os.abort()


def run_check(*arguments: str) -> int:
    return run(command.check, "check", ["llama-3.1-8b", "--topology", "v6e-1", *arguments])


def test_a_compiler_that_dies_is_a_failure_of_its_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as invalid options; and programs compiled before are shown."""
    monkeypatch.setattr(worker, "_compile_programs", _dies_at_the_second)
    assert run_check() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "1.0 s" in line] == ["decode"]
    assert "Check failed: the tile is small" in lines
    assert lines[-1] == (
        "DOES NOT COMPILE: 'mixed 32 tokens, 8 rows' does not compile: the compiling process ended with status -6"
    )


def test_a_compiler_that_dies_before_any_program_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_compile_programs", _dies_at_once)
    with pytest.raises(worker.ConfigError, match="the compiling process ended with status -6"):
        list(worker.compile_in_child(None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            replace(_FIGURES, temporaries=2**34),
            "requests. Would fit: --mem-fraction-static 0.86 or --tp 2",
        ),
        (
            ProgramFailure("decode 8", 1.0, "RESOURCE_EXHAUSTED: Exceeded hbm capacity by 1.00G."),
            "DOES NOT COMPILE: 'decode 8' does not compile: RESOURCE_EXHAUSTED: Exceeded hbm capacity by 1.00G. "
            "Would fit: --mem-fraction-static 0.86 or --tp 2",
        ),
    ],
)
def test_a_step_that_does_not_fit_gets_suggestions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, message: Message, told: str
) -> None:
    monkeypatch.setattr(command, "compile_in_child", lambda request: iter([_DEPLOYMENT, message]))
    assert run_check() == 1
    assert told in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("kept", "status", "told"),
    [
        (
            CacheEntries(12, 3),
            0,
            "12 compiled programs are in somewhere, 3 of them new\n"
            "Start the server with --compilation-cache-dir somewhere --page-size 64 --max-total-tokens 6400 and "
            "the options given here\n",
        ),
        (CacheEntries(0, 0), 1, "No compiled program was written to somewhere\n"),
    ],
)
def test_written_programs_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: CacheEntries, status: int, told: str
) -> None:
    def compiles(request: Request) -> Iterator[Message]:
        assert request.options.max_total_tokens == 6463
        yield _DEPLOYMENT
        yield _FIGURES
        yield replace(_FIGURES, name="mixed 32 tokens, 8 rows")
        yield kept

    monkeypatch.setattr(command, "compile_in_child", compiles)
    assert run_check("--write-cache", "somewhere", "--max-total-tokens", "6463") == status
    shown = capsys.readouterr()
    assert shown.err == told
    assert shown.out.splitlines()[-1].startswith("FITS: 2 of 2 programs compiled")


def test_a_context_beyond_the_maximum_is_reduced_and_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "compile_in_child", lambda request: iter([_DEPLOYMENT, _FIGURES]))
    assert run_check("--roofline-context", "1025") == 0
    shown = capsys.readouterr().out
    assert "WARNING  --roofline-context 1025 is beyond the maximum context: 1024 is used" in shown
    assert "Decode rows hold 1,024 tokens each" in shown
    assert run_check("--roofline-context", "1024") == 0
    assert "WARNING" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before anything is compiled."""
    (tmp_path / "file").write_text("")
    assert run_check("--write-cache", str(tmp_path / "file/cache")) == 2
    shown = capsys.readouterr()
    assert f"no programs can be written to {tmp_path}/file/cache: choose a writable" in shown.err
    assert not shown.out

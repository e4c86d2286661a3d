"""`generate` on an engine that echoes its prompt byte by byte."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest
from helpers.engine_fakes import ByteDecoder, ByteTokenizer
from helpers.recommended_sampling import (
    NEUTRAL,
    RECOMMENDED,
    make_recommending_checkpoint,
    recorded_sampling,
    values_of,
)
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.cli import generate as generate_module
from sglang_jax.cli.generate import Timing, generate, prompt_ids, stream_to_terminal
from sglang_jax.cli.main import run
from sglang_jax.engine import engine as engine_module
from sglang_jax.engine.engine import Engine
from sglang_jax.engine.types import GenerateOutput

pytestmark = pytest.mark.usefixtures("echo_engine")


def answer(
    capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "echo", status: int = 0
) -> tuple[str, str]:
    assert run(generate, "generate", ["--model-path", model, *arguments]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_chat_template_is_applied(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = answer(capsys, "héllo")
    assert text == "user: héllo\n\n"


def test_a_terminal_shows_what_is_loaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If standard error is a file, it gets only the summary line."""
    _, told = answer(capsys, "hello")
    assert "Loading" not in told
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    text, told = answer(capsys, "hello")
    assert told.splitlines()[0] == "Loading echo ..."
    assert text == "user: hello\n\n"


def test_a_raw_prompt_is_continued_and_a_chat_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each text starts with a space, as with sentencepiece, an answer starts without it."""
    continued: list[bool] = []

    def stream_decoder(
        self: ByteTokenizer, skip_special_tokens: bool, *, continues_text: bool, markers: Set[int]
    ) -> ByteDecoder:
        continued.append(continues_text)
        return ByteDecoder(skip_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "stream_decoder", stream_decoder)
    answer(capsys, "--raw", "hello")
    answer(capsys, "hello")
    assert continued == [True, False]


class WithBos(ByteTokenizer):
    """Prepends token 257 to texts, like tokenizers with a beginning-of-sequence token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [257] * add_special_tokens + super().encode(text)


def test_special_tokens_are_not_added_to_a_rendered_template() -> None:
    assert prompt_ids(WithBos(), "hi", system=None, raw=True) == [257, *b"hi"]
    assert prompt_ids(WithBos(), "hi", system=None, raw=False) == [*b"user: hi\n"]


def test_a_system_message_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = answer(capsys, "--system", "be brief", "hello")
    assert text == "system: be brief\nuser: hello\n\n"


def test_raw_leaves_the_template_out(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = answer(capsys, "--raw", "hello")
    assert text == "hello\n"
    _, message = answer(capsys, "--raw", "--system", "be brief", "hello", status=2)
    assert "--system" in message


def test_the_summary_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, line = answer(capsys, "--raw", "hello", model="echo:0.01")
    assert line.count("\n") == 1
    assert line.startswith("6 tokens, ")
    assert "tok/s, TTFT 0." in line
    assert "prompt 5 tokens (2 cached), finished: stop" in line


def test_a_prompt_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a first token, the summary has no time for it."""
    text, line = answer(capsys, "--raw", "--max-new-tokens", "0", "hello")
    assert text == "\n"
    assert re.fullmatch(r"0 tokens, \d\.\d{3} s, prompt 5 tokens \(2 cached\), finished: length\n", line)


def test_sampling_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    text, line = answer(capsys, "--raw", "--max-new-tokens", "3", "hello")
    assert text == "hel\n"
    assert "finished: length" in line
    text, _ = answer(capsys, "--raw", "--stop", "x", "--stop", "lo", "hello")
    assert text == "hel\n"


def test_the_prompt_may_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    text, _ = answer(capsys, "--raw", "-")
    assert text == "from a pipe\n"


def test_sampling_options_left_out_are_the_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "Engine", Engine)  # not the echo engine
    folder = str(make_recommending_checkpoint(tmp_path))
    with recorded_sampling() as seen:
        answer(capsys, "hello", model=folder)
        answer(capsys, "hello", "--temperature", "1", "--top-k", "-1", "--max-new-tokens", "3", model=folder)
        answer(capsys, "hello", "--sampling-defaults", "openai", model=folder)
    assert [values_of(one) for one in seen] == [RECOMMENDED, RECOMMENDED | {"temperature": 1.0, "top_k": -1}, NEUTRAL]
    assert [one.max_new_tokens for one in seen] == [128, 3, 128]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1", "hello"], ["--temperature", "-1", "[0, 100]"]),
        (["--top-k", "0", "hello"], ["--top-k", "0"]),
        (["--max-new-tokens", "-1", "hello"], ["--max-new-tokens", "-1"]),
        (["--page-size", "3", "hello"], ["--page-size", "3"]),
        ([], ["PROMPT"]),
        (["--raw", ""], ["prompt"]),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    text, message = answer(capsys, *arguments, status=2)
    assert text == ""
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_a_missing_checkpoint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, message = answer(capsys, "hello", model="missing", status=2)
    assert message == "Error: no checkpoint at 'missing'\n"


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_ends_the_answer_and_the_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())  # tests of other folders may still have servers
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))

    def stream(outputs: Iterable[GenerateOutput], timing: Timing) -> None:
        timer.start()  # only when the engine exists: before, an interrupt ends the process
        stream_to_terminal(outputs, timing)

    monkeypatch.setattr(generate_module, "stream_to_terminal", stream)
    text, line = answer(capsys, "--raw", "z" * 200, "--max-new-tokens", "200", model="echo:0.05", status=130)
    timer.join()
    assert 1 <= text.count("z") < 100
    assert line.rstrip().endswith("interrupted")
    started = set(threading.enumerate()) - before
    assert not [thread.name for thread in started if thread.name.startswith("sglang-jax")]


LOADING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from sglang_jax.cli.main import cli, run
from sglang_jax.engine import engine

class Engine:
    def __init__(self, config):
        print("loading", flush=True)
        try:
            time.sleep(60)
        finally:
            time.sleep(60)  # as for a thread that is in the middle of something

engine.Engine = Engine
sys.exit(run(cli, "sglang-jax", ["generate", "hello"]))
"""


def test_an_interrupt_while_the_model_loads_takes_effect_at_once() -> None:
    command = [sys.executable, "-c", LOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 130
    assert errors == b"\nInterrupted.\n"


def test_two_threads_may_import_from_transformers(tmp_path: Path) -> None:
    """One thread loads a tokenizer, the other a model of transformers."""
    make_tiny_checkpoint(tmp_path, "llama")
    options = ("--backend", "torch", "--model-impl", "transformers", "--dtype", "float32", "--max-tokens", "2")
    command = [sys.executable, "-m", "sglang_jax", "generate", "--model-path", str(tmp_path), *options, "hello"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stderr

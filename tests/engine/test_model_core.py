"""What is loaded for a checkpoint: config, tokenizer, backend, warm-up. The backend runs no model."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.recommended_sampling import (
    NEUTRAL,
    RECOMMENDED,
    make_recommending_checkpoint,
    recorded_sampling,
    values_of,
)
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax import Engine, SamplingParams
from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint import Checkpoint
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine import model_core
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.runner.protocol import Runner


class WarmRunner(FakeRunner):
    """Counts its calls at the start and at the end."""

    warm_ups = 0
    closed = 0

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        WarmRunner.warm_ups += 1
        for done in range(4):
            progress(done, 3, f"bucket {done}")

    def close(self) -> None:
        WarmRunner.closed += 1


def create_runner(config: EngineConfig, checkpoint: Checkpoint) -> WarmRunner:
    pool = PoolSpec("full", CacheKind.FULL, 9, config.page_size)
    return WarmRunner(RunnerSpec((pool,), 4, 64, 256, checkpoint.config.vocab_size))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_core, "load_backend", lambda config: create_runner)
    monkeypatch.setattr(WarmRunner, "warm_ups", 0)
    monkeypatch.setattr(WarmRunner, "closed", 0)
    return make_tiny_checkpoint(tmp_path)


def test_engine_over_a_checkpoint(folder: Path) -> None:
    with Engine(model_path=str(folder), page_size=16) as engine:
        info = engine.model_info
        assert (info.model_path, info.architecture) == (str(folder), "llama")
        assert info.context_length == 8 * 16  # the pool holds less than the runner's rows could
        ids = engine.encode("hello")
        output = engine.generate("hello", SamplingParams(max_new_tokens=6, seed=1))
        assert not isinstance(output, list)
        wanted = Oracle(info.vocab_size).output(ids, 1, 6, info.eos_token_ids)
        assert output.output_ids == wanted
        stopped = wanted[-1] in info.eos_token_ids
        assert output.text == engine.decode(wanted[:-1] if stopped else wanted)
        assert engine.state()["backend"] == "fake"
    assert (WarmRunner.warm_ups, WarmRunner.closed) == (1, 1)


def test_the_warm_up_shows_a_progress_bar_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Engine(model_path=str(folder)):
        pass
    assert "3/3" in capsys.readouterr().err


def test_the_warm_up_writes_log_lines_elsewhere(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    with Engine(model_path=str(folder)):
        pass
    assert "Warming up" not in caplog.text  # a short one needs none
    monkeypatch.setattr(model_core, "SECONDS_BETWEEN_LINES", 0.001)
    steps = WarmRunner.warm_up

    def slow(self: WarmRunner, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        def wait_for_a_line(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            _wait_for(lambda: f"Warming up: {done} of {total} programs" in caplog.text)

        steps(self, wait_for_a_line, first_only=first_only)

    monkeypatch.setattr(WarmRunner, "warm_up", slow)
    with Engine(model_path=str(folder)):
        pass
    told = re.findall(r"Warming up: (\d) of 3 programs, (\d+ s so far|about \d+ s left) \(the first", caplog.text)
    assert [(done, "left" in left) for done, left in dict(told).items()] == [
        ("0", False),
        ("1", True),
        ("2", True),
        ("3", True),
    ]
    assert capsys.readouterr().err.count("\r") == 0


def test_a_long_load_logs_that_it_continues(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(model_core, "SECONDS_BETWEEN_LINES", 0.001)
    load = model_core.load_backend

    def slow(config: EngineConfig) -> object:
        create = load(config)

        def create_slowly(config: EngineConfig, checkpoint: Checkpoint) -> Runner:
            _wait_for(lambda: re.search(r"Loading \S+: \d+ s so far", caplog.text) is not None)
            return create(config, checkpoint)

        return create_slowly

    monkeypatch.setattr(model_core, "load_backend", slow)
    with Engine(model_path=str(folder)):
        pass
    caplog.clear()
    time.sleep(0.02)
    assert "so far" not in caplog.text  # it ends with the load


def _wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_warm_up_can_be_left_out(folder: Path) -> None:
    with Engine(model_path=str(folder), skip_warmup=True):
        pass
    assert WarmRunner.warm_ups == 0


def test_tokenizer_of_another_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not-there"):
        Engine(model_path=str(folder), tokenizer_path=str(tmp_path / "not-there"))
    assert WarmRunner.closed == WarmRunner.warm_ups


def test_chat_template_of_the_server(folder: Path) -> None:
    config = ServerConfig(model_path=str(folder), chat_template="{{ messages[0].content }}!")
    assert model_core.load_text_tokenizer(config).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_backend_that_refuses_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig) -> object:
        raise ConfigError("no backend 'jax' is installed")

    monkeypatch.setattr(model_core, "load_backend", refuse)
    with pytest.raises(ConfigError, match=r"^no backend 'jax' is installed$"):
        Engine(model_path=str(folder))


def test_sampling_defaults_of_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = make_recommending_checkpoint(tmp_path)
    with recorded_sampling() as seen, Engine(model_path=str(folder)) as engine:
        engine.generate("hello")
        engine.generate("hello", {"max_new_tokens": 2, "temperature": 1.0})
        engine.generate("hello", SamplingParams(max_new_tokens=2, top_k=7))
        engine.generate(["hello"] * 2, [{"top_p": 0.5}, SamplingParams()])
    assert values_of(seen[0]) == RECOMMENDED
    assert seen[0].max_new_tokens == SamplingParams().max_new_tokens
    assert values_of(seen[1]) == RECOMMENDED | {"temperature": 1.0}
    assert values_of(seen[2]) == NEUTRAL | {"top_k": 7}
    assert values_of(seen[3]) == RECOMMENDED | {"top_p": 0.5}
    assert values_of(seen[4]) == NEUTRAL
    [line] = [line for line in caplog.messages if line.startswith("Sampling defaults")]
    assert "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.1" in line


def test_sampling_defaults_may_be_turned_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = make_recommending_checkpoint(tmp_path, temperature=-1.0)  # and are then not even read
    with recorded_sampling() as seen, Engine(model_path=str(folder), sampling_defaults="openai") as engine:
        engine.generate("hello")
    assert values_of(seen[0]) == NEUTRAL
    assert not [line for line in caplog.messages if line.startswith("Sampling defaults")]


def test_an_invalid_sampling_default_is_refused(tmp_path: Path) -> None:
    folder = make_recommending_checkpoint(tmp_path, top_p=1.5)
    with recorded_sampling(), pytest.raises(CheckpointError, match=r"top_p must be in \(0, 1\], got 1\.5; --sampling"):
        Engine(model_path=str(folder))


@pytest.mark.parametrize("within", ["", "snapshots"], ids=["empty", "a level too high"])
def test_the_error_for_a_folder_without_a_checkpoint_says_so(folder: Path, within: str) -> None:
    """And does not complain about the tokenizer, which is searched first."""
    wrong = folder / "models"
    (wrong / within).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"^the folder {wrong} holds no checkpoint: neither config.json"):
        model_core.load_text_tokenizer(EngineConfig(model_path=str(wrong)))
    with pytest.raises(CheckpointError, match=f"^the folder {wrong} holds no checkpoint: neither config.json"):
        Engine(model_path=str(wrong))


def test_a_separate_tokenizer_needs_no_checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    alone = tmp_path_factory.mktemp("alone")
    with pytest.raises(CheckpointError, match=f"^the folder {alone} has no tokenizer.json"):
        model_core.load_text_tokenizer(EngineConfig(model_path=str(folder), tokenizer_path=str(alone)))
    for file in folder.glob("tokenizer*"):
        (alone / file.name).write_bytes(file.read_bytes())
    config = EngineConfig(model_path=str(folder), tokenizer_path=str(alone))
    assert model_core.load_text_tokenizer(config).encode("abc")

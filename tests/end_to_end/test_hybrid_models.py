"""A model with recurrent layers on both backends: the scheduler, cache and runner together give transformers'
outputs, with any cache hits, any chunks and any retractions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scheduling import RecordingChannel
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import AttentionBackend, Backend, EngineConfig, KVCacheDtype, MambaDtype, SpeculativeAlgorithm
from sglang_jax.errors import ConfigError
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.mem_cache.state_group import MIN_GAIN
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import NewRequest, SessionTurn
from sglang_jax.scheduler.scheduler import Scheduler

PAGE_SIZE = 4
OUTPUT = 22
FAMILY = "qwen3_5_text"


def prompts() -> list[list[int]]:
    """Some share a prefix; the fourth continues where the first ends."""
    rng = np.random.default_rng(3)
    shared, *tails = (rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (37, 5, 17, 2, 40))
    return [shared + tail for tail in tails] + [tails[3][:9], shared[:21]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), FAMILY)


@pytest.fixture(
    scope="module",
    params=[
        (FAMILY, Backend.JAX, False),
        pytest.param((FAMILY, Backend.JAX, True), marks=pytest.mark.soak),
        (FAMILY, Backend.TORCH, False),
        (FAMILY, Backend.TORCH, True),
        ("mamba2", Backend.TORCH, False),
    ],
    ids=lambda param: f"{param[0]}-{param[1].value}{' with drafts' if param[2] else ''}",
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Models with states and pages, and with states only. The number of drafts is the maximum that fits: the
    scheduler does not measure step times here."""
    family, backend, drafting = request.param
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp(family), family)
    config = EngineConfig(
        model_path=str(folder),
        backend=backend,
        device="cpu",
        dtype="float32",
        page_size=PAGE_SIZE,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_mamba_cache_size=10,
        max_total_tokens=40 * PAGE_SIZE,
        context_length=128,
        skip_warmup=True,
        debug_memory=True,
    )
    algorithm = SpeculativeAlgorithm.NGRAM if drafting else SpeculativeAlgorithm.NONE
    loading = config.model_copy(update={"speculative_algorithm": algorithm})
    runner = load_backend(loading)(loading, open_checkpoint(str(folder)))
    yield make_tiny_model(family), config, runner
    runner.close()


def most_likely(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token by transformers after the prompt and after each output token except the last."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [16, 7])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
def test_outputs_are_those_of_transformers(
    served: tuple[torch.nn.Module, EngineConfig, Runner], cached: bool, chunk: int
) -> None:
    model, config, runner = served
    options = {"disable_radix_cache": not cached, "chunked_prefill_size": chunk}
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config.model_copy(update=options), channel)
    sampling = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    asked: dict[int, list[int]] = {}
    for _ in range(2):
        for prompt in prompts():
            number = len(asked) + 1
            asked[number] = prompt
            tokens = np.array(prompt, np.int32).tobytes()
            scheduler.add(NewRequest(id=number, token_ids=tokens, sampling=sampling, stream=True))
        steps = 0
        while not scheduler.idle:
            scheduler.step()
            check_everything(scheduler.cache)
            steps += 1
            if steps % 13 == 0 and scheduler.num_running > 1:
                scheduler.retract_newest()
    for number, prompt in asked.items():
        output = channel.output(number)
        assert len(output) == OUTPUT
        assert output == most_likely(model, prompt, output)
    begins = [number for number in asked if channel.cached[number] >= 32]
    assert begins == ([2, 3, 4, 7, 8, 9, 10] if cached else []), "from the second request of those that begin alike on"
    assert scheduler.log.counts.retractions > 2


def test_session_turns_equal_transformers(served: tuple[torch.nn.Module, EngineConfig, Runner]) -> None:
    """Two sessions, and a request between their turns that takes the unpinned slots."""
    model, config, runner = served
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)
    history: dict[str, list[int]] = {"a": [], "b": []}
    rng = np.random.default_rng(5)
    for name in history:
        scheduler.sessions.open(OpenSession(name, "", True))
    for number in range(12):
        name, new = "abc"[number % 3], rng.integers(3, TINY_VOCAB_SIZE, 5 + number).tolist()
        turn = None if name == "c" else SessionTurn(name, "", str(number))
        tokens = np.array(new, np.int32).tobytes()
        scheduler.add(NewRequest(id=number, token_ids=tokens, sampling=sampling, stream=True, session=turn))
        while not scheduler.idle:
            scheduler.step()
            check_everything(scheduler.cache)
        before = history.get(name, [])
        assert channel.output(number) == most_likely(model, [*before, *new], channel.output(number))
        again = PAGE_SIZE + MIN_GAIN
        assert channel.cached[number] >= len(before) - 1 - again, "new is what is new, and little before it"
        if name in history:
            history[name] = [*before, *new, *channel.output(number)]
    for name in history:
        scheduler.sessions.close(name, "")
    assert scheduler.flush_cache()
    assert all(group.pool.num_free == group.pool.total for group in scheduler.cache.groups)


@pytest.mark.parametrize("backend", [Backend.JAX, Backend.TORCH])
def test_states_may_have_half_the_size(backend: Backend, folder: Path) -> None:
    def bytes_of(dtype: MambaDtype) -> int:
        config = EngineConfig(
            model_path=str(folder),
            backend=backend,
            device="cpu",
            dtype="float32",
            skip_warmup=True,
            mamba_ssm_dtype=dtype,
            max_total_tokens=160,
            max_running_requests=4,
            max_mamba_cache_size=10,
        )
        runner = load_backend(config)(config, open_checkpoint(str(folder)))
        report = runner.report()
        runner.close()
        assert report.details["mamba_ssm_dtype"] == dtype.value
        return report.kv_bytes

    matrices = (1 + 10) * 4 * 16 * 8
    assert bytes_of(MambaDtype.FLOAT32) - bytes_of(MambaDtype.BFLOAT16) == 2 * matrices


@pytest.mark.parametrize(
    ("backend", "dtype", "attention"),
    [
        (Backend.JAX, KVCacheDtype.INT8, AttentionBackend.AUTO),
        (Backend.TORCH, KVCacheDtype.FLOAT8_E4M3, AttentionBackend.AUTO),
        (Backend.TORCH, KVCacheDtype.INT8, AttentionBackend.AUTO),
        (Backend.TORCH, KVCacheDtype.AUTO, AttentionBackend.SAGE),
    ],
)
def test_keys_and_values_of_8_bits_with_states(
    backend: Backend, dtype: KVCacheDtype, attention: AttentionBackend, folder: Path
) -> None:
    """A hit gives what was computed before, and rounding changes few tokens of transformers' output."""
    config = EngineConfig(
        model_path=str(folder),
        backend=backend,
        device="cpu",
        dtype="float32",
        kv_cache_dtype=dtype,
        attention_backend=attention,
        page_size=PAGE_SIZE,
        chunked_prefill_size=16,
        max_running_requests=2,
        max_mamba_cache_size=10,
        max_total_tokens=40 * PAGE_SIZE,
        context_length=128,
        skip_warmup=True,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    pages, slots = 41 * PAGE_SIZE * 2 * 2 * 32, 11 * 4 * (4 * 16 * 8 + 3 * (2 * 2 * 16 + 4 * 8))
    own_scales = backend is Backend.TORCH and dtype is not KVCacheDtype.FLOAT8_E4M3
    assert (runner.report().kv_bytes == pages + slots) != own_scales, "a scale of each token takes some more"
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    sampling = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    prompt = prompts()[0]
    for number in (1, 2):
        tokens = np.array(prompt, np.int32).tobytes()
        scheduler.add(NewRequest(id=number, token_ids=tokens, sampling=sampling, stream=True))
        while not scheduler.idle:
            scheduler.step()
    runner.close()
    assert channel.output(2) == channel.output(1)
    assert channel.cached[2] >= 32
    expected = most_likely(make_tiny_model(FAMILY), prompt, channel.output(1))
    assert np.mean(np.array(channel.output(1)) == expected) > 0.8


@pytest.mark.parametrize("backend", [Backend.JAX, Backend.TORCH])
def test_an_unsupported_kv_dtype_is_refused(backend: Backend, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "mamba2")
    config = EngineConfig(
        model_path=str(folder), backend=backend, device="cpu", kv_cache_dtype=KVCacheDtype.FLOAT8_E4M3
    )
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8_e4m3: the model has only recurrent states"):
        load_backend(config)(config, open_checkpoint(str(folder)))


@pytest.mark.parametrize("backend", [Backend.JAX, Backend.TORCH])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tp_size": 3}, "a delta net of 4 value heads and 2 key heads cannot be spread over 3"),
        (
            {"speculative_algorithm": SpeculativeAlgorithm.DRAFT},
            "has layers with recurrent states, which wrong drafts",
        ),
    ],
)
def test_options_incompatible_with_states_are_refused(
    backend: Backend, option: dict[str, object], message: str, folder: Path
) -> None:
    """Numbers of devices that do not divide the states, and a draft model with states."""
    if "speculative_algorithm" in option:
        option |= {"speculative_draft_model_path": str(folder)}
    config = EngineConfig(model_path=str(folder), backend=backend, device="cpu", **option)
    with pytest.raises(ConfigError, match=message):
        load_backend(config)(config, open_checkpoint(str(folder)))

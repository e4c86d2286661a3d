"""Models with windowed layers and a pool for each group of layers: the scheduler, runner and kernels together give
transformers' outputs, while pages behind windows are freed, cached, evicted and recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.family_cases import FAMILIES
from helpers.scheduling import RecordingChannel
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.mem_cache.group import WindowGroup
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

PAGE_SIZE = 4
OUTPUT = 22
CASES = {"gemma3": 7, "mistral": 8, "gemma4": 8}
"""Families, and their windows: full and windowed layers, only windowed ones, and pages of another shape in each
group."""


def prompts() -> list[list[int]]:
    """Some share a prefix longer than a window; the fourth continues where the first ends."""
    rng = np.random.default_rng(3)
    shared, *tails = (rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (37, 5, 17, 2, 40))
    return [shared + tail for tail in tails] + [tails[3][:9], shared[:21]]


@pytest.fixture(scope="module", params=[(family, backend) for family in CASES for backend in ("jax", "torch")])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    family, backend = request.param
    case = FAMILIES[family]
    folder: Path = tmp_path_factory.mktemp(family)
    make_tiny_checkpoint(folder, case.architecture, **case.changes)
    model = make_tiny_model(case.architecture, **case.changes)
    config = EngineConfig(
        model_path=str(folder),
        backend=Backend(backend),
        device="cpu",
        dtype="float32",
        page_size=PAGE_SIZE,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=40 * PAGE_SIZE,
        context_length=128,
        debug_memory=True,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    yield family, model, config, runner
    runner.close()


def most_likely(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token by transformers after the prompt and after each output token except the last."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_outputs_are_those_of_transformers(served: tuple[str, torch.nn.Module, EngineConfig, Runner]) -> None:
    family, model, config, runner = served
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    windows = [group for group in scheduler.cache.groups if isinstance(group, WindowGroup)]
    assert [group.window for group in windows] == [CASES[family]]
    sampling = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    asked: dict[int, list[int]] = {}
    most = 0
    for turn in range(2):
        for prompt in prompts():
            number = len(asked) + 1
            asked[number] = prompt
            tokens = np.array(prompt, np.int32).tobytes()
            scheduler.add(NewRequest(id=number, token_ids=tokens, sampling=sampling, stream=True))
        while not scheduler.idle:
            scheduler.step()
            check_everything(scheduler.cache)
            for row, record in scheduler.cache.open_rows.items():
                if record.kv_allocated_len > scheduler.rows.at(row).prefill_len + PAGE_SIZE:
                    held = scheduler.cache.pages_for(record.kv_allocated_len) - windows[0].held_from(row)
                    most = max(most, held)
        assert turn == 0 or channel.cached[7] > 0, "the second time prefixes are cached"
    for number, prompt in asked.items():
        output = channel.output(number)
        assert len(output) == OUTPUT
        assert output == most_likely(model, prompt, output)
    assert windows[0].num_evicted > 0, "the pool was never short"
    assert 0 < most <= windows[0].reach + 2, "pages behind the window are kept"

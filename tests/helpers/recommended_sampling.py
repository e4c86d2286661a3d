"""A checkpoint that recommends sampling values, on a backend that records the sampling values of its requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint import Checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.engine import model_core
from sglang_jax.runner.fake import FakeHandle, FakeRunner
from sglang_jax.runner.plan import PoolSpec, RunnerSpec, StepPlan
from sglang_jax.sampling import SamplingParams

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def make_recommending_checkpoint(folder: Path, **recommended: float) -> Path:
    """A tiny checkpoint whose generation_config.json has these values, or `RECOMMENDED`."""
    make_tiny_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps(recommended or RECOMMENDED))
    return folder


class Recorder(FakeRunner):
    """Appends the parameters of every request that gets a row to a list."""

    def __init__(self, spec: RunnerSpec, seen: list[SamplingParams]) -> None:
        super().__init__(spec)
        self._seen = seen

    def launch(self, plan: StepPlan) -> FakeHandle:
        self._seen += [update.sampling for update in plan.row_updates.sampling]
        return super().launch(plan)


@contextmanager
def recorded_sampling() -> Iterator[list[SamplingParams]]:
    """Checkpoints opened in this block run on a `Recorder`; returns its list."""
    seen: list[SamplingParams] = []

    def create_runner(config: EngineConfig, checkpoint: Checkpoint) -> Recorder:
        pool = PoolSpec("full", CacheKind.FULL, 65, config.page_size)
        return Recorder(RunnerSpec((pool,), 4, 64, 256, checkpoint.config.vocab_size), seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_core, "load_backend", lambda config: create_runner)
        yield seen


def values_of(sampling: SamplingParams) -> dict[str, float]:
    """The fields that a model may recommend."""
    return {name: getattr(sampling, name) for name in NEUTRAL}

"""The server that the attacks of `benchmarks/abuse.py` are made on."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from helpers.scheduling import RecordingChannel

from sglang_jax.config import EngineConfig
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest


def test_its_core_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that the server has by default, of which some leave it to the runner."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    abuse = importlib.import_module("abuse")
    channel = RecordingChannel()
    core = abuse.load_empty(EngineConfig(), channel)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    channel.inbox.append(NewRequest(id=1, token_ids=prompt, sampling=SamplingParams(max_new_tokens=2)))
    for _ in range(4):
        core._loop.turn()
        if 1 in channel.finished:
            break
    assert channel.finished[1].num_tokens == 2
    core.close()

"""A step does only the sampling work that its rows need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.samplers import decode_plan

from sglang_jax.runner.plan import SamplingUpdate
from sglang_jax.sampling.params import SamplingParams
from torch_backend.sampler import SamplerInputs, sample
from torch_backend.sampling_state import Needs, RowNeeds, SamplingState

ROWS = 5
GREEDY = SamplingParams(temperature=0.0)


def update(row: int, sampling: SamplingParams, stop_ids: tuple[int, ...] = (), prompt_len: int = 10) -> SamplingUpdate:
    history = np.arange(prompt_len, dtype=np.int32) if sampling.counts_tokens else None
    return SamplingUpdate(row, sampling, 0, prompt_len, np.array(stop_ids, np.int32), history)


def needs_of(needs: RowNeeds, *rows: int, kv_len: int = 10) -> Needs:
    return needs.of_step(decode_plan(np.array(rows, np.int32), np.full(len(rows), kv_len, np.int32)))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, Needs.NOTHING),
        ({"temperature": 0.1}, Needs.RANDOM),
        # filters change no greedy token
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, Needs.NOTHING),
        ({"temperature": 0.1, "top_k": 5}, Needs.RANDOM | Needs.CUT),
        ({"temperature": 0.1, "top_p": 0.5}, Needs.RANDOM | Needs.CUT),
        ({"temperature": 0.1, "min_p": 0.5}, Needs.RANDOM),
        ({"logit_bias": {3: 1.0}}, Needs.BIAS),
        ({"frequency_penalty": 0.1}, Needs.PENALTIES),
        ({"presence_penalty": -0.1}, Needs.PENALTIES),
        ({"repetition_penalty": 1.1, "temperature": 1.0}, Needs.PENALTIES | Needs.RANDOM),
        ({"min_new_tokens": 3}, Needs.STOP_MASK),
    ],
)
def test_needs_of_a_row(changes: dict[str, object], wanted: Needs) -> None:
    needs = RowNeeds(ROWS)
    needs.replace([update(2, replace(GREEDY, **changes), stop_ids=(7,))])  # type: ignore[arg-type]
    assert needs_of(needs, 2) == wanted
    assert needs_of(needs, 0, 2, 1) == wanted
    assert needs_of(needs, 0, 1) == Needs.NOTHING
    needs.replace([update(2, GREEDY)])
    assert needs_of(needs, 2) == Needs.NOTHING


def test_needs_of_rows_are_combined() -> None:
    needs = RowNeeds(ROWS)
    needs.replace([update(0, SamplingParams()), update(3, replace(GREEDY, logit_bias={1: 1.0}))])
    assert needs_of(needs, 3, 0) == Needs.RANDOM | Needs.BIAS
    assert needs_of(needs, 3, 4) == Needs.BIAS


def test_a_chunk_that_samples_nothing_needs_nothing() -> None:
    needs = RowNeeds(ROWS)
    needs.replace([update(0, SamplingParams()), update(3, replace(GREEDY, logit_bias={1: 1.0}))])
    plan = decode_plan(np.array([0, 3], np.int32), np.array([10, 10], np.int32))
    assert needs.of_step(replace(plan, samples=np.array([False, True]))) == Needs.BIAS
    assert needs.of_step(replace(plan, samples=np.array([False, False]))) == Needs.NOTHING


def test_stop_ids_are_masked_until_min_tokens() -> None:
    needs = RowNeeds(ROWS)
    needs.replace([update(1, replace(GREEDY, min_new_tokens=3), stop_ids=(7,)), update(2, GREEDY, stop_ids=(7,))])
    assert [bool(needs_of(needs, 1, 2, kv_len=length)) for length in (10, 12, 13, 50)] == [True, True, False, False]
    needs.replace([update(1, replace(GREEDY, min_new_tokens=3))])
    assert needs_of(needs, 1) == Needs.NOTHING


class NoSampler:
    """Supports only greedy sampling."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1).to(torch.int32)

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        raise AssertionError("nothing is to be sampled")


def test_work_that_no_row_needs_is_skipped() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    state = SamplingState.empty(1, 3, torch.device("cpu"))
    rows, kv_lens = torch.tensor([0]), torch.tensor([4], dtype=torch.int32)
    state.bias_ids[0, 0], state.bias_values[0, 0] = 0, 9.0
    assert sample(logits, state, rows, kv_lens, Needs.NOTHING, NoSampler()).tolist() == [1]
    assert sample(logits, state, rows, kv_lens, Needs.BIAS, NoSampler()).tolist() == [0]
    assert logits.tolist() == [[0.0, 2.0, 1.0]]


def test_a_row_with_its_length_on_the_device_may_be_shorter_than_planned() -> None:
    """By the maximum number of drafts that a step in flight may reject: its stop ids stay masked for that long."""
    needs = RowNeeds(ROWS)
    needs.replace([update(1, replace(GREEDY, min_new_tokens=6), (7,))])

    def masked(kv_len: int, length_on_device: bool) -> bool:
        plan = decode_plan(np.array([1], np.int32), np.array([kv_len], np.int32))
        plan = replace(plan, length_on_device=np.array([True]) if length_on_device else None)
        return bool(needs.of_step(plan, max_samples=4) & Needs.STOP_MASK)

    assert [masked(length, length_on_device=False) for length in (15, 16, 18, 19)] == [True, False, False, False]
    assert [masked(length, length_on_device=True) for length in (15, 16, 18, 19)] == [True, True, True, False]

"""Steps whose rows have drafts: states and outputs equal those of as many successive decode steps; and Triton's
kernels, in the interpreter, equal torch's operations."""

from __future__ import annotations

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.state_steps import DRAFTED_SLOTS, drafted_step, random_scan
from helpers.triton_interpreter import shuffled_programs

from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs
from torch_backend.recurrent.triton import TritonStates

assert helpers.triton_interpreter  # imported for its side effects

STEP = drafted_step()
IMPLEMENTATIONS = pytest.mark.parametrize(
    "states", [NativeStates(), NativeStates(fixed=True), TritonStates()], ids=["torch", "fixed", "triton"]
)


def rows_of(begin: list[int], own: list[int], drafts: list[int] | None, padding: int = 0) -> StateRows:
    count = len(own) + padding
    none = [0] * padding
    return StateRows(
        begin=torch.tensor(begin + none),
        fresh=torch.tensor([False] * len(own) + [True] * padding),
        own=torch.tensor(own + none),
        sequences=torch.arange(0),
        offsets=torch.arange(0),
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        num_decode=count,
        drafts=None if drafts is None else torch.tensor(drafts + none),
    )


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values in the slots that rows start from, NaN in all others."""
    pool = torch.full((DRAFTED_SLOTS, *shape), torch.nan)
    begun = sorted(set(STEP.begin))
    pool[begun] = torch.from_numpy(np.random.default_rng(2).standard_normal((len(begun), *shape), np.float32))
    return pool.to(dtype)


def some(array: np.ndarray | None, first: int, last: int, padding: int = 0) -> torch.Tensor | None:
    if array is None:
        return None
    part = array[first:last].astype(np.float32)
    return torch.from_numpy(np.concatenate((part, np.zeros((padding, *part.shape[1:]), np.float32))))


@IMPLEMENTATIONS
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_after_drafts_equal_those_of_decode_steps(
    states: StateImplementation, delta: bool, dtype: torch.dtype
) -> None:
    count, arrays = len(STEP.own), random_scan(delta)
    pool = filled(4, 8, 16, dtype=dtype)
    expected = pool.clone()
    rows = rows_of(STEP.begin, STEP.own, STEP.drafts, padding=2)
    with shuffled_programs(3):
        found = states.prepare(rows).scan(ScanInputs(*(some(array, 0, count, 2) for array in arrays)), pool)
    for sequence in range(count):
        one = rows_of([STEP.source(sequence)], [STEP.own[sequence]], None)
        part = ScanInputs(*(some(array, sequence, sequence + 1) for array in arrays))
        output = states.prepare(one).scan(part, expected)
        torch.testing.assert_close(found[sequence], output[0], rtol=1e-6, atol=1e-6, msg=f"sequence {sequence}")
    torch.testing.assert_close(pool[1:], expected[1:], rtol=1e-6, atol=1e-6, equal_nan=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 4])
def test_conv_inputs_after_drafts_equal_those_of_decode_steps(states: StateImplementation, width: int) -> None:
    count, rng = len(STEP.own), np.random.default_rng(4)
    x = torch.from_numpy(rng.standard_normal((count + 2, 300), np.float32))
    weight = torch.from_numpy(rng.standard_normal((300, width), np.float32))
    pool = filled(width - 1, 300)
    expected = pool.clone()
    rows = rows_of(STEP.begin, STEP.own, STEP.drafts, padding=2)
    with shuffled_programs(3):
        found = states.prepare(rows).convolve(x, weight, None, pool)
    for sequence in range(count):
        one = rows_of([STEP.source(sequence)], [STEP.own[sequence]], None)
        output = states.prepare(one).convolve(x[sequence : sequence + 1], weight, None, expected)
        torch.testing.assert_close(found[sequence], output[0], rtol=1e-6, atol=1e-6, msg=f"sequence {sequence}")
    assert torch.equal(pool[1:].nan_to_num(9.0), expected[1:].nan_to_num(9.0))

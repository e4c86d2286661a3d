"""Convolutions and matrices of recurrent layers in steps of rows of any length, against token-by-token computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.state_steps import BLOCK, StateStep, random_scan, splits

from torch_backend.recurrent import scan as scan_module
from torch_backend.recurrent.native import convolve
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs, reference_scan, scan

SLOTS = 16


def test_block_lengths_match_the_splits() -> None:
    assert scan_module.BLOCK == BLOCK


def rows_of(step: StateStep) -> StateRows:
    starts = np.concatenate(([0], np.cumsum(step.counts)))
    sequences = np.repeat(np.arange(len(step.counts)), step.counts)
    return StateRows(
        begin=torch.tensor(step.begin),
        fresh=torch.tensor(step.fresh),
        own=torch.tensor(step.own),
        sequences=torch.from_numpy(sequences),
        offsets=torch.from_numpy(np.arange(starts[-1]) - starts[sequences]),
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        num_decode=step.num_decode,
    )


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
def test_any_split_gives_the_outputs_and_state_of_single_tokens(delta: bool) -> None:
    arrays = [None if array is None else torch.from_numpy(array.astype(np.float32)) for array in random_scan(delta)]
    expected, last = reference_scan(ScanInputs(*arrays), torch.zeros(4, 8, 16))
    pool = torch.full((SLOTS, 4, 8, 16), torch.nan)
    for steps, slot in splits(len(expected)):
        for step in steps:
            rows = rows_of(step)
            inputs = ScanInputs(*(None if array is None else array[step.tokens] for array in arrays))
            found, states = scan(inputs, rows.read(pool), rows)
            rows.write(pool, states)
            torch.testing.assert_close(found, expected[step.tokens], rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(pool[slot], last, rtol=2e-4, atol=2e-5)


def test_any_split_gives_the_same_convolutions() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3 * BLOCK, 5), np.float32), rng.standard_normal((5, 4), np.float32)
    expected = np.stack([np.convolve(channel, taps[::-1])[: len(x)] for channel, taps in zip(x.T, weight, strict=True)])
    pool = torch.full((SLOTS, 3, 5), torch.nan)
    for steps, slot in splits(len(x)):
        for step in steps:
            rows = rows_of(step)
            found, tails = convolve(
                torch.from_numpy(x[step.tokens]), torch.from_numpy(weight), None, rows.read(pool), rows
            )
            rows.write(pool, tails)
            np.testing.assert_allclose(found, expected.T[step.tokens], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(pool[slot], x[-3:])

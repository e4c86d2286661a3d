"""What a draft model has missed is computed in programs of a few sizes: every token once, the oldest first."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_jax.jax_runner.drafter import Drafter
from sglang_jax.runner.draft_model import AT_ONCE

SIZES, DUMP_ROW = (16, 128), 400


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [16],
        [300],
        [5] * 19 + [50],  # once the others are through, the rest fits the smallest program, which has 16 places
        [1] * 17,
        [1] * 129 + [40],
        list(range(1, 200, 3)),
    ],
    ids=str,
)
def test_each_missed_token_is_computed_once_the_oldest_first(counts: list[int]) -> None:
    drafter = Drafter(SimpleNamespace(catch_up_sizes=SIZES, dump_row=DUMP_ROW), (), DUMP_ROW)  # type: ignore[arg-type]
    rows = np.arange(len(counts), dtype=np.int32)
    left = dict(enumerate(counts))
    for packed in drafter._missed(rows, np.array(counts, np.int32)):
        size = packed.shape[1]
        assert size in SIZES
        assert packed[2].sum() <= size
        for row, back, count in packed.T.tolist():
            if row == DUMP_ROW:
                assert count == 0
                continue
            assert count > 0
            left[row] -= count
            assert back == AT_ONCE + left[row], "up to where the next part begins"
    assert not any(left.values())

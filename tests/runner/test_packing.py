"""What backends pack for drafts: flags, rows with drafts, and the parts in which a draft model catches up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_jax.runner.draft_model import AT_ONCE, in_parts
from sglang_jax.runner.drafts import flatten_drafts
from sglang_jax.runner.packing import DRAFT_NUMBER, LENGTH_ON_DEVICE, SAMPLES, flags_of, pack_rows
from sglang_jax.runner.plan import DRAFT, LAST_TOKEN, PageDeltas, StepPlan


@pytest.mark.parametrize("sizes", [(16, 128), (128,)], ids=str)
@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [16],
        [300],
        [5] * 19 + [50],  # once the others are done, the rest fits a size of 16
        [1] * 17,
        [1] * 129 + [40],
        list(range(1, 200, 3)),
    ],
    ids=str,
)
def test_each_missed_token_is_computed_once_the_oldest_first(counts: list[int], sizes: tuple[int, ...]) -> None:
    rows = np.arange(len(counts), dtype=np.int32)
    left = dict(enumerate(counts))
    for size, *part in in_parts(rows, np.array(counts, np.int32), sizes):
        assert size in sizes
        assert part[2].sum() <= size
        for row, back, count in zip(*(each.tolist() for each in part), strict=True):
            assert count > 0
            left[row] -= count
            assert back == AT_ONCE + left[row], "up to where the next part begins"
    assert not any(left.values())


def test_the_last_part_has_the_smallest_size_that_is_enough() -> None:
    sizes = [size for size, *_ in in_parts(np.zeros(1, np.int32), np.array([300], np.int32), (16, 64, 128))]
    assert sizes == [128, 128, 64]


NOTHING = np.zeros(0, np.int32)
PLAN = StepPlan(
    step=0,
    rows=np.array([4, 2, 7], np.int32),
    num_decode=1,
    query_lens=np.array([1, 3, 2], np.int32),
    kv_lens=np.array([9, 9, 9], np.int32),
    tokens=np.array([LAST_TOKEN, LAST_TOKEN, DRAFT, DRAFT, LAST_TOKEN, DRAFT], np.int32),
    samples=np.ones(3, np.bool_),
    page_deltas=(PageDeltas(NOTHING, NOTHING, NOTHING),),
    length_on_device=np.array([True, False, True]),
)


def test_flags_have_the_number_of_each_draft_and_what_only_the_device_knows() -> None:
    flat = flatten_drafts(PLAN)
    flags = flags_of(flat.plan, np.array([True, True, True, False, True, True]), flat.draft_numbers)
    assert (flags & SAMPLES).tolist() == [SAMPLES] * 3 + [0] + [SAMPLES] * 2
    assert (flags & LENGTH_ON_DEVICE).tolist() == [LENGTH_ON_DEVICE, 0, 0, 0, LENGTH_ON_DEVICE, LENGTH_ON_DEVICE]
    assert (flags // DRAFT_NUMBER).tolist() == [0, 0, 1, 2, 0, 1]
    assert not flags_of(replace(PLAN, length_on_device=None), None, None).any()


def test_rows_with_drafts_are_packed_with_their_numbers_of_drafts() -> None:
    rows, counts = flatten_drafts(PLAN).drafting()
    assert pack_rows(3, 8, rows, counts).tolist() == [[2, 7, 8], [2, 1, 0]]
    assert rows.dtype == counts.dtype == np.int32

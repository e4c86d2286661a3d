"""Admission keeps room in a window's pool for windows, and not for whole outputs."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.scheduling import Bench

from sglang_jax.mem_cache.group import FullGroup, WindowGroup
from sglang_jax.sampling.params import SamplingParams

ROWS = 64


def most_rows_at_once(*, siblings: int) -> int:
    """How many of 64 requests with outputs of 100 tokens run at once, by the number of pages in the window's pool."""
    bench = Bench(
        pages=2000,
        rows=ROWS,
        context=128,
        budget=256,
        more=((7, siblings),),
        options={"schedule_conservativeness": 2.0},
    )
    for number in range(ROWS):
        sampling = SamplingParams(max_new_tokens=100, seed=number, ignore_eos=True)
        bench.add([1 + number % 30, 2 + number % 7, 3], sampling=sampling)
    most = 0
    for _ in range(4000):
        bench.scheduler.step()
        most = max(most, int(np.count_nonzero(bench.scheduler.rows.active)))
        if bench.scheduler.idle:
            break
    assert bench.scheduler.idle
    bench.check_outputs()
    return most


def test_all_rows_run_in_a_pool_of_one_window_per_row() -> None:
    """A window of 7 tokens takes two pages of 4 and the page being written; a step in flight reads one more."""
    assert most_rows_at_once(siblings=ROWS * 4) == ROWS


def test_a_window_budgeted_like_full_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowGroup, "output_need", FullGroup.output_need)
    assert most_rows_at_once(siblings=ROWS * 4) < ROWS // 2

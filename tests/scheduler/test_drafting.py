"""How many drafts rows get: as many as pay off, by past acceptance and the time that steps take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_jax.scheduler.drafting import AdaptiveDrafts

ROWS = np.arange(4, dtype=np.int32)


def serve(
    drafting: AdaptiveDrafts,
    seconds: Callable[[int], float],
    chances: list[float],
    steps: int,
    most: int = 8,
    room: int = 32,
    seed: int = 1,
) -> tuple[float, np.ndarray]:
    """Runs steps in which each draft of row r is accepted with probability `chances[r]`; tokens a second, and the last
    widths."""
    rng = np.random.default_rng(seed)
    rows = np.arange(len(chances), dtype=np.int32)
    tokens = time = 0.0
    for _ in range(steps):
        widths = drafting.choose(rows, np.full(len(rows), most, np.int32), room)
        assert (widths >= 1).all()
        assert (widths <= most).all()
        assert widths.sum() <= max(room, len(rows))
        right = (rng.random((len(rows), most)) < np.array(chances)[:, None]).cumprod(axis=1).sum(axis=1)
        counts = 1 + np.minimum(right, widths - 1).astype(np.int32)
        if (widths > 1).any():
            drafting.observe(rows, widths, counts)
        took = seconds(int(widths.sum()))
        drafting.observe_time(int(widths.sum()), took)
        tokens, time = tokens + counts.sum(), time + took
    return tokens / time, widths


def memory_bound(queries: int) -> float:
    """A CPU, or an accelerator with few rows: a step reads all weights, then computes."""
    return 0.010 + 0.0007 * queries


def compute_bound(queries: int) -> float:
    """Twice the queries take twice the time."""
    return 0.002 * max(queries, 2)


def test_rows_whose_drafts_are_accepted_get_all_that_fit() -> None:
    rate, widths = serve(AdaptiveDrafts(4, 8), memory_bound, [0.98], 200)
    assert widths.tolist() == [8]
    assert rate > 3.5 / memory_bound(1)


def test_the_acceptance_of_a_row_itself_soon_outweighs_that_of_all_rows() -> None:
    """Another request, all of whose drafts are rejected, takes the row. The prior from all rows weighs less than
    one step, so drafts are made in half as many steps as with a weight of one."""

    def clock(queries: int) -> float:
        return 0.010 if queries == 1 else 0.0107

    drafting, one = AdaptiveDrafts(4, 8), ROWS[:1]
    serve(drafting, clock, [0.8], 300)
    drafting.reset_rows(one)
    drafted = 0
    for _ in range(300):
        widths = drafting.choose(one, np.array([8], np.int32), 32)
        if widths[0] > 1:
            drafting.observe(one, widths, np.ones(1, np.int32))
        drafting.observe_time(int(widths[0]), clock(int(widths[0])))
        drafted += int(widths[0] > 1)
    assert drafted < 150


@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_that_are_never_accepted_cost_little(seconds: Callable[[int], float], rows: int) -> None:
    rate, _ = serve(AdaptiveDrafts(4, 8), seconds, [0.0] * rows, 2000)
    assert rate > 0.97 * rows / seconds(rows)


def test_drafts_accepted_half_of_the_time_pay_where_queries_are_cheap() -> None:
    cheap, _ = serve(AdaptiveDrafts(4, 8), memory_bound, [0.5], 2000)
    dear, _ = serve(AdaptiveDrafts(4, 8), compute_bound, [0.5] * 4, 2000)
    assert cheap > 1.4 / memory_bound(1)
    assert dear > 0.97 * 4 / compute_bound(4)


def test_the_rows_that_repeat_themselves_get_the_drafts() -> None:
    _, widths = serve(AdaptiveDrafts(4, 8), memory_bound, [0.95, 0.0, 0.0, 0.95], 300, room=16)
    assert widths[0] + widths[3] >= 12
    assert widths[1] + widths[2] <= 4


def test_a_row_that_starts_to_repeat_itself_gets_drafts() -> None:
    drafting = AdaptiveDrafts(4, 8)
    serve(drafting, memory_bound, [0.0], 500)
    _, widths = serve(drafting, memory_bound, [0.97], 200)
    assert widths.tolist() == [8]


def test_a_new_request_does_not_inherit_the_acceptance_of_its_row() -> None:
    drafting = AdaptiveDrafts(4, 8)
    serve(drafting, memory_bound, [0.98, 0.0], 100)
    drafting.reset_rows(ROWS[:2])
    first, second = drafting._values(ROWS[:2], np.full(2, 8, np.int32))
    np.testing.assert_array_equal(first, second)


def test_limits_are_kept() -> None:
    drafting = AdaptiveDrafts(4, 8)
    serve(drafting, memory_bound, [0.98] * 4, 100)
    most = np.array([1, 3, 8, 2], np.int32)
    assert (drafting.choose(ROWS, most, 32) <= most).all()
    assert drafting.choose(ROWS, most, 0).tolist() == [1, 1, 1, 1]
    assert drafting.choose(ROWS, most, 6).sum() <= 6
    assert drafting.choose(ROWS, np.ones(4, np.int32), 32).tolist() == [1, 1, 1, 1]


def test_a_step_size_that_once_took_long_is_tried_again() -> None:
    drafting = AdaptiveDrafts(4, 8)
    drafting.observe_time(8, 0.2)
    _, widths = serve(drafting, memory_bound, [0.97], 1500)
    assert widths.tolist() == [8]


@pytest.mark.parametrize("seed", range(3))
def test_noisy_times_make_no_drafts_where_none_are_accepted(seed: int) -> None:
    """A busy machine: a step takes up to four times as long as the one before."""
    rng = np.random.default_rng(seed)
    drafting, queries = AdaptiveDrafts(4, 8), []

    def seconds(count: int) -> float:
        queries.append(count)
        return memory_bound(count) * float(rng.choice([1.0, 1.0, 1.3, 4.0]))

    serve(drafting, seconds, [0.0], 2000)
    assert np.mean(queries) < 1.2


@pytest.mark.parametrize(("chance", "a_guess", "least"), [(0.0, 0.004, 0.97), (0.3, 0.008, 0.97), (0.9, 0.001, 1.8)])
@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_that_are_computed_one_after_the_other_are_made_while_they_pay(
    chance: float, a_guess: float, least: float, rows: int
) -> None:
    """A draft model computes them: its time grows with the most drafts of any row in the step."""
    drafting = AdaptiveDrafts(4, 8, one_by_one=True)
    rng = np.random.default_rng(1)
    own = ROWS[:rows]
    tokens = time = 0.0
    for _ in range(2000):
        widths = drafting.choose(own, np.full(rows, 8, np.int32), 32)
        right = (rng.random((rows, 8)) < chance).cumprod(axis=1).sum(axis=1)
        counts = 1 + np.minimum(right, widths - 1).astype(np.int32)
        if (widths > 1).any():
            drafting.observe(own, widths, counts)
        most = int(widths.max()) - 1
        took = memory_bound(int(widths.sum())) + a_guess * most
        drafting.observe_time(int(widths.sum()), took, most)
        tokens, time = tokens + counts.sum(), time + took
    assert tokens / time > least * rows / memory_bound(rows)

"""Nine faults from reports on other engines, planted one by one: the simulator must notice each within the number of
schedules that `make test` runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers.simulation import WITH_STATES, Strategy, simulate
from hypothesis import strategies as st

from sglang_jax.mem_cache.group import FullGroup, Group
from sglang_jax.mem_cache.invariants import InvariantError
from sglang_jax.mem_cache.ledger import OwnershipError
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.scheduler.planner import Chunk, DecodePart, PlannedStep, Planner
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows

pytestmark = pytest.mark.slow

SCHEDULES = 300
ONE_POOL: dict[str, Strategy] = {"groups": st.just((None,)), "drafts": st.just(0)}
DRAFTS: dict[str, Strategy] = {"drafts": st.sampled_from([1, 4])}
SHORT: dict[str, Strategy] = ONE_POOL | {"pages": st.integers(8, 24), "page_size": st.sampled_from([1, 4])}
STATES: dict[str, Strategy] = {
    "groups": st.sampled_from(WITH_STATES),
    "reuse": st.just(True),
    "drafts": st.just(0),
}


def duplicates_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's own copy of pages that the tree already had is never freed."""
    monkeypatch.setattr(Group, "_retire", lambda self, pages, owner, step: None)


def _release_less(monkeypatch: pytest.MonkeyPatch, last: Callable[[FullGroup, RowKV, int], int]) -> None:
    release = FullGroup.release

    def release_some(self: FullGroup, record: RowKV, allocated: int) -> None:
        release(self, record, last(self, record, allocated))

    monkeypatch.setattr(FullGroup, "release", release_some)


def the_tail_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages allocated beyond the committed tokens are not freed at the end."""
    _release_less(monkeypatch, lambda group, record, allocated: group.pages_for(record.kv_committed_len))


def the_slot_of_the_last_token_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page allocated for the KV of the end-of-sequence token is taken for one that was never allocated."""
    _release_less(monkeypatch, lambda group, record, allocated: allocated - 1)


def the_tail_of_drafts_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for rejected drafts are forgotten instead of freed."""
    monkeypatch.setattr(Group, "free_columns", lambda self, rows, first, last: None)


def every_chunk_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in the middle of a prompt yields a token, as if it were the last chunk."""
    mixed = Planner._mixed

    def sample_all(self: Planner, step: int, decode: DecodePart, chunks: list[Chunk]) -> PlannedStep:
        return mixed(self, step, decode, [msgspec.structs.replace(chunk, last=True) for chunk in chunks])

    monkeypatch.setattr(Planner, "_mixed", sample_all)


def a_retraction_inserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retracted request leaves its tokens in the tree, with one page more than was computed."""
    leave = Rows.leave

    def leave_all(self: Rows, request: Request, *, insert: bool, requeue: bool = False) -> None:
        if requeue:
            record = request.record
            record.lengths.kv_committed[record.row] += self._cache.page_size
        leave(self, request, insert=insert or requeue, requeue=requeue)

    monkeypatch.setattr(Rows, "leave", leave_all)


def an_output_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the rows that sampled in a step does not get its token."""
    tokens = Publisher.tokens

    def tell_all_but_one(self: Publisher, rows: np.ndarray, sampled: np.ndarray, counts: np.ndarray) -> None:
        most = max(len(rows) - 1, 1)
        tokens(self, rows[:most], sampled[:most], counts[:most])

    monkeypatch.setattr(Publisher, "tokens", tell_all_but_one)


def admission_ignores_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is admitted although no slot is left for its state."""
    monkeypatch.setattr(StateGroup, "prompt_need", lambda self, length, cached: 0)
    monkeypatch.setattr(StateGroup, "rest_need", lambda self, length, row: 0)


def slots_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a request's state is not freed when the request ends."""
    monkeypatch.setattr(StateGroup, "release", lambda self, record, allocated: None)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Strategy]] = {
    duplicates_leak: ONE_POOL,
    the_tail_leaks: ONE_POOL,
    the_slot_of_the_last_token_leaks: ONE_POOL,
    the_tail_of_drafts_leaks: SHORT | DRAFTS,
    every_chunk_samples: ONE_POOL,
    a_retraction_inserts: SHORT | {"page_size": st.just(1)},
    an_output_is_lost: ONE_POOL,
    admission_ignores_slots: STATES,
    slots_leak: STATES,
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_noticed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((OwnershipError, InvariantError, AssertionError, RuntimeError, LookupError)) as caught:
        simulate(SCHEDULES, known_fault=True, sizes=FAULTS[plant])
    assert caught.traceback[-1].path != Path(__file__), "the fault itself failed, and nobody noticed it"

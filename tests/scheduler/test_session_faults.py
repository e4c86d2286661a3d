"""Faults planted in sessions, one by one: the simulator must catch each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.simulated_sessions import ROOM_FOR_TURNS, SessionSimulation
from helpers.simulation import STATE, Strategy, simulate
from hypothesis import strategies as st

from sglang_jax.mem_cache.invariants import InvariantError
from sglang_jax.mem_cache.ledger import OwnershipError
from sglang_jax.mem_cache.pins import Kept, Pin, Pins
from sglang_jax.mem_cache.radix_tree import Namespace, Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.scheduler.sessions import Session, Sessions, Turn

pytestmark = pytest.mark.slow

SCHEDULES = 1500

Plant = Callable[[pytest.MonkeyPatch], None]


def move_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "move", lambda self, kept, record: None)


def keep_the_old_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up, take = Pins._give_up, Pins._place

    def take_more(self: Pins, pin: Pin, node: Node, pages: int) -> None:
        monkeypatch.setattr(RadixTree, "extend_session", lambda self, held, node: False)
        monkeypatch.setattr(Pins, "_give_up", lambda self, node, pages: None)
        take(self, pin, node, pages)
        monkeypatch.setattr(Pins, "_give_up", give_up)

    monkeypatch.setattr(Pins, "_place", take_more)


def let_nothing_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is closed, and its pin stays."""
    monkeypatch.setattr(Pins, "let_go", lambda self, pin: None)
    monkeypatch.setattr(Pins, "relieve", lambda self, short, own=None: False)


def let_go_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = Pins._give_up

    def give_up_twice(self: Pins, node: Node, pages: int) -> None:
        give_up(self, node, pages)
        give_up(self, node, pages)

    monkeypatch.setattr(Pins, "_give_up", give_up_twice)


def lock_and_keep_no_window_or_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "_keep_ends", lambda self, node, pages: None)
    monkeypatch.setattr(Pins, "_give_up_ends", lambda self, node, pages: None)


def extend_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin moves further down the tree, and its lock stays where it was."""
    monkeypatch.setattr(RadixTree, "extend_session", lambda self, held, node: True)


def keep_what_an_aborted_turn_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Sessions.end

    def end_as_finished(self: Sessions, turn: Turn, tokens: bytes | None, namespace: Namespace, has_row: bool) -> None:
        if tokens is None and turn.prompt_len:
            tokens = turn.session.tokens + (7).to_bytes(4, "little")
        end(self, turn, tokens, namespace, has_row)

    monkeypatch.setattr(Sessions, "end", end_as_finished)


def resume_behind_unseen_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core was further than its client, and the session resumes there."""
    monkeypatch.setattr(Sessions, "shorten", lambda self, request_id, num_tokens: None)


def begin_before_the_last_turn_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turn, "has_to_wait", property(lambda self: False))


def move_the_pin_of_a_closed_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: Turn) -> Kept | None:
        return Kept(self.session.pin, self.length) if self.session.leaving is self else None

    monkeypatch.setattr(Turn, "kept", kept)
    end = Sessions.end

    def end_though_closed(
        self: Sessions, turn: Turn, tokens: bytes | None, namespace: Namespace, has_row: bool
    ) -> None:
        end(self, turn, tokens, namespace, has_row)
        if tokens is not None and turn.session.closed and has_row:
            turn.length, turn.session.leaving = len(tokens) // 4, turn

    monkeypatch.setattr(Sessions, "end", end_though_closed)


def time_out_amid_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(session: Session) -> float:
        return session.used_at + session.timeout

    monkeypatch.setattr("sglang_jax.scheduler.sessions._due", due)


def take_two_turns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Sessions.begin

    def begin_quietly(self: Sessions, turn: Turn, request_id: int, prompt_len: int) -> None:
        begin(self, turn, request_id, prompt_len)
        turn.session.turn = None

    monkeypatch.setattr(Sessions, "begin", begin_quietly)


def pin_beyond_what_the_session_has(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Pins.move

    def move_on(self: Pins, kept: Kept, record: RowKV) -> None:
        page = self._tree.page_size
        move(self, Kept(kept.pin, kept.length), record)
        if kept.pin.node is not None:
            kept.pin.pages = record.cache_protected_len // page + 1

    monkeypatch.setattr(Pins, "move", move_on)


FAULTS: dict[Plant, str] = {
    move_no_pin: "a session keeps nothing",
    keep_the_old_place_too: r"\d+ locks, \d+ requests and pins",
    let_nothing_go: "a session that is closed keeps a pin",
    let_go_twice: "unpinned more often than pinned|unlocked more often than locked|let go by more sessions",
    lock_and_keep_no_window_or_state: "its state is pinned 0 times|kept 0 {}, pins",
    extend_no_lock: r"0 locks, \d+ requests and pins",
    # Whichever comes first: the next turn is refused, is accepted though it should be refused, or resumes from wrong
    # tokens.
    keep_what_an_aborted_turn_computed: r"follows the last finished one|turn .* was taken|^request \d+",
    resume_behind_unseen_tokens: r"^request \d+",
    begin_before_the_last_turn_is_cached: "a turn computes what its session keeps",
    move_the_pin_of_a_closed_session: "a session that is closed keeps a pin",
    time_out_amid_a_turn: "is gone, and nobody closed it|SessionNotFoundError",
    take_two_turns_at_once: "is gone, and nobody closed it|was taken; SessionBusyError was due",
    pin_beyond_what_the_session_has: r"a pin of \d+ pages keeps \d+",
}
"""The simulator's message for each."""

FINE_PINS: dict[str, Strategy] = {"groups": st.just((None,)), "pages": st.just(64), "page_size": st.just(1)}
"""Each token of a turn has its own page."""

ROOM_FOR_ALL = FINE_PINS | {"page_size": st.just(4), "rows": st.just(6)}
"""Neither memory nor rows are ever short, so sessions lose their pins only by timeout."""

PLACES: dict[Plant, dict[str, Strategy]] = {
    lock_and_keep_no_window_or_state: {"groups": st.sampled_from([(5,), (None, 7), (None, STATE)])},
    resume_behind_unseen_tokens: {"groups": st.just((None,)), "pages": st.just(64)},
    begin_before_the_last_turn_is_cached: FINE_PINS,
    move_the_pin_of_a_closed_session: ROOM_FOR_ALL,
    let_nothing_go: FINE_PINS,
}
"""Sizes with which the fault shows, where few of those in `SIZES` would do."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    sizes = ROOM_FOR_TURNS | PLACES.get(plant, {})
    with pytest.raises((OwnershipError, InvariantError, AssertionError, RuntimeError), match=FAULTS[plant]):
        simulate(SCHEDULES, known_fault=True, sizes=sizes, kind=SessionSimulation)

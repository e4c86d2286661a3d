"""The simulator with sessions: turns that send new tokens, with aborts, stops, closes and timeouts in the middle.

A turn's output is the oracle's for the whole conversation. Its pin is where the last finished turn ends, to the page,
unless it was released; and the next turn starts there.

A separate machine: hypothesis seeds a machine's schedules by its source, and those that find the faults planted
elsewhere must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from helpers.caches import states_of
from helpers.scheduling import VOCAB
from helpers.simulation import Simulation, Strategy
from helpers.stand_in_subject import Undecided
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_jax.errors import ParameterError, SessionNotFoundError
from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.invariants import idle_fault
from sglang_jax.mem_cache.kv_validation import KVValidation
from sglang_jax.mem_cache.pins import Kept, Pin, Pins
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn
from sglang_jax.scheduler.sessions import Session

NAMES = tuple("abcdefgh")
ENDING = tuple(range(2, 14))
"""Stop tokens, a third of the vocabulary."""

ROOM_FOR_TURNS: dict[str, Strategy] = {
    "page_size": st.sampled_from([1, 4, 4]),
    "pages": st.integers(10, 64),
    "siblings": st.integers(10, 64),
    "slots": st.integers(3, 16),
    "context": st.just(60),
    "reuse": st.just(True),
}
"""Most turns fit, and many match the cached tokens of the one before."""


@dataclass
class Talk:
    """A session as its client knows it.

    - `history`: of its finished turns; `last`: the newest of them; `running`: a turn whose end it has not seen.
    - `stopped`: how many output tokens of the running turn the client wanted, once it has stopped it.
    - `kept`: tokens that must be cached for the next turn; 0 where that is unknown. `pinned`: those that its session's
      pin held when it was last idle, or waited.
    """

    streaming: bool
    timeout: float
    used_at: float
    namespace: str | None
    history: list[int] = field(default_factory=list)
    last: int | None = None
    running: int | None = None
    stopped: int | None = None
    kept: int = 0
    pinned: int = 0


class SessionSimulation(Simulation):
    """See `Simulation`."""

    def start(self, **sizes: object) -> None:
        super().start(**sizes)  # type: ignore[arg-type]
        self.now = 0.0
        self.talks: dict[str, Talk] = {}
        self.lost_pins: set[Pin] = set()
        self.cut_off = 0
        scheduler = self.bench.scheduler
        scheduler.sessions._clock = lambda: self.now
        step = self.watch.step
        scheduler.cache.pins.share = 1.0 if sizes["aged_turn"] == 8 else 0.5
        abort, self.aborted = scheduler.abort, set[int]()

        def note_and_abort(number: int) -> None:
            self.aborted.add(number)
            abort(number)

        scheduler.abort = note_and_abort  # type: ignore[method-assign]

        def step_and_look() -> None:
            step()
            self._look()

        for one in scheduler.cache.ranks:
            self._watch_pins(one.pins, one.trust)
        self.watch.step = step_and_look

    def _watch_pins(self, pins: Pins, trust: KVValidation) -> None:
        let_go, move, distrust, relieve = pins.let_go, pins.move, trust.distrust, pins.relieve

        def note_and_let_go(pin: Pin) -> None:
            self.lost_pins.add(pin)
            let_go(pin)

        def note_and_move(kept: Kept, record: RowKV) -> None:
            self.lost_pins.discard(kept.pin)
            move(kept, record)

        def relieve_and_look(short: Sequence[Group], own: Pin | None = None) -> bool:
            """No session loses its pin without need: afterwards there is room, or only other sessions' pins take it."""
            before = [group.available for group in short]
            held = {pin: pin.node for pin in pins.held}
            relieved = relieve(short, own)
            for node in (node for pin, node in held.items() if pin not in pins.held):
                gained = any(group.available > free for group, free in zip(short, before, strict=True))
                assert gained or (node is not None and node.sessions > 0), "a pin was let go in vain"
                self.met["let go for others"] += 1
            return relieved

        def note_and_distrust(record: RowKV) -> None:
            self.cut_off += 1
            distrust(record)

        pins.let_go, pins.move, pins.relieve = note_and_let_go, note_and_move, relieve_and_look
        trust.distrust = note_and_distrust

    @rule(
        name=st.sampled_from(NAMES),
        streaming=st.booleans(),
        timeout=st.sampled_from([3.0, 50.0, 50.0]),
        namespace=st.sampled_from([None, None, "other"]),
    )
    def open_session(self, name: str, streaming: bool, timeout: float, namespace: str | None) -> None:
        self._learn()
        self._expire()
        opening, sessions = OpenSession(name, "me", streaming, timeout), self.bench.scheduler.sessions
        if name in self.talks:
            with pytest.raises(ParameterError, match="is open already"):
                sessions.open(opening)
        else:
            sessions.open(opening)
            self.talks[name] = Talk(streaming, timeout, self.now, namespace)

    @rule(
        name=st.sampled_from(NAMES),
        tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12),
        new_tokens=st.sampled_from([0, 1, 3, 6, 6, 12]),
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), (3, 5, 8), (5, VOCAB - 1)]),
        says=st.sampled_from(["last"] * 6 + ["nothing", "another", "foreign", "unknown"]),
    )
    def turn(
        self, name: str, tail: list[int], new_tokens: int, seed: int, stop: tuple[int, ...], says: str = "last"
    ) -> None:
        """The next turn: refused if the session does not exist, if a turn runs, or if it does not follow the last."""
        self._learn()
        self._expire()
        name = self._one_of_them(name) if says != "unknown" else name
        talk = self.talks.get(name)
        history = [] if talk is None else talk.history
        if len(history) + len(tail) > self.bench.context - 1:
            return
        last = None if talk is None or talk.last is None else str(talk.last)
        after = {"nothing": None, "another": "another"}.get(says, last)
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=seed, stop_token_ids=stop)
        if self.subject is not None:
            sampling = self.subject.style(sampling)
        number = self.bench._next_id
        asked = SessionTurn(name, "another" if says == "foreign" else "me", str(number), after)
        namespace = None if talk is None else talk.namespace
        try:
            self.bench.add([*history, *tail], sampling=sampling, extra_key=namespace, sent=tail, session=asked)
        except Undecided:
            return
        accepted = number in self.bench.scheduler.requests
        if talk is None or says == "foreign":
            self._refused(number, "SessionNotFoundError", accepted)
        elif talk.running is not None:
            self._refused(number, "SessionBusyError", accepted)
        elif says == "another" or (says == "nothing" and last is not None and not talk.streaming):
            self._refused(number, "ParameterError", accepted)
        elif accepted:
            talk.running, talk.stopped = number, None
            self.live.append(number)
            self.met["held until the turn before it is cached"] += bool(self.bench.scheduler.sessions.held)
        else:
            self._refused(number, "QueueFullError", accepted)

    def _one_of_them(self, name: str) -> str:
        """An open session, chosen by `name`."""
        if not self.talks:
            self.open_session(name, True, 50.0, None)
        return name if name in self.talks else list(self.talks)[NAMES.index(name) % len(self.talks)]

    def _refused(self, number: int, why: str, accepted: bool) -> None:
        assert not accepted, f"turn {number} was taken; {why} was due"
        self.watch.step()
        error = self.bench.channel.finished.pop(number).error
        assert error is not None
        assert error.name == why, error
        self.met[f"refused by {why}"] += 1

    @rule(name=st.sampled_from(NAMES), tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=5))
    def converse(self, name: str, tail: list[int]) -> None:
        """Some turns one after the other, each as soon as the one before has ended: mostly by a token before its
        length, so that a step in flight still has its row."""
        name = self._one_of_them(name)
        for number in range(4):
            if name not in self.talks:
                break
            self.turn(name, tail, 2 + 2 * number, number, ENDING, "last")
            for _ in range(14):
                if name not in self.talks or self.talks[name].running is None:  # it may have timed out
                    break
                self.watch.step()

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([4.0, 60.0]))
    def turn_that_takes_long(self, name: str, seconds: float) -> None:
        """Longer than a session may be without a turn."""
        name = self._one_of_them(name)
        self.turn(name, [5], 6, 1, (), "last")
        self.watch.step()
        self.pass_time(seconds)
        for _ in range(14):
            self.watch.step()
            if name not in self.talks or self.talks[name].running is None:
                break
        self.turn(name, [6], 1, 1, (), "last")

    @rule(name=st.sampled_from(NAMES), seen=st.integers(1, 4), steps=st.integers(0, 2))
    def stop_a_turn(self, name: str, seen: int, steps: int) -> None:
        """The client found a stop string, and the core may be a few tokens further, or at the end. Where no turn runs,
        one is started for it."""
        if all(talk.running is None for talk in self.talks.values()):
            self.turn(self._one_of_them(name), [5], 6, 2, (), "last")
        if all(talk.running is None for talk in self.talks.values()):
            return
        talk = self.talks[self._busy_one(name)]
        number = talk.running
        assert number is not None
        if number in self.aborted:
            return  # a client that aborts a turn reads no more of it
        for _ in range(8):
            if self.bench.channel.streams.get(number):
                break
            self.watch.step()
        self._look()
        seen = min(seen, len(self.bench.channel.streams.get(number, [])))
        if not seen or talk.running != number:
            return
        talk.stopped = seen  # from now on the turn has ended for the client, whatever the core still does
        for _ in range(steps):
            self.watch.step()
        if number in self.bench.scheduler.requests:
            self.stopped.add(number)
        self.bench.scheduler.stop(number, seen)
        self._look()
        self.met["stopped amid a turn"] += 1

    @precondition(lambda self: any(talk.running is not None for talk in self.talks.values()))
    @rule(name=st.sampled_from(NAMES))
    def abort_a_turn(self, name: str) -> None:
        number = self.talks[self._busy_one(name)].running
        assert number is not None
        self.bench.scheduler.abort(number)
        self.met["aborted amid a turn"] += 1

    def _busy_one(self, name: str) -> str:
        busy = [one for one, talk in self.talks.items() if talk.running is not None]
        return busy[NAMES.index(name) % len(busy)]

    @rule(name=st.sampled_from(NAMES), busy=st.booleans())
    def close_session(self, name: str, busy: bool) -> None:
        self._learn()
        self._expire()
        if busy and any(talk.running is not None for talk in self.talks.values()):
            name = self._busy_one(name)
        self._close(name)

    def _close(self, name: str) -> None:
        talk, sessions = self.talks.pop(name, None), self.bench.scheduler.sessions
        if talk is None:
            with pytest.raises(SessionNotFoundError):
                sessions.close(name, "me")
        else:
            assert ("me", name) in sessions._open, f"session {name!r} is gone, and nobody closed it"
            sessions.close(name, "me")
            self.met["closed amid a turn"] += talk.running is not None

    @rule(seconds=st.sampled_from([1.0, 1.0, 4.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self._learn()
        self.now += seconds

    def _expire(self) -> None:
        """Sessions without a turn for their timeout are closed at the next check."""
        for name, talk in list(self.talks.items()):
            if talk.running is None and self.now >= talk.used_at + talk.timeout:
                del self.talks[name]
                self.met["timed out"] += 1

    def _learn(self) -> None:
        """Requests that ended between steps are published by the next."""
        running = [talk.running for talk in self.talks.values() if talk.running is not None]
        if any(one not in self.bench.scheduler.requests for one in running):
            self.watch.step()
        self._look()

    def _look(self) -> None:
        """Updates what the clients know of their turns, and checks the pins."""
        for name, talk in self.talks.items():
            if talk.running is not None and talk.running not in self.bench.scheduler.requests:
                self._note_end(talk, talk.running)
            session = self.bench.scheduler.sessions._open.get(("me", name))
            if session is not None:
                self._check_pin(talk, session)
            if talk.running is not None and session is not None:
                self._check_start(talk, talk.running, session)
            waits = talk.running is None or talk.running not in self.bench.channel.cached
            if session is not None and waits and session.leaving is None:
                talk.pinned = session.pin.pages * self.bench.page_size

    def _note_end(self, talk: Talk, number: int) -> None:
        finished = self.bench.channel.finished.get(number)
        stopped = number in self.stopped or talk.stopped is not None
        if finished is None and not stopped:
            return  # it is published at the end of the step
        talk.running, talk.used_at, talk.kept = None, self.now, 0
        if finished is not None and finished.kind in ("error", "abort"):
            talk.stopped = None
            return
        prompt = self.bench.prompts[number]
        output = self.bench.channel.streams.get(number, [])
        if talk.stopped is not None:
            output = output[: talk.stopped]
        talk.history, talk.last, talk.stopped = [*prompt, *output], number, None
        by_itself = finished is not None and not stopped
        if by_itself and self._pins_are_exact:
            written = len(talk.history) - (finished is not None and finished.num_tokens > 0)
            page = self.bench.page_size
            talk.kept = written // page * page
        self.met["turns that ended"] += 1

    @property
    def _pins_are_exact(self) -> bool:
        """Pins end at the last page, where nothing was cut off and no state is needed for which there may be no
        slot."""
        return self._pins_serve and states_of(self.bench.scheduler.cache.ranks[0]) is None

    @property
    def _pins_serve(self) -> bool:
        """A turn starts where its session's pin ends, or further on, where nothing was cut off, and where it cannot
        start on another rank."""
        cache = self.bench.scheduler.cache
        return cache.reuse and not self.cut_off and not self.doubtful and len(cache.ranks) == 1

    def _check_pin(self, talk: Talk, session: Session) -> None:
        pin, node = session.pin, session.pin.node
        if session.leaving is not None or session.turn is not None:
            return
        if node is not None:
            tokens = b"".join(one.key for one in reversed(list(node.path())))
            page = self.bench.scheduler.cache.ranks[0].tree.page_bytes
            assert len(tokens) == pin.pages * page
            self.met["a pin that keeps something"] += 1
        if talk.kept and self._pins_are_exact and pin not in self.lost_pins:
            assert node is not None, "a session keeps nothing"
            assert tokens == session.tokens[: len(tokens)], "a pin is not on its session's path"
            assert pin.pages * self.bench.page_size == talk.kept

    def _check_start(self, talk: Talk, number: int, session: Session) -> None:
        """A turn that has started has matched all that its session pins."""
        if number not in self.bench.channel.cached or not (talk.kept or talk.pinned):
            return
        cached = self.bench.channel.cached[number]
        if session.pin not in self.lost_pins and self._pins_serve:
            assert cached >= talk.pinned, "a turn computes what its session keeps"
            self.met["began where its pin was, with states"] += (
                states_of(self.bench.scheduler.cache.ranks[0]) is not None
            )
        if session.pin not in self.lost_pins and self._pins_are_exact and talk.kept:
            assert cached >= talk.kept, "a turn computes what its session keeps"
            self.met["began where the last turn ended"] += 1
        talk.kept = talk.pinned = 0

    def teardown(self) -> None:
        scheduler = self.bench.scheduler
        for _ in range(4000):
            self.watch.step()
            if scheduler.idle:
                break
        assert scheduler.idle
        assert not idle_fault(scheduler.cache)
        assert not scheduler.sessions.held
        self.met["idle with pins"] += bool(scheduler.cache.pins.held)
        for talk in self.talks.values():
            assert talk.running is None
        self._expire()
        for name in list(self.talks):
            self._close(name)
        scheduler.sessions.maintain()
        assert not scheduler.sessions.count
        assert not scheduler.sessions._last
        assert not scheduler.cache.pins.held, "a session that is closed keeps a pin"
        assert not any(group.component.session for one in scheduler.cache.ranks for group in one.groups)
        super().teardown()

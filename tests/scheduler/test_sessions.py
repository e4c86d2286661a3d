"""Sessions over the scheduler: what a turn computes, that outputs do not change, which pins are released, and which
requests are refused."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.caches import states_of
from helpers.scheduling import Bench
from helpers.simulated_sessions import ROOM_FOR_TURNS, SessionSimulation
from helpers.simulation import STATE, simulate
from helpers.talks import Talk

from sglang_jax.errors import ParameterError, SessionBusyError, SessionLimitError, SessionNotFoundError
from sglang_jax.mem_cache.invariants import check_everything, idle_fault
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn


@pytest.fixture(params=[(None,), (6,), (None, 6), (None, STATE), (STATE,), (None, STATE, 6)], ids=str)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Each kind of memory, and all three together."""
    first, *more = request.param
    return Bench(pages=64, page_size=4, window=first, more=tuple((sees, 64) for sees in more), least_gain=4)


def refusal(bench: Bench, number: int) -> tuple[str, str]:
    """The error's name and message with which a turn was refused."""
    bench.scheduler.step()
    error = bench.channel.finished[number].error
    assert error is not None
    return error.name, error.message


def test_each_turn_gives_the_output_of_the_whole_conversation_and_computes_only_new_tokens(bench: Bench) -> None:
    """A turn computes its new tokens, the last sampled token among them, and less than a page before them. With states
    that cost more than a step each, it may compute as many tokens more as a state is worth."""
    talk, page = Talk(bench), bench.page_size
    if (states := states_of(bench.scheduler.cache)) is not None:
        states.least_gain = 12
        page += 12
    for number in range(10):
        before = len(talk.history)
        turn = talk.turn([1 + number, 2, 3][: 1 + number % 3], new_tokens=3 + number % 5)
        cached = bench.channel.cached[turn]
        assert before - 1 - page < cached <= before, f"turn {number}: {cached} of {before} were cached"
        assert idle_fault(bench.scheduler.cache) == ""
    bench.check_outputs()
    assert bench.scheduler.sessions.count == 1


def test_a_turn_may_be_the_whole_conversation(bench: Bench) -> None:
    """Conversations that are sent whole may change what was said. Outputs are those of the prompt, what is still the
    same is found in the cache, and the pin keeps the newest path, even if nothing else could be kept."""
    chance, talk = random.Random(3), Talk(bench, "other")
    talk.name = "s"  # opened by its first turn
    for number in range(12):
        kept = chance.choice([len(talk.history), len(talk.history), len(talk.history) // 2, 0])
        prompt = [*talk.history[:kept], *(chance.randrange(2, 12) for _ in range(1 + number % 6))]
        turn = SessionTurn("s", "me", str(number), "not looked at", 1, whole=True)
        sampling = SamplingParams(max_new_tokens=1 + number % 5, seed=5, ignore_eos=True)
        request = bench.add(prompt, sampling=sampling, sent=prompt, session=turn)
        bench.run()
        cached = bench.channel.cached[request]
        if kept == len(talk.history) and number:
            assert cached > 0 or kept < 2 * bench.page_size
        talk.history = [*prompt, *bench.channel.output(request)]
        assert len(talk.session.tokens) == 4 * len(talk.history)
        (pin,) = bench.scheduler.cache.pins.held or [None]
        assert pin is None or pin is talk.session.pin
        check_everything(bench.scheduler.cache)
        assert idle_fault(bench.scheduler.cache) == ""
    bench.check_outputs()


def test_a_whole_conversation_does_without_a_session_if_it_must() -> None:
    bench = Bench(pages=64, page_size=4)
    sessions = bench.scheduler.sessions
    sessions._most = 2
    sessions.open(OpenSession("theirs", "b", True, None))

    def send(name: str, owner: str = "a", namespace: str | None = None) -> int:
        turn = SessionTurn(name, owner, name, whole=True)
        return bench.add([5, 6, 7, 8, 9], 2, session=turn, extra_key=namespace)

    one, two, again = send("one"), send("two"), send("one")  # no room for a second one, and a turn runs
    assert [(each.owner, each.id) for each in sessions.all()] == [("b", "theirs"), ("a", "one")]
    bench.run()
    other = send("one", namespace="x")
    bench.run()
    assert all(len(bench.channel.output(number)) == 2 for number in (one, two, again, other))
    send("two")  # in place of the idle one of the same owner
    bench.run()
    assert [(each.owner, each.id) for each in sessions.all()] == [("b", "theirs"), ("a", "two")]
    check_everything(bench.scheduler.cache)
    assert idle_fault(bench.scheduler.cache) == ""


def test_a_pin_moves_and_never_keeps_more_than_the_newest_path(bench: Bench) -> None:
    talk = Talk(bench)
    for number in range(6):
        talk.turn([3, 4, 5 + number])
        (pin,) = bench.scheduler.cache.pins.held
        assert pin is talk.session.pin
        for group in bench.scheduler.cache.groups:
            most = 1 if group.unit == "slot" else len(talk.history) // bench.page_size
            assert 0 < group.component.session == group.component.protected <= most
    bench.scheduler.sessions.close("s", "me")
    assert not bench.scheduler.cache.pins.held
    assert not any(group.component.protected for group in bench.scheduler.cache.groups)
    check_everything(bench.scheduler.cache)


def test_pinned_pages_are_not_evicted_and_are_an_ordinary_prefix_once_the_session_is_closed(bench: Bench) -> None:
    talk = Talk(bench)
    talk.turn([1, 2, 3, 4, 5, 6])
    cache = bench.scheduler.cache
    for group in cache.groups:
        cache.tree.evict(group.component, group.pool.total)
    prompt = [*talk.history, 7]
    assert cache.peek(bytes(memoryview(_ints(prompt))), len(prompt) - 1, None) > 0
    bench.scheduler.sessions.close("s", "me")
    assert cache.peek(bytes(memoryview(_ints(prompt))), len(prompt) - 1, None) > 0, "it stays until it is evicted"
    for group in cache.groups:
        cache.tree.evict(group.component, group.pool.total)
    assert cache.peek(bytes(memoryview(_ints(prompt))), len(prompt) - 1, None) == 0


def _ints(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_an_aborted_turn_leaves_the_session_at_its_last_finished_one(bench: Bench) -> None:
    talk = Talk(bench)
    talk.turn([1, 2, 3, 4])
    pages = talk.session.pin.pages
    for steps in (0, 1, 3):
        number = talk.send([9] * 7, new_tokens=30)
        for _ in range(steps):
            bench.scheduler.step()
        bench.scheduler.abort(number)
        bench.run()
        assert bench.channel.finished[number].kind == "abort"
        assert talk.session.tokens == _ints(talk.history)
        assert talk.session.pin.pages == pages
    talk.turn([5])
    bench.check_outputs()


def test_a_retracted_turn_continues_and_the_pin_moves_when_it_ends(bench: Bench) -> None:
    talk = Talk(bench)
    talk.turn([1, 2, 3, 4])
    number = talk.send([5, 6], new_tokens=12)
    for _ in range(5):
        bench.scheduler.step()
    pages = talk.session.pin.pages
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.retract_newest()
    assert talk.session.pin.pages == pages
    bench.run()
    assert talk.session.pin.pages > pages
    assert len(bench.channel.output(number)) == len(bench.wanted[number])
    bench.check_outputs()


def test_a_session_resumes_behind_the_tokens_that_its_client_saw(bench: Bench) -> None:
    """A stop string ends at a token; the core was further by then, and may have ended."""
    for new_tokens, steps in ((30, 8), (5, 12)):
        talk = Talk(bench, f"s{steps}")
        number = talk.send([1, 2, 3, 4, 5], new_tokens)
        for _ in range(steps):
            bench.scheduler.step()
        streamed = bench.channel.streams[number]
        assert len(streamed) > 3
        bench.scheduler.stop(number, 3)
        bench.run()
        talk.history = [*bench.prompts[number], *streamed[:3]]
        assert talk.session.tokens == _ints(talk.history)
        talk.turn([8, 9])
        check_everything(bench.scheduler.cache)
    bench.check_outputs()


def test_a_turn_right_after_the_one_before_waits_until_that_is_in_the_cache() -> None:
    bench = Bench(page_size=4)
    talk = Talk(bench)
    first = talk.send([1, 2, 3, 4, 5, 6], new_tokens=8)
    while first not in bench.channel.finished:
        bench.scheduler.step()
    talk.history = [*bench.prompts[first], *bench.channel.output(first)]
    second = talk.send([7])
    assert bench.scheduler.num_waiting == 1
    assert not bench.scheduler.idle
    bench.run()
    assert bench.channel.cached[second] == (len(talk.history) - 1) // 4 * 4
    bench.check_outputs()


def test_the_error_for_an_unknown_foreign_or_busy_session_names_the_id() -> None:
    bench = Bench()
    talk = Talk(bench)
    talk.turn([1, 2])
    name, message = refusal(bench, talk.send([3], owner="another"))
    assert name == "SessionNotFoundError"
    assert "'s'" in message
    talk.name = "t"
    assert refusal(bench, talk.send([3])) == (name, message.replace("'s'", "'t'")), "who has it is told to nobody"
    talk.name = "s"
    with pytest.raises(SessionNotFoundError, match="'s'"):
        bench.scheduler.sessions.close("s", "another")
    running = talk.send([3], new_tokens=20)
    assert refusal(bench, talk.send([4]))[0] == SessionBusyError.__name__
    bench.scheduler.sessions.close("s", "me")
    assert refusal(bench, talk.send([4]))[0] == "SessionNotFoundError"
    bench.run()
    assert bench.channel.output(running) == bench.wanted[running], "a turn that runs goes on to its end"
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.cache.tree.num_nodes == 0


def test_a_turn_follows_the_last_or_is_refused() -> None:
    bench = Bench()
    talk = Talk(bench, streaming=False)
    first = talk.turn([1, 2])
    name, message = refusal(bench, talk.send([3]))
    assert (name, str(first) in message) == ("ParameterError", True), message
    assert refusal(bench, talk.send([3], after="9"))[0] == "ParameterError"
    second = talk.send([3], after=str(first))
    bench.run()
    assert bench.channel.output(second) == bench.wanted[second]


def test_the_bos_token_is_left_out_within_a_session() -> None:
    bench = Bench()
    talk = Talk(bench)
    for tail, adds in (([1, 5, 6], [1, 5, 6]), ([1, 7], [7]), ([8], [8])):
        turn = SessionTurn("s", "me", "x", None, 1)
        number = bench.add([*talk.history, *adds], 3, sent=tail, session=turn)
        bench.run()
        assert bench.channel.output(number) == bench.wanted[number]
        talk.history = [*bench.prompts[number], *bench.wanted[number]]
    number = bench.add([*talk.history, 1], 3, sent=[1], session=SessionTurn("s", "me", "x", None, 1))
    assert "adds no tokens" in refusal(bench, number)[1]


def oracle_logprobs(bench: Bench, number: int, begins: int) -> list[tuple[int, float | None]]:
    """Token and logprob of a whole prompt, from position `begins` on, by the oracle."""
    prompt = bench.prompts[number]
    return list(zip(prompt, [None, *bench.oracle.prompt_logprobs(prompt)], strict=True))[begins:]


def test_logprobs_of_a_turns_prompt_are_those_of_the_whole_conversation(bench: Bench) -> None:
    """From each position of the turn's own tokens on, the first included, which the turn before predicts. They do not
    cost the session its cached tokens: where nothing was sampled, or the client saw less, the pin may end at the start
    of a page, and the token before it is computed again."""
    talk = Talk(bench)
    for number, start in enumerate([0, 2, 0, 6, 3, 0, 1, 0]):
        before, tail = len(talk.history), [1 + (5 * number + k) % 36 for k in range(1 + start + number % 4)]
        turn = talk.turn(tail, new_tokens=(number * 3) % 8, logprob_start=start, top_logprobs=0)
        assert bench.channel.prompt_logprobs[turn] == oracle_logprobs(bench, turn, before + start), f"turn {number}"
        assert bench.channel.cached[turn] >= before - 1 - 2 * bench.page_size
    number = talk.turn([5, 6, 7], logprob_start=-1, top_logprobs=0)
    assert number not in bench.channel.prompt_logprobs
    bench.check_outputs()


def test_logprobs_of_a_turn_that_was_retracted_come_once(bench: Bench) -> None:
    talk = Talk(bench)
    talk.turn([1, 2, 3, 4, 5, 6])
    number = talk.send([1 + k % 30 for k in range(30)], new_tokens=12, logprob_start=0, top_logprobs=0)
    for steps in (1, 2, 4):
        for _ in range(steps):
            bench.scheduler.step()
        bench.scheduler.drain_in_flight()
        bench.scheduler.retract_newest()
    bench.run()
    assert bench.channel.prompt_logprobs[number] == oracle_logprobs(bench, number, len(talk.history))
    bench.check_outputs()


def test_logprob_positions_count_from_the_start_of_the_turn() -> None:
    """Without the BOS token, where that is left out; a start beyond the end is refused, and changes nothing."""
    bench = Bench()
    talk = Talk(bench)
    talk.turn([1, 5, 6])
    for start, wanted in ((2, "must be in [-1, 1], because this turn adds 2 tokens to session 's', got 2"), (1, "")):
        turn = SessionTurn("s", "me", "x", None, 1)
        prompt = [*talk.history, 7, 8]
        number = bench.add(prompt, 3, sent=[1, 7, 8], session=turn, logprob_start=start, top_logprobs=0)
        if wanted:
            name, message = refusal(bench, number)
            assert (name, wanted in message) == ("ParameterError", True), message
    bench.run()
    assert bench.channel.prompt_logprobs[number] == oracle_logprobs(bench, number, len(prompt) - 1)
    assert bench.channel.output(number) == bench.wanted[number]


def test_sessions_time_out_when_no_turn_comes_and_never_during_one() -> None:
    bench, now = Bench(), [0.0]
    sessions = bench.scheduler.sessions
    sessions._clock = lambda: now[0]
    assert sessions.seconds_to_timeout() is None
    talk = Talk(bench, timeout=10.0)
    Talk(bench, "long")
    assert sessions.seconds_to_timeout() == 10.0
    number = talk.send([1, 2], new_tokens=4)
    now[0] = 50.0
    bench.run()
    assert bench.channel.output(number) == bench.wanted[number]
    assert sessions.count == 2
    now[0] = 59.0
    bench.scheduler.step()
    assert sessions.count == 2
    now[0] = 60.0
    bench.scheduler.step()
    assert (sessions.count, sessions.num_timed_out) == (1, 1)
    assert not bench.scheduler.cache.pins.held
    now[0] = 3600.0
    with pytest.raises(SessionNotFoundError):
        sessions.close("long", "me")
    with pytest.raises(ParameterError, match="timeout"):
        sessions.open(OpenSession("x", "me", True, float("nan")))


def test_the_number_of_sessions_is_bounded_and_names_are_unique() -> None:
    bench = Bench(options={"max_sessions": 2})
    Talk(bench, "a")
    with pytest.raises(ParameterError, match="'a' is open already"):
        Talk(bench, "a")
    Talk(bench, "b")
    with pytest.raises(SessionLimitError, match="2 sessions are open"):
        Talk(bench, "c")
    bench.scheduler.sessions.close("a", "me")
    Talk(bench, "c")


def test_no_key_can_hold_all_sessions() -> None:
    """A key with fewer sessions than another gets the one of the other's that has been idle longest."""
    bench = Bench(options={"max_sessions": 4})
    sessions = bench.scheduler.sessions

    def has(owner: str) -> list[str]:
        return [session.id for session in sessions.all() if session.owner == owner]

    for name in "abcd":
        sessions.open(OpenSession(name, "greedy", True))
    with pytest.raises(SessionLimitError):
        sessions.open(OpenSession("e", "greedy", True))
    prompt = {"sent": [5], "session": SessionTurn("a", "greedy", "1")}
    bench.add([5], sampling=SamplingParams(max_new_tokens=4, ignore_eos=True, seed=1), **prompt)
    sessions.open(OpenSession("x", "other", True))
    assert (has("greedy"), has("other")) == (["a", "c", "d"], ["x"])  # the running turn of the session is not lost
    sessions.open(OpenSession("y", "other", True))
    assert (has("greedy"), has("other")) == (["a", "d"], ["x", "y"])
    for owner in ("other", "greedy"):
        with pytest.raises(SessionLimitError):
            sessions.open(OpenSession("z", owner, True))
    bench.run()
    bench.check_outputs()


def test_a_key_with_only_busy_sessions_does_not_protect_the_next_key() -> None:
    bench = Bench(options={"max_sessions": 5})
    sessions = bench.scheduler.sessions
    for name in "abc":
        sessions.open(OpenSession(name, "busy", True))
        prompt = {"sent": [5], "session": SessionTurn(name, "busy", name)}
        bench.add([5], sampling=SamplingParams(max_new_tokens=4, ignore_eos=True, seed=1), **prompt)
    for name in "de":
        sessions.open(OpenSession(name, "greedy", True))
    sessions.open(OpenSession("x", "new", True))
    assert [session.id for session in sessions.all()] == ["a", "b", "c", "e", "x"]
    with pytest.raises(SessionLimitError):
        sessions.open(OpenSession("y", "new", True))
    bench.run()


def test_a_single_session_goes_to_the_key_without_one() -> None:
    bench = Bench(options={"max_sessions": 1})
    sessions = bench.scheduler.sessions
    sessions.open(OpenSession("a", "ann", True))
    with pytest.raises(SessionLimitError):
        sessions.open(OpenSession("b", "ann", True))
    sessions.open(OpenSession("a", "bob", True))
    assert [(session.owner, session.id) for session in sessions.all()] == [("bob", "a")]


def test_session_ids_are_private_to_each_key() -> None:
    """No key learns another's ids, or blocks another from using an id."""
    bench = Bench()
    talk = Talk(bench, "mine")
    talk.turn([1, 2, 3, 4, 5])
    bench.scheduler.sessions.open(OpenSession("mine", "another", True))
    theirs = bench.add([9, 8], 3, sent=[9, 8], session=SessionTurn("mine", "another", "x"))
    bench.run()
    assert bench.channel.output(theirs) == bench.wanted[theirs]
    bench.scheduler.sessions.close("mine", "another")
    talk.turn([6])
    bench.check_outputs()


def test_a_client_may_not_keep_a_session_forever() -> None:
    """At most a day, or as long as the engine's default."""
    for default, longest in ((10.0, 86_400.0), (1e6, 1e6)):
        sessions = Bench(options={"session_timeout": default}).scheduler.sessions
        sessions.open(OpenSession("a", "me", True, 1e300))
        sessions.open(OpenSession("b", "me", True, 5.0))
        assert [session.timeout for session in sessions.all()] == [longest, 5.0]


def test_the_pin_of_the_oldest_idle_session_is_released_for_a_request_that_needs_the_room(bench: Bench) -> None:
    """The session continues, and recomputes its tokens."""
    talks = [Talk(bench, name) for name in "abc"]
    bench.scheduler.cache.pins.share = 1.0
    for number, talk in enumerate(talks):
        talk.turn([10 + number] * 20, new_tokens=30)
    for talk in talks[1:]:
        assert talk.session.pin.node is not None
    everything = min(bench.context - 2, 64 * bench.page_size)
    request = bench.add([(7 * k) % 31 + 1 for k in range(everything)], 1)
    others = [bench.add([k + 1] * 90, 30) for k in range(2)]
    bench.run()
    assert bench.channel.output(request) == bench.wanted[request]
    assert all(bench.channel.output(one) == bench.wanted[one] for one in others)
    for talk in talks:
        talk.turn([3])
    bench.check_outputs()
    check_everything(bench.scheduler.cache)


def test_pins_are_released_oldest_first_and_counted() -> None:
    bench = Bench(pages=24, page_size=4, context=96)
    bench.scheduler.cache.pins.share = 1.0
    talks = [Talk(bench, name) for name in "ab"]
    for number, talk in enumerate(talks):
        talk.turn([10 + number] * 30, new_tokens=2)
    old, new = (talk.session.pin.pages for talk in talks)
    assert old == new == 7
    bench.add([3] * 60, 1)
    bench.run()
    assert [talk.session.pin.pages for talk in talks] == [0, 7]
    assert bench.scheduler.log.stats(0).num_pins_let_go == 1
    bench.check_outputs()


def test_waiting_turns_whose_pins_fill_the_pool_do_not_block_each_other() -> None:
    bench = Bench(pages=16, page_size=4, rows=2, context=64)
    bench.scheduler.cache.pins.share = 1.0
    talks = [Talk(bench, name) for name in "ab"]
    for number, talk in enumerate(talks):
        talk.turn([10 + number] * 28, new_tokens=2)
    for talk in talks:
        talk.send([5] * 20, new_tokens=10)
    bench.run()
    bench.check_outputs()
    assert set(bench.channel.finished) == set(bench.wanted)
    assert all(one.kind in ("stop", "length") for one in bench.channel.finished.values())


def test_idle_sessions_pin_no_more_than_their_share() -> None:
    bench = Bench(pages=40, page_size=4, options={"session_memory_fraction": 0.5})
    for number, name in enumerate("abcdef"):
        Talk(bench, name).turn([10 + number] * 24, new_tokens=2)
        kept = bench.scheduler.cache.groups[0].component.session
        assert kept <= 20
        assert bench.scheduler.num_session_tokens == kept * 4
    assert bench.scheduler.cache.pins.num_let_go == 3
    assert bench.scheduler.sessions.count == 6


def test_without_reuse_nothing_is_pinned_and_turns_are_correct() -> None:
    bench = Bench(options={"disable_radix_cache": True})
    talk = Talk(bench)
    for number in range(3):
        talk.turn([1 + number, 2])
    assert not bench.scheduler.cache.pins.held
    bench.check_outputs()


@pytest.mark.slow
@pytest.mark.parametrize("events", [500, pytest.param(3000, marks=pytest.mark.soak)])
def test_a_storm_of_sessions_leaves_nothing_behind(bench: Bench, events: int) -> None:
    """Concurrent turns, aborts, retractions, closed and reopened sessions, and too little memory for all."""
    scheduler, chance = bench.scheduler, random.Random(5)
    talks: dict[str, Talk] = {}
    running: dict[str, int] = {}
    for _ in range(events):
        name = chance.choice("abcdefghijkl")
        talk = talks.setdefault(name, Talk(bench, name)) if name not in talks else talks[name]
        if name not in running and len(talk.history) < 90:
            running[name] = talk.send([chance.randrange(1, 30) for _ in range(chance.randrange(1, 9))], 5)
        elif chance.random() < 0.2:
            scheduler.abort(running.get(name, 0))
        elif chance.random() < 0.2 or name not in running:
            scheduler.sessions.close(name, "me")
            del talks[name]
            running.pop(name, None)
        elif chance.random() < 0.1:
            scheduler.drain_in_flight()
            scheduler.retract_newest()
        scheduler.step()  # which checks that page counts add up
        for one, number in list(running.items()):
            finished = bench.channel.finished.get(number)
            if finished is not None:
                del running[one]
                if finished.kind in ("stop", "length"):
                    talks[one].history = [*bench.prompts[number], *bench.channel.output(number)]
    bench.run()
    assert idle_fault(scheduler.cache) == ""
    check_everything(scheduler.cache)
    for name in talks:
        scheduler.sessions.close(name, "me")
    bench.check_outputs()
    assert not scheduler.cache.pins.held
    assert scheduler.flush_cache()
    assert all(group.pool.num_free == group.pool.total for group in scheduler.cache.groups)
    assert (scheduler.cache.tree.num_nodes, scheduler.log.counts.memory_faults) == (0, 0)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("schedules", [200, pytest.param(2000, marks=pytest.mark.soak)])
def test_schedules_with_sessions(schedules: int) -> None:
    """Turns that end, with aborts, stops, closes and timeouts in the middle of them, for each kind of memory."""
    met: Counter[str] = simulate(schedules, kind=SessionSimulation, sizes=ROOM_FOR_TURNS)
    assert met["turns that ended"] >= schedules // 2, met
    for event in (
        "began where the last turn ended",
        "began where its pin was, with states",
        "closed amid a turn",
        "aborted amid a turn",
        "stopped amid a turn",
        "held until the turn before it is cached",
        "timed out",
        "let go for others",
        "idle with pins",
        "refused by SessionNotFoundError",
        "refused by SessionBusyError",
        "refused by ParameterError",
    ):
        assert met[event] >= schedules // 100, met

"""Pins of sessions: which are released for other requests, and where they are when the client saw less than
the core."""

from __future__ import annotations

import pytest
from helpers.scheduling import Bench, Sees
from helpers.simulation import STATE
from helpers.talks import Talk

KINDS: tuple[tuple[Sees, ...], ...] = ((None,), (6,), (None, 6), (None, 18), (None, STATE), (STATE,), (None, STATE, 6))


def six_talks(running: int) -> tuple[Bench, list[Talk]]:
    """Each has a pin, and may use all of the pool; the next turn of the first ones has been sent."""
    bench = Bench(pages=60, page_size=4, rows=6, context=200)
    bench.scheduler.cache.pins.share = 1.0
    talks = [Talk(bench, name) for name in "abcdef"]
    for number, talk in enumerate(talks):
        talk.turn([10 + number] * 24, new_tokens=4)
    for talk in talks[:running]:
        talk.send([5], new_tokens=8)
    return bench, talks


def test_no_pin_is_released_for_a_request_that_would_still_not_fit() -> None:
    """Four turns run, whose rows use the pages that their sessions pin; two sessions are idle."""
    bench, _ = six_talks(running=4)
    for _ in range(3):
        bench.scheduler.step()
    request = bench.add([3] * 184, 4)
    for _ in range(3):
        bench.scheduler.step()
    assert bench.scheduler.num_waiting == 1
    assert bench.scheduler.cache.pins.num_let_go == 0
    bench.run()
    assert bench.channel.output(request) == bench.wanted[request]
    bench.check_outputs()


def test_only_idle_sessions_lose_their_pins_where_that_is_enough() -> None:
    """The oldest pins are those of running turns: they stay, and so do others that need not be released."""
    bench, talks = six_talks(running=2)
    for _ in range(2):
        bench.scheduler.step()
    available = bench.scheduler.cache.groups[0].available
    request = bench.add([3] * (4 * available - 4), 1)
    while request not in bench.channel.cached:
        assert bench.scheduler.num_running, "nobody runs, and the request waits"
        bench.scheduler.step()
    assert bench.scheduler.num_running == 3, "it was to run beside the turns"
    assert [talk.session.pin.pages for talk in talks][2:] == [0, 6, 6, 6]
    assert all(talk.session.pin.pages for talk in talks[:2])
    bench.run()
    bench.check_outputs()


def test_turns_that_run_out_of_pages_keep_their_pins() -> None:
    """Their rows use the same pages, so releasing pins would free none: a row has to be retracted."""
    bench = Bench(pages=24, page_size=4, rows=2, context=90, options={"schedule_conservativeness": 0.01})
    bench.scheduler.cache.pins.share = 1.0
    talks = [Talk(bench, name) for name in "ab"]
    for number, talk in enumerate(talks):
        talk.turn([10 + number] * 24, new_tokens=4)
    for talk in talks:
        talk.send([5], new_tokens=40)
    while not bench.scheduler.log.counts.retractions:
        bench.scheduler.step()
    assert bench.scheduler.cache.pins.num_let_go == 0
    assert all(talk.session.pin.pages for talk in talks)
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pin_beyond_what_the_client_saw_moves_back(page_size: int, kind: tuple[Sees, ...]) -> None:
    """The turn had ended by its length when the client found a stop string earlier in its output."""
    first, *more = kind
    pages = 512 // page_size
    bench = Bench(pages, page_size, window=first, more=tuple((sees, pages) for sees in more), context=400)
    talk = Talk(bench)
    talk.turn([1, 2, 3, 4, 5] * 8, new_tokens=4)
    talk.stopped_turn([7] * 5, seen=40, lag=30, new_tokens=60)
    pin, length = talk.session.pin, len(talk.history)
    assert len(talk.session.tokens) == 4 * length
    kept = pin.pages * page_size
    assert kept <= length
    if kind == (None,):
        assert kept == length // page_size * page_size
    number = talk.turn([8, 9])
    assert bench.channel.cached[number] >= kept
    bench.check_outputs()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if STATE not in kind], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_resumes_where_the_client_found_a_stop_string(page_size: int, kind: tuple[Sees, ...]) -> None:
    """However far ahead the core was by then, up to the lead on a busy server: less than a page is computed again."""
    first, *more = kind
    for lag in range(17):
        pages = 1024 // page_size
        bench = Bench(pages, page_size, window=first, more=tuple((sees, pages) for sees in more), context=400)
        talk = Talk(bench)
        talk.turn([1, 2, 3, 4, 5] * 12, new_tokens=4)
        talk.stopped_turn([7] * 5, seen=61, lag=lag)
        length = len(talk.history)
        number = talk.turn([8, 9])
        assert length - 1 - page_size < bench.channel.cached[number] <= length, f"lag {lag}"
        bench.check_outputs()

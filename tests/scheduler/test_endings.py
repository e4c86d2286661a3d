"""How requests end (by a token, by length, by their client), and how their output is published."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.scheduling import EOS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.mem_cache.invariants import check_everything, page_balance
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.runner.plan import SamplingUpdate
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import StepOutputs
from sglang_jax.scheduler.request import RequestState

PROMPT = [5, 6, 7, 8, 9, 10]


def endless(tokens: int, seed: int = 5, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True, **fields)


def seed_that_ends_at(length: int, token: int = EOS) -> int:
    """A seed with which `token` is sampled as output number `length` and not before."""
    oracle = Oracle(40)
    for seed in range(100_000):
        output = oracle.output(PROMPT, seed, length, (token,))
        if len(output) == length and output[-1] == token:
            return seed
    raise AssertionError("no such seed")


def step_until(bench: Bench, request: int, tokens: int) -> None:
    while len(bench.channel.streams.get(request, [])) < tokens:
        bench.scheduler.step()


def idle_and_clean(bench: Bench) -> None:
    """No page is owned or locked."""
    bench.run()
    check_everything(bench.scheduler.cache)
    balance = page_balance(bench.scheduler.cache, bench.scheduler.cache.groups[0])
    assert (balance.request_owned, balance.protected, balance.retired) == (0, 0, 0)
    assert bench.scheduler.cache.num_free_rows == bench.rows
    assert not bench.scheduler.requests


def last_updates(bench: Bench) -> list[SamplingUpdate]:
    return [update for plan in bench.runner.plans for update in plan.row_updates.sampling]


class TestByToken:
    @pytest.mark.parametrize("room", [0, 3])
    def test_eos_on_the_last_allowed_token_is_a_stop(self, room: int) -> None:
        """Finish reason "length" for a request that did end by itself makes clients ask for more."""
        bench = Bench()
        sampling = SamplingParams(max_new_tokens=6 + room, seed=seed_that_ends_at(6))
        request = bench.add(PROMPT, sampling=sampling)
        bench.run()
        finished = bench.channel.finished[request]
        assert (finished.kind, finished.matched_token, finished.num_tokens) == ("stop", EOS, 6)
        bench.check_outputs()

    def test_eos_on_the_first_token(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=9, seed=seed_that_ends_at(1)))
        idle_and_clean(bench)
        assert bench.channel.output(request) == [EOS]

    def test_with_eos_ignored_output_continues_to_its_length(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=endless(9, seed_that_ends_at(3)))
        bench.run()
        finished = bench.channel.finished[request]
        assert (finished.kind, finished.matched_token, finished.num_tokens) == ("length", None, 9)
        assert bench.channel.output(request)[2] == EOS
        bench.check_outputs()

    @pytest.mark.parametrize("count", [1, 5, 16])
    def test_stop_token_ids(self, count: int) -> None:
        bench = Bench()
        stop = 17
        others = [token for token in range(20, 40) if token != stop][: count - 1]
        sampling = endless(12, seed_that_ends_at(4, stop), stop_token_ids=[*others, stop])
        request = bench.add(PROMPT, sampling=sampling)
        bench.run()
        finished = bench.channel.finished[request]
        sampled = bench.channel.output(request)
        assert finished.kind == "stop"
        assert finished.matched_token == sampled[-1]
        assert finished.matched_token in sampling.stop_token_ids
        bench.check_outputs()

    def test_one_requests_stop_ids_do_not_end_another(self) -> None:
        """Columns of unused stop ids must match no token, whatever request had the row before."""
        bench = Bench(rows=2)
        seed = seed_that_ends_at(4, 17)
        for _ in range(2):
            bench.add(PROMPT, sampling=endless(12, seed, stop_token_ids=[17, 18, 19]))
            bench.add(PROMPT, sampling=endless(12, seed))
        bench.run()
        assert [bench.channel.finished[k].kind for k in (1, 2, 3, 4)] == ["stop", "length", "stop", "length"]
        bench.check_outputs()

    def test_the_plan_names_every_id_that_min_new_tokens_masks(self) -> None:
        """The sampler masks the ids."""
        bench = Bench()
        bench.runner.keep_plans = True
        bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=3, min_new_tokens=2, seed=1, stop_token_ids=[7, 9, 7]))
        bench.add(PROMPT[:3], sampling=endless(3, min_new_tokens=1, stop_token_ids=[7]))
        bench.run()
        with_eos, without_eos = last_updates(bench)
        assert (with_eos.sampling.min_new_tokens, sorted(with_eos.stop_ids.tolist())) == (2, [EOS, 7, 9])
        assert (without_eos.sampling.min_new_tokens, without_eos.stop_ids.tolist()) == (1, [7])


class TestByLength:
    def test_max_new_tokens(self) -> None:
        bench = Bench()
        ids = [bench.add(PROMPT, sampling=endless(n)) for n in (1, 2, 7)]
        idle_and_clean(bench)
        assert [bench.channel.finished[request].num_tokens for request in ids] == [1, 2, 7]
        assert {finished.kind for finished in bench.channel.finished.values()} == {"length"}
        bench.check_outputs()

    @pytest.mark.parametrize("limit", [None, 1000])
    def test_the_context_length_bounds_max_new_tokens(self, limit: int | None) -> None:
        bench = Bench(context=24)
        sampling = SamplingParams(max_new_tokens=limit, seed=5, ignore_eos=True)
        request = bench.add(PROMPT, sampling=sampling)
        longest = bench.add([*range(1, 24)], sampling=sampling)
        idle_and_clean(bench)
        assert bench.channel.finished[request].num_tokens == 24 - 6
        assert bench.channel.finished[longest].num_tokens == 1
        bench.check_outputs()

    def test_the_token_of_the_step_in_flight_is_dropped(self) -> None:
        """One more step is in flight when a stop token arrives: its token must not be published, and its page must be
        freed once."""
        bench = Bench(page_size=1)
        bench.runner.keep_plans = True
        request = bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=20, seed=seed_that_ends_at(4)))
        idle_and_clean(bench)
        assert len(bench.runner.plans) == 5
        assert len(bench.channel.output(request)) == 4
        assert bench.scheduler.cache.groups[0].component.evictable == 6 + 4 - 1

    @given(data=st.data())
    @settings(max_examples=25, deadline=None)
    def test_only_computed_kv_is_cached_at_the_end(self, data: st.DataObject) -> None:
        """Prompt and output without the last token, rounded down to whole pages."""
        prompt_len, tokens = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
        bench = Bench(page_size=data.draw(st.sampled_from([1, 4, 16])))
        request = bench.add(list(range(1, 1 + prompt_len)), sampling=endless(tokens))
        idle_and_clean(bench)
        whole = [*range(1, 1 + prompt_len), *bench.channel.output(request)]
        cached = bench.scheduler.cache.peek(np.array(whole, np.int32).tobytes(), 10**6, None)
        assert cached == (prompt_len + tokens - 1) // bench.page_size * bench.page_size


class TestAbort:
    def test_while_it_waits(self) -> None:
        bench = Bench(rows=1)
        running = bench.add(PROMPT, sampling=endless(5))
        waiting = bench.add(PROMPT, sampling=endless(5))
        bench.scheduler.step()
        bench.scheduler.abort(waiting)
        bench.scheduler.step()
        finished = bench.channel.finished[waiting]
        assert (finished.kind, finished.num_tokens, finished.tokens) == ("abort", 0, b"")
        idle_and_clean(bench)
        assert bench.channel.finished[running].kind == "length"
        bench.check_outputs()

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_in_the_middle_of_its_prompt(self, steps: int) -> None:
        """A chunk is in flight: the pages that it writes must wait for it, and no chunk may be cached twice."""
        bench = Bench(chunk=6)
        request = bench.add(list(range(1, 31)), sampling=endless(5))
        for _ in range(steps):
            bench.scheduler.step()
        bench.scheduler.abort(request)
        assert len(bench.scheduler.cache.open_rows) == 1, "the row waits for the step in flight"
        check_everything(bench.scheduler.cache)
        other = bench.add(list(range(1, 31)), sampling=endless(5))
        idle_and_clean(bench)
        assert bench.channel.finished[request].kind == "abort"
        assert bench.channel.cached[other] == 6 * steps // 4 * 4
        bench.check_outputs()

    def test_while_it_decodes_its_output_is_not_kept(self) -> None:
        bench = Bench(page_size=1)
        request = bench.add(PROMPT, sampling=endless(30))
        step_until(bench, request, 9)
        bench.scheduler.abort(request)
        idle_and_clean(bench)
        finished = bench.channel.finished[request]
        assert (finished.kind, finished.num_tokens) == ("abort", 9)
        assert bench.channel.streams[request] == bench.wanted[request][:9]
        assert bench.scheduler.cache.groups[0].component.evictable == 6, "of the tree's prefix nothing is touched"

    def test_a_disconnected_client_leaves_nothing_running(self) -> None:
        """Regression: requests whose reader had left ran to their last token."""
        bench = Bench(pages=200, rows=8)
        ids = [bench.add([k, *PROMPT], sampling=endless(100)) for k in range(1, 13)]
        step_until(bench, ids[0], 5)
        for request in ids:
            bench.scheduler.abort(request)
        assert bench.scheduler.num_running == len(bench.scheduler.queue) == 0
        bench.scheduler.step()
        assert bench.scheduler.idle
        idle_and_clean(bench)
        assert {finished.kind for finished in bench.channel.finished.values()} == {"abort"}
        assert bench.scheduler.log.counts.aborted == 12

    def test_of_a_retracted_request_publishes_its_kept_output(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=endless(30), stream=False)
        for _ in range(8):
            bench.scheduler.step()
        bench.scheduler.drain_in_flight()
        assert bench.scheduler.retract_newest()
        assert bench.scheduler.requests[request].state is RequestState.RETRACTED
        bench.scheduler.abort(request)
        idle_and_clean(bench)
        assert bench.channel.output(request) == bench.wanted[request][:8]

    def test_of_a_finished_request_that_still_has_its_row(self) -> None:
        """The end is published while a step in flight keeps the row: an abort that comes then must not free
        it again."""
        bench = Bench()
        request = bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=20, seed=seed_that_ends_at(3)))
        while request not in bench.channel.finished:
            bench.scheduler.step()
        assert len(bench.scheduler.cache.open_rows) == 1
        bench.scheduler.abort(request)
        bench.scheduler.stop(request)
        idle_and_clean(bench)
        assert bench.channel.finished[request].kind == "stop"
        assert bench.scheduler.log.counts.aborted == 0

    def test_twice_or_of_an_unknown_request_is_ignored(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=endless(9))
        bench.scheduler.abort(999)
        bench.scheduler.step()
        bench.scheduler.abort(request)
        bench.scheduler.abort(request)
        idle_and_clean(bench)
        bench.scheduler.abort(request)
        idle_and_clean(bench)
        assert list(bench.channel.finished) == [request]

    def test_a_released_row_is_taken_again_at_once(self) -> None:
        bench = Bench(rows=1)
        first = bench.add(PROMPT, sampling=endless(30))
        step_until(bench, first, 3)
        second = bench.add(PROMPT[::-1], sampling=endless(5))
        bench.scheduler.abort(first)
        idle_and_clean(bench)
        assert bench.channel.finished[second].kind == "length"
        bench.check_outputs()


class TestStop:
    def test_nothing_more_is_published_and_the_kv_is_kept(self) -> None:
        """The client saw its stop string; the conversation will continue from there."""
        bench = Bench(page_size=1)
        request = bench.add(PROMPT, sampling=endless(30))
        step_until(bench, request, 9)
        bench.scheduler.stop(request)
        idle_and_clean(bench)
        assert request not in bench.channel.finished
        assert bench.channel.streams[request] == bench.wanted[request][:9]
        turn = bench.add([*PROMPT, *bench.wanted[request][:9], 3], sampling=endless(3))
        bench.run()
        assert bench.channel.cached[turn] == 6 + 9 - 1, "all but the last token, whose KV was in flight"
        bench.check_outputs()

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_before_the_first_token(self, steps: int) -> None:
        bench = Bench(chunk=6)
        request = bench.add(list(range(1, 31)), sampling=endless(5))
        for _ in range(steps):
            bench.scheduler.step()
        bench.scheduler.stop(request)
        idle_and_clean(bench)
        assert not bench.channel.finished
        assert bench.scheduler.cache.groups[0].component.evictable == 6 * steps // 4


class TestPublishing:
    def test_without_streaming_all_tokens_come_with_the_end(self) -> None:
        bench = Bench()
        streamed = bench.add(PROMPT, sampling=endless(6, 1))
        at_once = bench.add(PROMPT, sampling=endless(6, 2), stream=False)
        also_streamed = bench.add(PROMPT, sampling=endless(6, 3))
        bench.run()
        assert set(bench.channel.streams) == {streamed, also_streamed}
        assert np.frombuffer(bench.channel.finished[at_once].tokens, np.int32).tolist() == bench.wanted[at_once]
        assert bench.channel.finished[streamed].tokens == b""
        bench.check_outputs()

    def test_without_streaming_a_retraction_loses_nothing(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=endless(12), stream=False)
        for retract_at in (4, 9):
            while not bench.scheduler.rows.num_tokens.max() >= 6 + retract_at:
                bench.scheduler.step()
            bench.scheduler.drain_in_flight()
            bench.scheduler.retract_newest()
        idle_and_clean(bench)
        assert bench.channel.output(request) == bench.wanted[request]

    def test_a_step_is_one_message_or_none_without_output(self) -> None:
        bench = Bench()
        bench.add(PROMPT, sampling=endless(4, 1))
        bench.add(PROMPT[::-1], sampling=endless(4, 2))
        bench.add(PROMPT[:2], sampling=endless(4, 3), stream=False)
        bench.run()
        messages = bench.channel.messages
        assert all(isinstance(message, StepOutputs) for message in messages)
        assert [len(message.ids) // 8 for message in messages] == [0, 2, 2, 2, 2]
        assert [len(message.started) for message in messages] == [3, 0, 0, 0, 0]
        assert [len(message.finished) for message in messages] == [0, 0, 0, 0, 3]

    def test_only_the_seed_decides_the_output(self) -> None:
        """Requests without a seed get one each, the same after a restart; requested seeds may be negative."""

        def seeds(random_seed: int) -> list[int]:
            bench = Bench(options={"random_seed": random_seed})
            bench.runner.keep_plans = True
            for _ in range(4):
                bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=1))
            bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=1, seed=-1))
            bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=1, seed=12))
            bench.run()
            return [update.seed for update in last_updates(bench)]

        once, again, other = seeds(0), seeds(0), seeds(1)
        assert once == again
        assert len(set(once[:4] + other[:4])) == 8
        assert once[4:] == other[4:] == [2**63 - 1, 12]
        assert all(0 <= seed < 2**63 for seed in once + other)

    def test_the_plan_holds_the_history_where_penalties_count_tokens(self) -> None:
        """After a retraction the kept output counts too; otherwise penalties start over."""
        bench = Bench()
        bench.runner.keep_plans = True
        request = bench.add(PROMPT, sampling=endless(9, frequency_penalty=0.5))
        step_until(bench, request, 4)
        bench.scheduler.drain_in_flight()
        bench.scheduler.retract_newest()
        bench.add(PROMPT[:2], sampling=endless(2))
        bench.run()
        first, second, other = last_updates(bench)
        assert first.history is not None
        assert first.history.tolist() == PROMPT
        assert second.history is not None
        assert second.history.tolist() == [*PROMPT, *bench.wanted[request][:5]]
        assert second.prompt_len == 6
        assert other.history is None


class TestFlush:
    def test_refused_while_anything_runs_or_waits(self) -> None:
        bench = Bench(rows=1)
        bench.add(PROMPT, sampling=endless(3))
        assert not bench.scheduler.flush_cache()
        bench.scheduler.step()
        assert not bench.scheduler.flush_cache()
        bench.run()
        assert bench.scheduler.cache.groups[0].component.evictable > 0
        assert bench.scheduler.flush_cache()
        assert bench.scheduler.cache.groups[0].pool.num_free == bench.pages

    def test_right_after_an_end_it_waits_for_the_step_in_flight(self) -> None:
        bench = Bench()
        request = bench.add(PROMPT, sampling=SamplingParams(max_new_tokens=20, seed=seed_that_ends_at(3)))
        while request not in bench.channel.finished:
            bench.scheduler.step()
        assert not bench.scheduler.idle
        assert bench.scheduler.flush_cache()
        assert bench.scheduler.idle
        assert bench.scheduler.cache.groups[0].pool.num_free == bench.pages

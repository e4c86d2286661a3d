"""No request starves under any policy, none waits without a reason, and a crowd delays other requests little."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.scheduling import Bench, RecordingChannel
from helpers.watch import Watch

from sglang_jax.config import EvictionPolicy, SchedulePolicy
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import loop as loop_module
from sglang_jax.scheduler.admission import AGED_TURN, BACKFILL_SEATS, BACKFILL_STEPS
from sglang_jax.scheduler.loop import MESSAGES_PER_TURN, SchedulerLoop
from sglang_jax.scheduler.messages import AbortRequest, Inbound, NewRequest
from sglang_jax.scheduler.rows import RELEASES_PER_STEP

HOT = [1 + (7 * i) % 37 for i in range(16)]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


class TestNoStarvation:
    @pytest.mark.parametrize("policy", SchedulePolicy)
    def test_the_request_that_the_policy_puts_last_is_served(self, policy: SchedulePolicy) -> None:
        """Regression: under lpm a cold request had not started after 20,000 steps while 4,712 hot ones finished."""
        bench = Bench(rows=2, chunk=32, budget=64, options={"schedule_policy": policy})
        watch = Watch(bench)
        bench.add([*HOT, 39], sampling=endless(6))
        watch.step()
        # One token: no cached prefix, the shortest output, the lowest priority.
        last = bench.add([38], sampling=endless(1))
        seats = 0
        for k in range(300):
            if len(bench.scheduler.queue) < 6:
                bench.add([*HOT, 1 + k % 37], sampling=endless(3 + k % 3), priority=5)
                seats += 1
            watch.step()
            if last in bench.channel.cached:
                break
        assert last in bench.channel.cached
        assert seats <= 2 * AGED_TURN + 8

    def test_a_request_that_waits_for_a_prefix_can_be_admitted_in_the_same_pass(self) -> None:
        """Regression: skipped once to wait for a prefix, the oldest was not considered again while one pass admitted a
        whole burst."""
        bench = Bench(rows=16, page_size=1, chunk=64, budget=96)
        bench.add([1, 2, 3, 4, 5, 6], sampling=endless(4))
        oldest = bench.add([1, 38, 39], sampling=endless(4))
        burst = [bench.add([2 + k], sampling=endless(1)) for k in range(AGED_TURN + 4)]
        bench.scheduler.step()
        assert oldest in bench.channel.cached
        assert len(set(burst) & set(bench.channel.cached)) == len(burst)
        order = list(bench.channel.cached)
        assert order.index(oldest) == AGED_TURN
        bench.run()
        bench.check_outputs()

    def test_a_request_that_was_retracted_often_is_spared_for_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The lowest priority loses its row first, but not forever."""
        options = {"schedule_policy": "priority", "schedule_conservativeness": 0.01}
        bench = Bench(pages=12, rows=4, options=options)
        low = bench.add([5, 6, 7, 8], sampling=endless(28))
        for k in range(400):
            waiting = sum(request.priority > 0 for request in bench.scheduler.queue.requests())
            if waiting < 2:
                bench.add([9 + k % 20, 6, 7, 8], sampling=endless(20), priority=9)
            bench.scheduler.step()
            check_everything(bench.scheduler.cache)
            if low in bench.channel.finished:
                break
        assert bench.channel.finished[low].kind == "length"
        assert bench.scheduler.log.counts.retractions > 3


class TestHeadOfLine:
    def crowded(self, **sizes: int) -> tuple[Bench, int, int]:
        """One request runs for long, and another does not fit next to it."""
        bench = Bench(pages=40, rows=4, context=200, **sizes)
        runs = bench.add([3, 4], sampling=endless(100))
        bench.scheduler.step()
        large = bench.add([1 + (5 * i) % 37 for i in range(120)], sampling=endless(2))
        return bench, runs, large

    def test_others_overtake_it_into_room_that_it_cannot_use(self) -> None:
        """Regression: a 15.5k prompt in a pool of 16k blocked all others for 507 steps."""
        bench, _, large = self.crowded()
        small = bench.add([9, 9], sampling=endless(2))
        for _ in range(4):
            bench.scheduler.step()
        assert small in bench.channel.finished
        assert large not in bench.channel.cached
        bench.run()
        bench.check_outputs()

    @pytest.mark.parametrize("crowd", [3, 12])
    def test_a_request_that_fits_is_found_behind_any_number_that_do_not(self, crowd: int) -> None:
        """Regression: behind eight that did not fit, no request was considered."""
        bench = Bench(pages=64, rows=16, chunk=64, budget=64, context=256)
        bench.add([1] * 4, sampling=endless(200))
        for _ in range(2):
            bench.scheduler.step()
        for k in range(crowd):
            bench.add([2 + k] * 200, sampling=endless(1))
        small = bench.add([30] * 4, sampling=endless(2))
        for _ in range(4):
            bench.scheduler.step()
        assert small in bench.channel.finished
        bench.run()
        bench.check_outputs()

    def test_each_that_does_not_fit_is_overtaken_a_bounded_number_of_times(self) -> None:
        bench, _, large = self.crowded()
        second = bench.add([2 + (5 * i) % 36 for i in range(121)], sampling=endless(2))
        for k in range(8):
            bench.add([10 + k, 9], sampling=endless(1))
            bench.scheduler.step()
        waiting = {request.id: request.waiting.overtaken_by for request in bench.scheduler.queue.requests()}
        assert waiting[large] == waiting[second] >= 7
        bench.run()
        bench.check_outputs()

    def test_room_is_kept_for_the_rest_of_a_prompt_in_progress(self) -> None:
        """Without this, another request takes the pages that it will need, and one of the two is retracted."""
        bench = Bench(pages=40, rows=4, chunk=16, budget=32, context=200, options={"schedule_conservativeness": 0.01})
        bench.add([1 + (5 * i) % 37 for i in range(120)], sampling=endless(2))
        bench.scheduler.step()
        other = bench.add([2 + (7 * i) % 36 for i in range(60)], sampling=endless(2))
        while other not in bench.channel.cached:
            bench.scheduler.step()
        bench.run()
        assert bench.scheduler.log.counts.retractions == 0
        assert list(bench.channel.finished) == [1, other]
        bench.check_outputs()

    def test_room_is_kept_after_a_number_of_overtakings(self) -> None:
        bench, _, large = self.crowded()
        passed = 0
        for k in range(60):
            if len(bench.scheduler.queue) < 3:
                bench.add([10 + k % 20, 9], sampling=endless(1))
            bench.scheduler.step()
            passed = sum(request > large for request in bench.channel.cached)
        assert BACKFILL_SEATS <= passed <= BACKFILL_SEATS + 1
        assert large not in bench.channel.cached
        bench.run()
        assert list(bench.channel.cached).index(large) == passed + 1, "it is the next to have a row"
        bench.check_outputs()

    def test_room_is_kept_after_a_number_of_steps(self) -> None:
        bench = Bench(pages=600, rows=4, context=2000, chunk=64, budget=64, scribble=False)
        bench.add([3, 4], sampling=endless(1500))
        bench.scheduler.step()
        large = bench.add([1 + (5 * i) % 37 for i in range(1990)], sampling=endless(2))
        for step in range(BACKFILL_STEPS + 10):
            if step % 20 == 0:
                assert step > BACKFILL_STEPS or not bench.scheduler.queue.requests()[1:], "all others have passed"
                bench.add([10 + step // 20, 9], sampling=endless(1))
            bench.scheduler.step()
        assert 10 < len(bench.channel.finished) < BACKFILL_SEATS, "fewer than may pass"
        late = bench.add([33, 9], sampling=endless(1))
        for _ in range(20):
            bench.scheduler.step()
        waiting = [request.id for request in bench.scheduler.queue.requests()]
        assert (waiting[0], waiting[-1]) == (large, late)
        bench.run()
        order = list(bench.channel.cached)
        assert order.index(large) < order.index(late)
        bench.check_outputs()

    def test_a_refusal_does_not_touch_the_order_of_eviction(self) -> None:
        """Regression: a refusal counted as a hit, so requests that were never admitted set the order of eviction."""
        bench = Bench(pages=40, rows=4, context=200, options={"radix_eviction_policy": EvictionPolicy.LFU})
        bench.add(HOT, sampling=endless(1))
        bench.run()
        bench.add([3, 4], sampling=endless(100))
        bench.scheduler.step()
        (hot,) = (node for node in bench.scheduler.cache.tree.nodes() if len(node.key) >= 48)
        hits, nodes = hot.hits, bench.scheduler.cache.tree.num_nodes
        bench.add([*HOT[:10], *[9] * 120], sampling=endless(60))
        for _ in range(20):
            bench.scheduler.step()
        assert (hot.hits, bench.scheduler.cache.tree.num_nodes) == (hits, nodes)
        assert len(bench.scheduler.queue) == 1


class TestSharers:
    def test_a_request_that_waits_for_a_stalled_prefix_computes_it(self) -> None:
        """The request that computes it may have to wait for many shorter prompts."""
        bench = Bench(pages=900, chunk=8, budget=32, rows=16, context=1200)
        bench.scheduler._admission.aged_turn = 1000
        bench.add([38, *[1 + (3 * i) % 37 for i in range(1000)]], sampling=endless(1))
        bench.scheduler.step()
        prefix = [1 + (5 * i) % 37 for i in range(1000)]
        leader = bench.add(prefix, sampling=endless(1), priority=1)
        while not any(request.id == leader and request.kv for request in bench.scheduler.requests.values()):
            bench.scheduler.step()
        bench.scheduler.step()
        started = bench.scheduler.requests[leader].record.kv_allocated_len
        sharer = bench.add(prefix[: started + 9], sampling=endless(1), priority=2)
        for k in range(40):
            bench.add([9 + k % 20, *[k % 30] * 12], sampling=endless(1), priority=2)
            bench.scheduler.step()
        assert bench.scheduler.requests[leader].record.kv_allocated_len < started + 9, "it got no further meanwhile"
        assert sharer in bench.channel.finished
        bench.run()
        bench.check_outputs()

    def test_no_request_waits_for_a_page_whose_last_token_it_must_run_itself(self) -> None:
        bench = Bench(chunk=6, budget=32)
        bench.runner.keep_plans = True
        for _ in range(2):
            bench.add(HOT[:8], sampling=endless(2))
        bench.scheduler.step()
        bench.scheduler.step()
        assert bench.runner.plans[1].query_lens.tolist() == [2, 4]
        bench.run()
        bench.check_outputs()

    def test_a_prefix_cached_meanwhile_shortens_a_waiting_prompt(self) -> None:
        bench = Bench(pages=200, chunk=16, budget=32, context=400)
        prefix = [1 + (5 * i) % 37 for i in range(40)]
        bench.add(prefix, sampling=endless(1))
        sharer = bench.add([*prefix, 7, 8, 9], sampling=endless(1))
        other = bench.add([38, *[1 + (3 * i) % 37 for i in range(40)]], sampling=endless(1))
        for _ in range(5):
            bench.scheduler.step()
        assert bench.channel.cached[sharer] == 40
        assert sharer in bench.channel.finished
        assert other not in bench.channel.finished
        bench.run()
        bench.check_outputs()


class TestCrowds:
    @staticmethod
    def all_ended() -> Bench:
        """As many requests as three steps release have just ended together."""
        rows = 3 * RELEASES_PER_STEP
        bench = Bench(pages=2 * rows, rows=rows, chunk=4096, budget=4096, scribble=False)
        for k in range(rows):
            bench.add([1 + k % 38, k // 38], sampling=endless(3))
        while len(bench.channel.finished) < rows:
            bench.scheduler.step()
        return bench

    def test_rows_of_many_that_end_at_once_are_released_a_few_per_step(self) -> None:
        bench = self.all_ended()
        left = []
        while not bench.scheduler.idle:
            check_everything(bench.scheduler.cache)
            left.append(len(bench.scheduler.cache.open_rows))
            assert bench.scheduler.num_running == 0
            bench.scheduler.step()
        assert left == [2 * RELEASES_PER_STEP, RELEASES_PER_STEP]
        assert bench.scheduler.cache.all_rows_free
        bench.check_outputs()

    def test_a_request_that_needs_their_rows_gets_them_at_once(self) -> None:
        bench = self.all_ended()
        later = [bench.add([1 + k % 38, 30 + k // 38], sampling=endless(2)) for k in range(bench.rows)]
        bench.scheduler.step()
        assert set(later) <= set(bench.channel.cached)
        bench.run()
        bench.check_outputs()

    def test_a_request_that_needs_their_pages_gets_them_at_once(self) -> None:
        bench = Bench(pages=400, rows=200, chunk=4096, budget=4096, context=1300, scribble=False)
        for k in range(199):
            bench.add([1 + k % 38, k // 38], sampling=endless(2))
        while len(bench.channel.finished) < 199:
            bench.scheduler.step()
        large = bench.add([1 + (5 * i) % 37 for i in range(1200)], sampling=endless(1))
        bench.scheduler.step()
        assert large in bench.channel.cached
        bench.run()
        bench.check_outputs()

    def test_no_room_is_kept_for_the_output_of_a_finished_request(self) -> None:
        """Its row is still in flight, but it samples no more tokens."""
        bench = Bench(pages=30, rows=4, context=120)
        gone = bench.add([5, 6], sampling=endless(110))
        bench.add([7, 8], sampling=endless(4))
        bench.scheduler.step()
        bench.scheduler.abort(gone)
        assert bench.scheduler.rows.num_leaving == 1
        late = bench.add([1 + (5 * i) % 37 for i in range(80)], sampling=endless(4))
        bench.scheduler.step()
        assert late in bench.channel.cached
        bench.run()
        bench.check_outputs()

    def test_a_flush_releases_all_of_them(self) -> None:
        bench = Bench(pages=200, rows=100, chunk=512, budget=512)
        for k in range(100):
            bench.add([1 + k % 38, k // 38], sampling=endless(1))
        while len(bench.channel.finished) < 100:
            bench.scheduler.step()
        assert bench.scheduler.flush_cache()
        assert bench.scheduler.cache.groups[0].pool.num_free == 200
        assert bench.scheduler.idle

    def test_aborted_requests_are_forgotten_while_an_older_one_waits(self) -> None:
        """Regression: their prompts were kept for as long as it waited."""
        bench = Bench(rows=1)
        bench.add([5], sampling=endless(100))
        bench.scheduler.step()
        bench.add([6], sampling=endless(2))
        for k in range(500):
            bench.scheduler.abort(bench.add([7 + k % 20], sampling=endless(2)))
        assert len(bench.scheduler.queue) == 1
        assert len(bench.scheduler.queue._by_age) < 100
        bench.run()
        bench.check_outputs()

    def test_the_sampler_compares_only_as_many_stop_columns_as_requests_use(self) -> None:
        bench = Bench()
        many = SamplingParams(max_new_tokens=2, seed=1, ignore_eos=True, stop_token_ids=list(range(20, 30)))
        bench.add([5], sampling=endless(30))
        bench.add([6], sampling=many)
        bench.scheduler.step()
        assert bench.scheduler.rows.stop_width == 10
        for _ in range(6):
            bench.scheduler.step()
        assert bench.scheduler.rows.stop_width == 1
        bench.run()
        bench.check_outputs()


class CountingChannel(RecordingChannel):
    """Counts the messages that each round of the loop receives."""

    taken = 0

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        for message in super().receive(block, seconds):
            self.taken += 1
            yield message


class TestInbox:
    def loop(self) -> tuple[SchedulerLoop, CountingChannel]:
        bench = Bench(scribble=False)
        channel = CountingChannel()
        loop = SchedulerLoop(bench.runner, (0,), bench.config, channel)
        bench.runner.namespace_of = lambda row: loop.scheduler.rows.at(row).namespace
        return loop, channel

    def test_a_round_receives_a_bounded_number_of_messages_and_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: 5,000 arrivals were handled before any running request had its next token. Their time is limited
        as well, so the clock stands still here."""
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
        loop, channel = self.loop()
        new = np.array([5, 6], np.int32).tobytes()
        channel.inbox += [NewRequest(id=k, token_ids=new, sampling=endless(40)) for k in range(3000)]
        channel.inbox.append(AbortRequest(2))
        taken = []
        while channel.inbox:
            before = channel.taken
            loop.turn()
            taken.append(channel.taken - before)
        assert sum(taken) == 3001
        assert max(taken) <= MESSAGES_PER_TURN
        assert loop.scheduler.log.steps >= len(taken) - 1
        assert channel.finished[2].kind == "abort"

    def test_a_round_receives_messages_for_a_bounded_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prompts of 100,000 tokens take longer to handle than many short ones."""
        loop, channel = self.loop()
        ticks = iter(range(1000))
        clock = SimpleNamespace(monotonic=lambda: next(ticks) * loop_module.SECONDS_OF_MESSAGES / 4)
        monkeypatch.setattr(loop_module, "time", clock)
        channel.inbox += [AbortRequest(k) for k in range(100)]
        channel.inbox.insert(0, NewRequest(id=7, token_ids=bytes(4), sampling=endless(4)))
        loop.turn()
        assert 4 <= channel.taken <= 6


class TestFairTenants:
    """Each line of `seats` names the tenants that got a row, in order."""

    @staticmethod
    def seats(bench: Bench, tenants: dict[int, str], most: int) -> list[str]:
        for _ in range(4000):
            if len([one for one in bench.channel.cached if one in tenants]) >= most:
                break
            bench.scheduler.step()
        return [tenants[one] for one in bench.channel.cached if one in tenants][:most]

    @staticmethod
    def queue(bench: Bench, tenant: str, count: int, tokens: int = 4, output: int = 2) -> dict[int, str]:
        """Queues `count` requests of `tokens` tokens, no two of which share a prefix."""
        added = {}
        for _ in range(count):
            number = len(bench.requests)
            prompt = [1 + number % 37, 1 + number // 37 % 37, *[3] * (tokens - 2)]
            added[bench.add(prompt, sampling=endless(output), tenant=tenant)] = tenant
        return added

    @pytest.mark.parametrize("policy", [SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.PRIORITY])
    def test_a_crowd_of_one_tenant_does_not_make_another_wait(self, policy: SchedulePolicy) -> None:
        bench = Bench(rows=1, chunk=16, budget=32, options={"schedule_policy": policy})
        tenants = self.queue(bench, "crowd", 60)
        seated = len(self.seats(bench, tenants, 10))
        tenants |= self.queue(bench, "other", 4)
        after = self.seats(bench, tenants, seated + 10)[seated:]
        assert after.count("other") == 4

    def test_waiting_tenants_get_equal_shares(self) -> None:
        bench = Bench(rows=1, chunk=16, budget=32)
        tenants = self.queue(bench, "first", 40) | self.queue(bench, "second", 40) | self.queue(bench, "third", 40)
        found = self.seats(bench, tenants, 48)
        for tenant in ("second", "third"):
            assert abs(found.count(tenant) - 16) <= 48 // AGED_TURN
        assert found.count("first") <= 16 + 48 // AGED_TURN

    def test_shares_are_counted_in_tokens_and_not_in_requests(self) -> None:
        bench = Bench(rows=1, chunk=16, budget=32)
        tenants = self.queue(bench, "short", 40, tokens=4, output=2) | self.queue(
            bench, "long", 40, tokens=12, output=6
        )
        found = self.seats(bench, tenants, 32)
        assert 3 * found.count("long") - 8 <= found.count("short") <= 3 * found.count("long") + 12

    def test_an_idle_tenant_saves_up_no_share(self) -> None:
        """A tenant without requests while others waited is not compensated for it later."""
        bench = Bench(rows=1, chunk=16, budget=32)
        tenants = self.queue(bench, "busy", 60)
        seated = len(self.seats(bench, tenants, 30))
        tenants |= self.queue(bench, "idle", 20)
        found = self.seats(bench, tenants, seated + 20)[seated:]
        assert 8 <= found.count("idle") <= 12

    def test_the_requests_of_one_tenant_are_served_in_order_of_arrival(self) -> None:
        bench = Bench(rows=1, chunk=16, budget=32)
        tenants = self.queue(bench, "", 12, tokens=8) | self.queue(bench, "", 12, tokens=3)
        self.seats(bench, tenants, 24)
        assert list(bench.channel.cached) == sorted(bench.channel.cached)

    def test_overtaking_stays_bounded(self) -> None:
        """The oldest request of a crowd is served as well, however many tenants come after it."""
        bench = Bench(rows=2, chunk=16, budget=32)
        watch = Watch(bench)
        crowd = self.queue(bench, "crowd", 5)
        for number in range(120):
            if len(bench.scheduler.queue) < 8:
                self.queue(bench, f"newcomer {number}", 1)
            watch.step()
            if set(crowd) <= set(bench.channel.cached):
                break
        assert set(crowd) <= set(bench.channel.cached)

"""KV that yields no finite logits: the request that computed it ends with an error, and no later request
fails on it."""

from __future__ import annotations

import pytest
from helpers.scheduling import VOCAB, Bench

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import StepPlan, StepResult, TokenMasks
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.admission import Admission
from sglang_jax.scheduler.non_finite_check import MAX_RESTARTS

SYSTEM = [1 + (7 * i) % 37 for i in range(32)]


def endless(tokens: int = 4, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def spoil(bench: Bench) -> None:
    """The next step runs on a faulty device."""
    bench.runner.spoil_next = True
    bench.scheduler.step()
    assert not bench.runner.spoil_next, "no step was launched"


def finish(bench: Bench) -> None:
    for _ in range(500):
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
        if bench.scheduler.idle:
            break
    assert bench.scheduler.idle
    assert bench.scheduler.log.counts.memory_faults == 0
    bench.check_outputs()


def kinds(bench: Bench) -> dict[int, str]:
    return {request: finished.kind for request, finished in sorted(bench.channel.finished.items())}


def test_one_bad_step_does_not_poison_a_prefix() -> None:
    """Regression: 20 of 20 later requests with the same system prompt failed on a healthy device."""
    bench = Bench(chunk=64, budget=64)
    bench.add([*SYSTEM, 3], sampling=endless())
    spoil(bench)
    finish(bench)
    for k in range(20):
        bench.add([*SYSTEM, 1 + k], sampling=endless())
        finish(bench)
    assert kinds(bench) == {1: "error"} | dict.fromkeys(range(2, 22), "length")
    assert bench.channel.cached[2] == 0
    assert bench.channel.cached[3] == 32, "what the second request computed is good"


@pytest.mark.parametrize("bad_chunk", [0, 1, 2])
def test_a_bad_chunk_of_a_prompt_under_way(bad_chunk: int) -> None:
    """The fault only shows at the last chunk, when the earlier chunks are already in the tree."""
    bench = Bench(chunk=12, budget=32)
    bench.add([*SYSTEM, 3], sampling=endless())
    for chunk in range(3):
        if chunk == bad_chunk:
            spoil(bench)
        else:
            bench.scheduler.step()
    finish(bench)
    bench.add([*SYSTEM, 4], sampling=endless())
    finish(bench)
    assert kinds(bench) == {1: "error", 2: "length"}
    assert bench.channel.cached[2] == 0


def test_a_request_that_read_bad_kv_of_another_is_recomputed_and_does_not_fail() -> None:
    """Both are running when the fault shows: one computed the KV, the other matched it in the tree."""
    bench = Bench(chunk=64, budget=64)
    leader = bench.add([*SYSTEM, 3], sampling=endless())
    sharers = [bench.add([*SYSTEM, 4 + k], sampling=endless(seed=k)) for k in range(3)]
    spoil(bench)
    bench.scheduler.step()
    assert set(bench.channel.cached) == {leader, *sharers}, "they started before the fault showed"
    finish(bench)
    assert kinds(bench) == {leader: "error"} | dict.fromkeys(sharers, "length")


def test_a_long_prompt_on_bad_kv_restarts_before_its_last_chunk() -> None:
    bench = Bench(pages=128, chunk=40, budget=64, context=256)
    leader = bench.add([*SYSTEM, 3], sampling=endless())
    long = bench.add([*SYSTEM, *([9] * 150)], sampling=endless())
    spoil(bench)
    for _ in range(3):
        bench.scheduler.step()
    assert kinds(bench) == {leader: "error"}
    assert bench.scheduler.requests[long].restarts == 1
    finish(bench)
    assert kinds(bench) == {leader: "error", long: "length"}


def test_sharers_that_wait_for_a_prefix_compute_it_when_it_turns_out_bad() -> None:
    bench = Bench(chunk=12, budget=32)
    leader = bench.add([*SYSTEM, 3], sampling=endless())
    waiting = [bench.add([*SYSTEM, 4 + k], sampling=endless()) for k in range(2)]
    spoil(bench)
    assert set(bench.channel.cached) == {leader}
    finish(bench)
    assert kinds(bench) == {leader: "error"} | dict.fromkeys(waiting, "length")


def test_a_row_that_was_switched_to_bad_kv_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute the prefix; the second gives up its own good copy for the first one's, which is bad."""
    monkeypatch.setattr("sglang_jax.scheduler.admission.Admission._should_wait", lambda *arguments: False)
    bench = Bench(chunk=8, budget=64, rows=4)
    first = bench.add(SYSTEM[:8], sampling=endless())
    spoil(bench)
    second = bench.add(SYSTEM[:8], sampling=endless(seed=6), logprob_start=0, top_logprobs=0)
    bench.scheduler.step()
    rows = sorted(bench.scheduler.cache.open_rows)
    table = bench.scheduler.cache.groups[0].table
    assert table.run(rows[0], 0, 2).tolist() == table.run(rows[1], 0, 2).tolist(), "re-pointed"
    finish(bench)
    assert kinds(bench)[first] == "error"
    assert kinds(bench)[second] == "length"


def test_bad_kv_of_an_aborted_request_fails_no_later_request() -> None:
    """Nothing was sampled from it before the abort, so nothing had shown that it is bad."""
    bench = Bench(chunk=12, budget=32)
    gone = bench.add([*SYSTEM, 3], sampling=endless())
    spoil(bench)
    bench.scheduler.abort(gone)
    later = [bench.add([*SYSTEM, 4 + k], sampling=endless()) for k in range(2)]
    finish(bench)
    assert kinds(bench) == {gone: "abort"} | dict.fromkeys(later, "length")


def test_a_model_without_finite_logits_for_a_prompt_fails_only_its_requests() -> None:
    """The prefix is computed twice, not once per request, and requests for other prompts succeed."""
    bench = Bench(chunk=64, budget=64, invalid_token=VOCAB - 1, rows=8)
    bench.runner.keep_plans = True
    bad = [bench.add([*SYSTEM, VOCAB - 1], sampling=endless(seed=k)) for k in range(6)]
    good = [bench.add([9, *SYSTEM, 3 + k], sampling=endless()) for k in range(2)]
    finish(bench)
    assert kinds(bench) == dict.fromkeys(bad, "error") | dict.fromkeys(good, "length")
    again = bench.add([*SYSTEM, 3], sampling=endless())
    finish(bench)
    assert kinds(bench)[again] == "length"


def test_a_request_that_only_reads_survives_several_bad_steps() -> None:
    """The second of three sharers recomputes the prefix, in another bad step; the third computed in neither."""
    bench = Bench(chunk=64, budget=64)
    first, second, third = (bench.add([*SYSTEM, 3 + k], sampling=endless(seed=k)) for k in range(3))
    spoil(bench)
    computed_anew = False
    for _ in range(40):
        request = bench.scheduler.requests.get(second)
        if request is not None and request.restarts and request.kv is None and not computed_anew:
            computed_anew = True
            spoil(bench)
        else:
            bench.scheduler.step()
    finish(bench)
    assert computed_anew
    assert kinds(bench) == {first: "error", second: "error", third: "length"}


def test_on_a_device_without_finite_logits_all_requests_fail_after_a_few_restarts() -> None:
    bench = Bench(chunk=64, budget=64, rows=8)
    bad = [bench.add([*SYSTEM, 3 + k], sampling=endless(seed=k)) for k in range(6)]
    most = 0
    for _ in range(60):
        bench.runner.spoil_next = True
        bench.scheduler.step()
        most = max([most, *(request.restarts for request in bench.scheduler.requests.values())])
    assert kinds(bench) == dict.fromkeys(bad, "error")
    assert most == MAX_RESTARTS
    bench.runner.spoil_next = False
    well = bench.add([*SYSTEM, 9], sampling=endless())
    finish(bench)
    assert kinds(bench)[well] == "length"


@pytest.mark.parametrize("shared", [32, 16])
def test_a_bad_tail_leaves_the_good_prefix_of_others_cached(shared: int) -> None:
    bench = Bench(chunk=64, budget=64, invalid_token=VOCAB - 1)
    bench.add([*SYSTEM, 3], sampling=endless())
    finish(bench)
    bench.add([*SYSTEM[:shared], 4, 4, 4, 4, VOCAB - 1], sampling=endless())
    finish(bench)
    last = bench.add([*SYSTEM, 5], sampling=endless())
    finish(bench)
    assert bench.channel.cached[last] == 32


def test_nothing_is_cached_of_a_request_that_fails_while_decoding() -> None:
    bench = Bench(chunk=64, budget=64)
    first = bench.add([*SYSTEM, 3], sampling=endless(20))
    for _ in range(4):
        bench.scheduler.step()
    spoil(bench)
    finish(bench)
    assert kinds(bench) == {first: "error"}
    assert bench.channel.streams[first] == bench.wanted[first][: len(bench.channel.streams[first])]
    assert bench.scheduler.cache.groups[0].pool.num_free == bench.scheduler.cache.groups[0].pool.total


def test_a_sharer_of_the_good_prefix_of_a_failed_request_continues() -> None:
    """The sharer's samples were finite: the pages it reads stay until it releases them, and no other request matches
    them."""
    bench = Bench(chunk=64, budget=64)
    first = bench.add([*SYSTEM, VOCAB - 2], sampling=endless(30))
    for _ in range(3):
        bench.scheduler.step()
    second = bench.add([*SYSTEM, 4], sampling=endless(20))
    for _ in range(3):
        bench.scheduler.step()
    spoil_next_sample(bench, first)
    assert bench.channel.cached[second] == 32
    third = bench.add([*SYSTEM, 5], sampling=endless(4))
    finish(bench)
    assert kinds(bench) == {first: "error", second: "length", third: "length"}
    assert bench.channel.cached[third] == 0


def test_kv_of_a_failed_request_is_dropped_from_nodes_that_were_split_since() -> None:
    bench = Bench(chunk=64, budget=64)
    first = bench.add([*SYSTEM, 3], sampling=endless(30))
    for _ in range(3):
        bench.scheduler.step()
    second = bench.add([*SYSTEM[:16], 4], sampling=endless(20))
    for _ in range(3):
        bench.scheduler.step()
    assert bench.channel.cached[second] == 16
    spoil_next_sample(bench, first)
    third = bench.add([*SYSTEM, 5], sampling=endless())
    finish(bench)
    assert kinds(bench) == {first: "error", second: "length", third: "length"}
    assert bench.channel.cached[third] == 0


def spoil_next_sample(bench: Bench, request: int) -> None:
    """Makes the next sample of this request not finite, and leaves those of others as they are."""
    row = bench.scheduler.requests[request].row
    run = bench.runner._run

    def spoilt(plan: StepPlan, begin: list[int], masks: TokenMasks | None) -> StepResult:
        result = run(plan, begin, masks)
        result.tokens[plan.rows == row, 0] = -1
        return result

    bench.runner._run = spoilt
    bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    bench.runner._run = run
    assert kinds(bench)[request] == "error"


@pytest.mark.parametrize(("start", "bad_chunk"), [(0, 0), (9, 0), (0, 1), (30, 2)])
def test_prompt_logprobs_that_are_not_finite_end_the_request_and_are_not_published(start: int, bad_chunk: int) -> None:
    bench = Bench(chunk=12, budget=32)
    request = bench.add([*SYSTEM, 3], sampling=endless(), logprob_start=start, top_logprobs=0)
    for chunk in range(bad_chunk + 1):
        if chunk == bad_chunk:
            spoil(bench)
        else:
            bench.scheduler.step()
    finish(bench)
    assert kinds(bench) == {request: "error"}
    told = [logprob for _, logprob in bench.channel.prompt_logprobs.get(request, []) if logprob is not None]
    assert told == bench.oracle.prompt_logprobs([*SYSTEM, 3])[max(start - 1, 0) :][: len(told)]
    assert len(told) == max(12 * bad_chunk - max(start - 1, 0), 0)


def test_a_restarted_request_publishes_its_prompt_logprobs_once() -> None:
    bench = Bench(chunk=64, budget=64)
    bench.add([*SYSTEM, 3], sampling=endless())
    scored = bench.add([*SYSTEM, 4, 5], sampling=endless(), logprob_start=20, top_logprobs=0)
    spoil(bench)
    finish(bench)
    assert kinds(bench)[scored] == "length"
    told = bench.channel.prompt_logprobs[scored]
    assert [token for token, _ in told] == [*SYSTEM, 4, 5][20:]
    wanted = bench.oracle.prompt_logprobs([*SYSTEM, 4, 5])[19:]
    assert [logprob for _, logprob in told] == pytest.approx(wanted)


def test_a_request_about_to_restart_can_be_aborted() -> None:
    bench = Bench(chunk=64, budget=64)
    leader = bench.add([*SYSTEM, 3], sampling=endless())
    sharer = bench.add([*SYSTEM, 4], sampling=endless(30))
    spoil(bench)
    bench.scheduler.step()
    bench.scheduler.step()
    assert kinds(bench) == {leader: "error"}
    bench.scheduler.abort(sharer)
    finish(bench)
    assert kinds(bench) == {leader: "error", sharer: "abort"}
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.cache.groups[0].pool.num_free == bench.scheduler.cache.groups[0].pool.total


def test_page_counts_that_do_not_add_up_at_idle_are_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outside debug mode nothing checked; the server continues."""
    release = KVCache.release_kv_cache

    def leak(self: KVCache, record: RowKV, tokens: bytes, *, insert: bool, kept: None) -> None:
        self.groups[0].table.pages[record.row, self.pages_for(record.kv_allocated_len) - 1] = 0
        self.lengths.kv_allocated[record.row] -= self.page_size
        self.lengths.kv_committed[record.row] = min(record.kv_committed_len, record.kv_allocated_len)
        release(self, record, tokens, insert=insert)

    monkeypatch.setattr(KVCache, "release_kv_cache", leak)
    bench = Bench()
    bench.scheduler._check = False
    bench.add([5, 6, 7], sampling=endless())
    bench.run()
    assert bench.scheduler.log.counts.memory_faults == 1
    assert bench.scheduler.log.stats(0).num_memory_faults == 1
    assert "KV pages do not add up at idle" in caplog.text
    for _ in range(3):
        bench.scheduler.step()
    assert bench.scheduler.log.counts.memory_faults == 1, "one fault is told once"


def test_a_retracted_request_validates_no_kv_of_its_new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's row was switched to shared pages before its first sample, which therefore validated nothing; then
    it was retracted. No sample has read the KV that it computes now. When that KV counted as valid, a bad chunk of it
    failed every later request that shared it."""
    monkeypatch.setattr(Admission, "_should_wait", lambda self, *arguments: False)
    bench = Bench(pages=64, page_size=4, rows=4, chunk=64, budget=64, context=64)
    scheduler = bench.scheduler
    prompt = list(range(1, 17))
    bench.add(prompt, sampling=SamplingParams(max_new_tokens=1, seed=1, ignore_eos=True))
    again = bench.add(prompt, sampling=SamplingParams(max_new_tokens=30, seed=2, ignore_eos=True))
    scheduler.step()
    request = scheduler.requests[again]
    scheduler.drain_in_flight()
    assert not request.record.proven
    scheduler.retract_newest()
    scheduler.cache.flush()
    scheduler.budget.size = 4
    bench.runner.spoil_next = True
    scheduler.step()
    sharer = bench.add([*prompt[:4], 30], sampling=SamplingParams(max_new_tokens=4, seed=3, ignore_eos=True))
    scheduler.budget.size = 64
    scheduler.drain_in_flight()
    assert not request.record.proven
    scheduler.abort(again)
    bench.run()
    assert bench.channel.output(sharer) == bench.wanted[sharer]
    last = bench.add([*prompt[:4], 31], sampling=SamplingParams(max_new_tokens=4, seed=3, ignore_eos=True))
    bench.run()
    assert bench.channel.output(last) == bench.wanted[last]


def test_a_request_that_read_a_bad_window_since_freed_is_recomputed() -> None:
    """The head of a validated prompt lost its window pages, and a bad step recomputed them for a request that then
    left. A request that began there failed, as the pages that it had read were free by the time it sampled."""
    bench = Bench(pages=5, page_size=1, rows=1, chunk=3, budget=3, context=24, window=5)
    scheduler, cache = bench.scheduler, bench.scheduler.cache
    prompt = [1, 2, 5, 10, 17]
    bench.add([*prompt, 7], 1, seed=1)
    bench.run()
    cache.tree.evict(cache.groups[0].component, 1)
    gone = bench.add([1, 8], 1, seed=1)
    bench.runner.spoil_next = True
    scheduler.step()
    scheduler.abort(gone)
    reader = bench.add([*prompt, 9], 1, seed=1)
    bench.run()
    assert bench.channel.finished[reader].kind == "length"
    assert bench.channel.output(reader) == bench.wanted[reader]

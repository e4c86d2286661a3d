"""Prompts that share a prefix, where layers keep a state: the second request of a group hits, rather than the third or
none."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.caches import states_of
from helpers.scheduling import Bench

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.guesses import STEP_COST
from sglang_jax.mem_cache.state_group import GAIN_OVER_LOSS, MIN_GAIN
from sglang_jax.runner.plan import StepPlan
from sglang_jax.sampling.params import SamplingParams

STATE = CacheKind.STATE
GROUPS, SHARERS, COMMON = 8, 16, 1000


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def workload() -> list[list[int]]:
    """`GROUPS` x `SHARERS` prompts: a shared prefix per group, and a separate tail for each."""
    random = np.random.default_rng(7)
    common = random.integers(1, 39, (GROUPS, COMMON)).tolist()
    return [[*common[k % GROUPS], *random.integers(1, 39, 40).tolist()] for k in range(GROUPS * SHARERS)]


def hybrid(
    page_size: int,
    rows: int = 64,
    states: int = 256,
    budget: int = 640,
    reuse: bool = True,
    gain_over_loss: int = GAIN_OVER_LOSS,
    chunk: int = 512,
    tails: tuple[int, ...] | None = None,
) -> Bench:
    """Full attention and states, with room for all and the parameters of a server."""
    return Bench(
        pages=200_000 // page_size,
        page_size=page_size,
        rows=rows,
        chunk=chunk,
        budget=budget,
        context=1200,
        scribble=False,
        lazy=False,
        more=((STATE, states),),
        least_gain=MIN_GAIN,
        gain_over_loss=gain_over_loss,
        tails=tails,
        options={"disable_radix_cache": not reuse},
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sharers_of_a_long_prefix_hit_from_the_second_on(page_size: int) -> None:
    """Reported of other engines on this very workload: `cached-token: 0` for every sharer. A few of the second ones
    start half way, as they are admitted before a prefix is complete."""
    bench = hybrid(page_size)
    ids = [bench.add(prompt, sampling=endless(2, seed=k)) for k, prompt in enumerate(workload())]
    bench.run()
    bench.check_outputs()
    shareable = COMMON // page_size * page_size
    later = [bench.channel.cached[request] for request in ids[GROUPS:]]
    assert sum(later) >= 0.97 * shareable * len(later), later
    assert min(later) >= 0.4 * shareable, "every sharer, the second of each group too"


def test_prompts_that_share_nothing_take_one_step_more_than_without_a_cache() -> None:
    """For the tail of the last one. If all chunks ended at page boundaries, every step would be less full."""
    prompts = np.random.default_rng(3).integers(1, 39, (16, 1040)).tolist()

    def steps(*, reuse: bool = True, gain_over_loss: int = GAIN_OVER_LOSS, tails: tuple[int, ...] | None = ()) -> int:
        bench = hybrid(64, budget=512, reuse=reuse, gain_over_loss=gain_over_loss, tails=tails)
        for number, prompt in enumerate(prompts):
            bench.add(prompt, sampling=endless(4, seed=number))
        bench.run()
        return bench.scheduler.log.steps

    without = steps(reuse=False)
    assert steps() == without + 1
    assert steps(gain_over_loss=0) > without + 2, "this workload would tell"
    assert steps(tails=None) <= without + 4, "other prompts fill most steps in which a chunk ends at a guess"


def test_few_slots_go_to_shared_prefixes() -> None:
    """There are as many slots, besides those of rows, as there are alternating prefixes: the ends of prompts must not
    take them."""
    bench = hybrid(16, rows=8, states=16)
    ids = [bench.add(prompt, sampling=endless(3, seed=k)) for k, prompt in enumerate(workload()[:64])]
    bench.run()
    bench.check_outputs()
    later = [bench.channel.cached[request] for request in ids[GROUPS:]]
    assert sum(later) >= 0.85 * 992 * len(later), later


def one_after_the_other(bench: Bench, prompts: list[list[int]], shared_len: int = 0) -> list[int]:
    """Runs the prompts one at a time; returns the cached tokens of each."""
    cached = []
    for prompt in prompts:
        request = bench.add(prompt, sampling=endless(3), shared_len=shared_len)
        bench.run()
        cached.append(bench.channel.cached[request])
    bench.check_outputs()
    return cached


def test_of_sequential_sharers_the_second_starts_at_a_guess_and_the_third_there_or_where_it_diverged() -> None:
    """Where prompts would diverge was unknown when the first one was computed: 64 tokens before its end was a guess. A
    state where they did is worth a slot only if it saves 32 tokens more."""
    prompts = workload()[::GROUPS][:4]
    assert one_after_the_other(hybrid(16), prompts) == [0, 976, 976, 976]
    assert one_after_the_other(hybrid(16, tails=(80,)), prompts) == [0, 960, 992, 992]


@pytest.mark.parametrize("chunk", [256, 1200])
@pytest.mark.parametrize("tail", [40, 150, 400])
def test_once_a_workload_is_known_the_second_sharer_of_each_group_starts_near_its_end(chunk: int, tail: int) -> None:
    """Groups one after the other, with tails that vary by a tenth: the second sharer starts at most a quarter of a
    tail and two pages before the first one's tail, or at the end of a chunk to which no guess would add enough."""
    random = np.random.default_rng(tail)
    bench = hybrid(16, chunk=chunk, budget=1200)
    found = []
    for _ in range(9):
        shared = int(random.integers(500, 700))
        common = random.integers(1, 39, shared).tolist()
        tails = [random.integers(1, 39, random.integers(tail - tail // 10, tail + tail // 10 + 1)) for _ in range(3)]
        cached = one_after_the_other(bench, [[*common, *one.tolist()] for one in tails])
        found.append([shared - one for one in cached[1:]])
    assert max(second for second, _ in found[3:]) < 0.25 * tail + 2 * 16 + (STEP_COST if chunk < 500 else 0), found
    assert max(third for _, third in found) < MIN_GAIN + 16, found


def test_prompts_that_share_nothing_soon_make_no_guesses_until_one_shares_something() -> None:
    bench = hybrid(16)
    random = np.random.default_rng(3)

    def steps(*tails: int) -> list[int]:
        """Of prompts with a new shared part of 260 tokens, which run one after the other."""
        common, found = random.integers(1, 39, 260).tolist(), []
        for tail in tails:
            before = bench.scheduler.log.steps
            one_after_the_other(bench, [[*common, *random.integers(1, 39, tail).tolist()]])
            found.append(bench.scheduler.log.steps - before)
        return found

    alone = [steps(40)[0] for _ in range(50)]
    assert alone == [alone[-1] + 1] * 32 + [alone[-1]] * 18
    assert steps(40, 40)[0] == alone[-1], "no guess"
    assert steps(40)[0] == alone[-1] + 1, "the second one could have started further on"


def test_no_chunk_ends_at_a_guess_shortly_after_another_state() -> None:
    """The guesses are 784 and 976 of 1,040 tokens."""
    bench = hybrid(16, chunk=368)
    bench.runner.keep_plans = True
    one_after_the_other(bench, workload()[:1])
    assert chunks(bench.runner.plans) == [[368], [368], [240], [48], [16]]


def test_states_at_chunk_ends_before_a_guess_are_evicted_before_it_and_before_ends_of_prompts() -> None:
    bench = hybrid(16, rows=2, states=10)
    prompts = np.random.default_rng(3).integers(1, 39, (3, 1040)).tolist()
    one_after_the_other(bench, prompts)
    for prompt in prompts:
        tokens = np.array(prompt, np.int32).tobytes()
        assert [bench.scheduler.cache.peek(tokens, most, None) for most in (1039, 1023)] == [1024, 976]


@pytest.mark.parametrize("chunk", [512, 1200])
def test_of_sequential_sharers_the_second_starts_at_the_declared_shared_length(chunk: int) -> None:
    cached = one_after_the_other(hybrid(16, chunk=chunk, budget=1200), workload()[::GROUPS][:4], shared_len=COMMON)
    assert cached == [0, 992, 992, 992]


def test_a_wrongly_declared_shared_prefix_is_evicted_before_a_real_one() -> None:
    """Like ends of prompts it is on trial: 24 snapshots of these prompts pass through four slots."""
    bench = hybrid(16, rows=2, states=6)
    prompts = workload()[::GROUPS]
    assert one_after_the_other(bench, prompts[:3])[-1] == 976
    alone = np.random.default_rng(3).integers(1, 39, (8, 1040)).tolist()
    one_after_the_other(bench, alone, shared_len=COMMON)
    assert one_after_the_other(bench, prompts[3:4]) == [976]


@pytest.mark.parametrize("shared_len", [1, MIN_GAIN - 1, 1040, 10**6])
def test_a_useless_declared_shared_length_changes_nothing(shared_len: int) -> None:
    """Too short for a state, or the whole prompt, or longer than that."""
    cached = one_after_the_other(hybrid(16), workload()[::GROUPS][:3], shared_len=shared_len)
    assert cached == [0, 976, 976]


def test_a_repeated_prompt_starts_before_its_last_token() -> None:
    for page_size in (1, 16):
        prompt = [1 + k % 37 for k in range(160)]
        assert one_after_the_other(hybrid(page_size), [prompt] * 3) == [0, *[159 // page_size * page_size] * 2]


def test_parallel_completions_of_a_prompt_compute_it_once() -> None:
    bench = hybrid(16)
    prompt = [1 + k % 37 for k in range(165)]
    ids = [bench.add(prompt, sampling=endless(9, seed=k)) for k in range(6)]
    bench.run()
    bench.check_outputs()
    assert [bench.channel.cached[request] for request in ids] == [0] + [160] * 5


def small(states: int = 8, **fields: object) -> Bench:
    """Snapshots are worth a slot whatever they save."""
    return Bench(more=((STATE, states),), **{"options": {"mamba_track_interval": 4}, **fields})


PROMPT = [1 + (7 * i) % 37 for i in range(30)]


def chunks(plans: list[StepPlan]) -> list[list[int]]:
    """Lengths of the prefill chunks of each step that has any."""
    return [plan.query_lens[plan.num_decode :].tolist() for plan in plans if len(plan.rows) > plan.num_decode]


def test_chunks_end_on_pages_and_before_the_last_token() -> None:
    bench = small(chunk=11, budget=32)
    bench.runner.keep_plans = True
    bench.add(PROMPT, sampling=endless(2))
    bench.run()
    assert chunks(bench.runner.plans) == [[8], [8], [8], [4], [2]]
    bench.check_outputs()


def test_chunks_smaller_than_a_page_end_at_the_page_boundary() -> None:
    bench = small(chunk=3, page_size=16, budget=32)
    bench.runner.keep_plans = True
    bench.add(PROMPT, sampling=endless(2))
    bench.run()
    assert chunks(bench.runner.plans) == [[3]] * 5 + [[1]] + [[3]] * 4 + [[2]]
    assert bench.scheduler.cache.peek(np.array(PROMPT, np.int32).tobytes(), 29, None) == 16
    bench.check_outputs()


def test_a_prompt_in_progress_ends_a_chunk_where_a_waiting_one_diverges() -> None:
    bench = small(chunk=64, budget=64)
    bench.runner.keep_plans = True
    first = bench.add(PROMPT, sampling=endless(4))
    second = bench.add([*PROMPT[:13], 39, 39, 39], sampling=endless(4))
    bench.run()
    assert chunks(bench.runner.plans) == [[12], [16, 4], [2]]
    assert bench.channel.cached == {first: 0, second: 12}
    bench.check_outputs()


def test_any_number_of_diverging_prompts_ends_few_chunks() -> None:
    """Each end is one step more: a client that sends many prompts that diverge at every token must not slow one of them
    down much."""
    prompt = [1 + (i * i) % 37 for i in range(600)]
    bench = Bench(pages=4000, rows=64, chunk=1024, budget=1200, context=700, more=((STATE, 200),), scribble=False)
    bench.runner.keep_plans = True
    bench.add(prompt, sampling=endless(2))
    for k in range(40):
        bench.add([*prompt[: 14 * k + 4], 39, 39, 39, 39, 39, 39], sampling=endless(2, seed=k))
    bench.run()
    bench.check_outputs()
    ends = [
        int(kv)
        for plan in bench.runner.plans
        for row, kv in zip(plan.rows[plan.num_decode :], plan.kv_lens[plan.num_decode :], strict=True)
        if row == 0 and int(kv) <= 600
    ]
    assert ends.index(600) < 4 + 2


def test_in_another_namespace_no_request_waits_for_a_prefix_and_nothing_is_shared() -> None:
    bench = small(chunk=64, budget=64)
    ids = [bench.add(PROMPT, sampling=endless(4), extra_key=key) for key in (None, "a", "b")]
    bench.run()
    assert [bench.channel.cached[request] for request in ids] == [0, 0, 0]
    bench.check_outputs()


def test_the_next_turn_resumes_from_the_last_page_of_the_output() -> None:
    bench = small(chunk=64, budget=64)
    first = bench.add(PROMPT, sampling=endless(9))
    bench.run()
    turn = [*PROMPT, *bench.channel.output(first)]
    second = bench.add([*turn, 5, 6, 7], sampling=endless(3))
    bench.run()
    assert bench.channel.cached[second] == 36 == (len(turn) - 1) // 4 * 4
    bench.check_outputs()


def test_a_retracted_request_restarts_at_its_last_snapshot() -> None:
    bench = small(chunk=8, budget=32)
    bench.runner.keep_plans = True
    bench.add(PROMPT, sampling=endless(4))
    for _ in range(3):
        bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.retract_newest()
    bench.run()
    bench.check_outputs()
    assert sum(sum(step) for step in chunks(bench.runner.plans)) == 30, "24 before, 6 after"


def test_too_few_slots_only_mean_fewer_rows() -> None:
    """Slots can be short where KV pages are not."""
    bench = small(states=2, rows=8)
    for k in range(7):
        bench.add([*PROMPT[:20], 1 + k, 2, 3], sampling=endless(6, seed=k))
    most = 0
    for _ in range(400):
        bench.scheduler.step()
        most = max(most, bench.scheduler.num_running)
        if bench.scheduler.idle:
            break
    assert most == 2
    assert len(bench.channel.finished) == 7
    bench.check_outputs()


def test_with_one_slot_requests_run_one_after_the_other_and_still_share() -> None:
    bench = small(states=1, rows=4)
    first = bench.add(PROMPT[:17], sampling=endless(4, seed=1))
    bench.run()
    second = bench.add([*PROMPT[:17], *bench.channel.output(first), 2, 3], sampling=endless(4, seed=2))
    third = bench.add([39, 38, 37], sampling=endless(4))
    bench.run()
    assert bench.channel.cached[second] == 20
    assert set(bench.channel.finished) == {first, second, third}
    bench.check_outputs()


def test_with_reuse_off_a_row_has_one_slot_and_prompts_one_chunk() -> None:
    bench = small(states=4, rows=4, chunk=64, budget=64, options={"disable_radix_cache": True})
    bench.runner.keep_plans = True
    for k in range(4):
        bench.add(PROMPT, sampling=endless(4, seed=k))
    for _ in range(30):
        bench.scheduler.step()
        states = states_of(bench.scheduler.cache)
        assert states is not None
        assert states.pool.total - states.pool.num_free == len(bench.scheduler.cache.open_rows)
    assert not any(plan.copies for plan in bench.runner.plans)
    assert chunks(bench.runner.plans) == [[30, 30, 4], [26, 30]]
    bench.check_outputs()


def test_an_aborted_request_leaves_its_snapshots_and_no_pin() -> None:
    bench = small(chunk=8)
    first = bench.add(PROMPT, sampling=endless(20))
    for _ in range(3):
        bench.scheduler.step()
    bench.scheduler.abort(first)
    bench.run()
    states = states_of(bench.scheduler.cache)
    assert states is not None
    assert states.component.protected == 0
    assert states.available == states.pool.total
    again = bench.add(PROMPT, sampling=endless(5))
    bench.run()
    assert bench.channel.cached[again] == 24
    bench.check_outputs()


def test_a_model_with_only_states_never_runs_out_of_pages() -> None:
    bench = Bench(window=STATE, pages=3, rows=4, context=120)
    for k in range(6):
        bench.add([*PROMPT, k + 1], sampling=endless(80, seed=k))
    bench.run()
    assert bench.scheduler.log.counts.retractions == 0
    bench.check_outputs()


def test_a_plan_lists_copies_only_where_there_are_some() -> None:
    bench = small(chunk=64, budget=64, options={"mamba_track_interval": 0})
    bench.runner.keep_plans = True
    bench.add(PROMPT, sampling=endless(12))
    bench.run()
    assert [bool(plan.copies) for plan in bench.runner.plans] == [False, True] + [False] * 11
    assert bench.runner.plans[1].copies[0].pool == 1


def test_a_long_output_changes_slots_once_an_interval() -> None:
    """Copying a state at each page took others an eighth of their prefill time."""
    bench = small(chunk=64, budget=64, options={"mamba_track_interval": 16})
    bench.runner.keep_plans = True
    bench.add(PROMPT[:3], sampling=endless(60))
    bench.run()
    lengths = [int(plan.kv_lens[0]) for plan in bench.runner.plans if plan.copies]
    assert lengths == [17, 33, 49]
    bench.check_outputs()

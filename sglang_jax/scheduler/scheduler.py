"""The step: plan, launch, finish the one before, publish. Step N + 1 is launched before step N's tokens reach the host;
pages and rows that a launched step may touch are released only after it. A step with rows under grammars samples in a
second launch, once the previous step's tokens have determined the masks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np

from sglang_jax.config import EngineConfig, SpeculativeAlgorithm
from sglang_jax.errors import MemoryReleasedError, RequestError
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.mem_cache.data_parallel import cache_of
from sglang_jax.mem_cache.invariants import check_conservation, idle_fault
from sglang_jax.runner.plan import RunnerSpec
from sglang_jax.runner.protocol import Runner, StepHandle
from sglang_jax.scheduler.admission import Admission, Decisions
from sglang_jax.scheduler.background import Background
from sglang_jax.scheduler.cache_report import CacheReport, report_cache
from sglang_jax.scheduler.chunking import ChunkBudget, FixedChunk, TimedChunk
from sglang_jax.scheduler.commands import MemoryTag, PauseMode
from sglang_jax.scheduler.constraints import Constraints
from sglang_jax.scheduler.drafting import AdaptiveDrafts, Drafting, FixedDrafts
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.messages import Channel, NewRequest
from sglang_jax.scheduler.planner import OutOfPages, PlannedStep, Planner
from sglang_jax.scheduler.policies import create_policy
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.recent_outputs import RecentOutputs
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.request_builder import RequestBuilder
from sglang_jax.scheduler.reserve import NewTokenReserve
from sglang_jax.scheduler.result_processor import ResultProcessor
from sglang_jax.scheduler.rows import RECLAIMED_AT_ONCE, RELEASES_PER_STEP, Rows
from sglang_jax.scheduler.sessions import Sessions
from sglang_jax.scheduler.step_log import RetractionCause, StepLog
from sglang_jax.scheduler.step_time import Padding
from sglang_jax.scheduler.stress import Stress, evict_all, retractable
from sglang_jax.scheduler.waiting_queue import Queues, WaitingQueue

logger = logging.getLogger(__name__)


class LaunchedStep(msgspec.Struct, frozen=True):
    """A step launched at `at`, by the scheduler's clock."""

    planned: PlannedStep
    handle: StepHandle
    at: float


class Scheduler:
    """Requests in, tokens out, one step at a time. The loop around it decides when to step. `eos_ids`: the model's
    end-of-sequence tokens; `clock`: returns seconds; `grammars`: None for an engine without grammars."""

    def __init__(
        self,
        runner: Runner,
        eos_ids: tuple[int, ...],
        config: EngineConfig,
        channel: Channel,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        spec = runner.spec
        self._runner = runner
        self._check = config.debug_memory
        self.cache = cache_of(
            spec,
            step_tokens=_prompt_tokens(config, spec),
            drafts=spec.max_samples > 1,
            state_interval=config.mamba_track_interval,
            reuse=not config.disable_radix_cache,
            eviction=config.radix_eviction_policy,
            debug=config.debug_memory,
        )
        policy = create_policy(config.schedule_policy, self._cached_prefix)
        self.queue = WaitingQueue(policy, self._cached_prefix)
        self.background_queue = WaitingQueue(policy, self._cached_prefix)
        self._queues = Queues(self.queue, self.background_queue)
        self.rows = Rows(self.cache, self._queues, spec.max_rows, spec.max_context)
        self.sessions = Sessions(self.cache.pins, config.max_sessions, config.session_timeout, clock)
        self.cache.pins.share = config.session_memory_fraction
        self.reserve = NewTokenReserve(config.schedule_conservativeness)
        self.budget = _chunk_budget(config, spec)
        self._builder = RequestBuilder(spec, eos_ids, config.random_seed, config.max_queued_requests)
        self._admission = Admission(self.cache, self.rows, self.queue, self.reserve)
        self._drafting = _drafting(config, spec)
        drafts_by_texts = spec.max_samples > 1 and config.speculative_algorithm is not SpeculativeAlgorithm.DRAFT
        self._recent = RecentOutputs(self.rows) if drafts_by_texts else None
        self._planner = Planner(spec, self.budget, self.cache, self.rows, self._drafting, self._recent)
        self.constraints = Constraints(grammars, self.rows, spec.vocab_size, eos_ids)
        self._publisher = Publisher(channel, self.rows, drafts=spec.max_samples > 1)
        self.log = StepLog(self, config.decode_log_interval)
        self._finisher = Finisher(
            self.cache,
            self.rows,
            self._queues,
            self._publisher,
            self.constraints,
            self.sessions,
            self.reserve,
            self.log,
            clock(),
            self._recent,
        )
        self.requests = self._finisher.requests
        of_background = Admission(self.cache, self.rows, self.background_queue, self.reserve, background=True)
        self.background = Background(self._admission, of_background, self.rows, self._finisher)
        self._results = ResultProcessor(
            self.cache,
            self.rows,
            self._drafting,
            self.constraints,
            self._publisher,
            self._finisher,
            self.log,
            runner.spec.pooling,
        )
        self._stress = Stress(config.test_retract, config.test_evict)
        self._clock = clock
        self.weight_version = config.weight_version
        self.paused = False
        self.released: frozenset[MemoryTag] = frozenset()
        self._pages_checked_at = 0
        self._in_flight: LaunchedStep | None = None
        self._planned_at_rest = True

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits, no step is in flight, and no row remains to be released."""
        return not self.requests and self._in_flight is None and not self.rows.num_leaving

    @property
    def num_running(self) -> int:
        return self.rows.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a row: queued, or waiting for their grammar or for the row of the session's previous
        turn."""
        return len(self._queues) + self.constraints.num_waiting + len(self.sessions.held)

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to do until a message arrives: idle, or paused with every grammar compiled."""
        paused = self.paused and self._in_flight is None and not self.rows.num_leaving
        return self.idle or (paused and not self.constraints.num_waiting)

    @property
    def only_compiles(self) -> bool:
        """Whether only grammars of waiting requests are compiled, and no step can run."""
        waiting = self.constraints.num_waiting
        no_steps = self.paused or waiting == len(self.requests)
        return waiting > 0 and no_steps and self._in_flight is None and not self.rows.num_leaving

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the pools of the first group hold."""
        return self._runner.spec.max_total_tokens

    @property
    def num_used_tokens(self) -> int:
        """Tokens of the first group's pages that are neither free nor evictable. If all layers keep states: of its
        slots, each counting as the maximum context."""
        growing = [one.first_growing for one in self.cache.ranks]
        if growing[0] is None:
            return round(self.cache.ranks[0].groups[0].usage * self.max_total_tokens)
        return sum(group.used_tokens for group in growing if group is not None)

    @property
    def num_session_tokens(self) -> int:
        """Tokens of the first group's pages that sessions keep; if all layers keep states, of its slots."""
        groups = [one.first_growing or one.groups[0] for one in self.cache.ranks]
        return sum(group.component.session * group.page_size for group in groups)

    @property
    def token_usage(self) -> float:
        return max(group.usage for one in self.cache.ranks for group in one.groups)

    def add(self, message: NewRequest) -> None:
        try:
            self._check_memory()
            self.constraints.check(message.sampling)
            request = self._accept(message)
        except RequestError as error:
            self._publisher.refused(message.id, error)
            return
        self.requests[request.id] = request
        if request.state is RequestState.COMPILING:
            self.constraints.begin(request)
        else:
            self._enqueue(request)
        if request.published_prompt_logprob == 0:
            self._publisher.first_prompt_token(request)

    def _check_memory(self) -> None:
        if self.released:
            raise MemoryReleasedError(
                f"the engine has released its memory ({', '.join(sorted(self.released))}); try again once it is resumed"
            )

    def _accept(self, message: NewRequest) -> Request:
        if message.session is None:
            return self._builder.accept(message, self.num_waiting)
        self.sessions.maintain()  # a session that has timed out is closed first
        if message.session.whole:
            request = self._builder.accept(message, self.num_waiting)
            request.turn = self.sessions.keeping_turn(message.session, message.extra_key)
        else:
            turn, prompt = self.sessions.next_turn(message.session, message.token_ids, message.extra_key)
            start = turn.position_in(prompt, message.logprob_start)
            whole = msgspec.structs.replace(message, token_ids=prompt, logprob_start=start)
            request = self._builder.accept(whole, self.num_waiting)
            request.turn = turn
        if request.turn is not None:
            self.sessions.begin(request.turn, request.id, request.prompt_len)
        return request

    def _enqueue(self, request: Request) -> None:
        """Adds a request to the queue; a turn of a session waits until the previous turn is in the cache."""
        if request.turn is not None and request.turn.has_to_wait:
            self.sessions.held[request.id] = request
        else:
            self._queues.add(request)

    def abort(self, request_id: int) -> None:
        """Ends a request in any state and drops its KV. Ignores an unknown id: the request may just have finished."""
        request = self.requests.get(request_id)
        if request is not None:
            self.log.counts.aborted += 1
            self._finisher.end(request, "abort", insert=False)
            self._release_one()

    def stop(self, request_id: int, num_tokens: int = -1) -> None:
        """Ends a request whose client needs no more output: publishes nothing, and keeps its KV. Its session continues
        after its first `num_tokens` output tokens (-1: all)."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finisher.end(request, None, insert=True)
        if num_tokens >= 0:
            self.sessions.shorten(request_id, num_tokens)
        if request is not None:
            self._release_one()

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, with nothing changed, while any request runs or waits. Sessions lose their
        KV and stay open."""
        if self.requests:
            return False
        self._finish_in_flight()
        self.rows.release(self.rows.num_leaving)
        self._flush()
        return True

    def _flush(self) -> None:
        self.cache.flush()
        if self._recent is not None:
            self._recent.clear()

    def pause(self, mode: PauseMode) -> None:
        """Makes no more steps until `resume`; new requests wait in the queue. What becomes of the others, see
        `PauseMode`. Calls while paused change the mode only for requests with rows."""
        self._finish_in_flight()
        match mode:
            case PauseMode.ABORT:
                for request_id in list(self.requests):
                    self.abort(request_id)
            case PauseMode.RETRACT:
                for request in self.rows.requests:
                    if request is not None and self.rows.runs(request):
                        self._finisher.requeue(request)
        self.rows.release(self.rows.num_leaving)
        self.paused = True
        self._publisher.flush()

    def forget_kv(self) -> None:
        """Retracts running requests and empties the prefix cache, because KV became invalid. Sessions stay open."""
        self.pause(PauseMode.RETRACT)
        self._flush()
        self._queues.look_again()

    def resume(self) -> None:
        self.paused = False

    def release_memory(self, tags: frozenset[MemoryTag]) -> None:
        """Frees device memory, and the prefix cache with the KV cache. Raises `RequestError` while any request runs or
        waits; `ConfigError` if the runner cannot."""
        if self.requests:
            raise RequestError(
                f"{len(self.requests)} requests run or wait; memory can be released when there are none",
                code="engine_busy",
            )
        new = tags - self.released
        self.flush_cache()
        self._runner.release_memory(weights=MemoryTag.WEIGHTS in new, kv=MemoryTag.KV_CACHE in new)
        self.released |= new

    def resume_memory(self, tags: frozenset[MemoryTag]) -> None:
        """Raises `CheckpointError` or `ConfigError` if the weights cannot be read again."""
        back = tags & self.released
        self._runner.resume_memory(weights=MemoryTag.WEIGHTS in back, kv=MemoryTag.KV_CACHE in back)
        self.released -= back

    def load_weights(self, model_path: str, version: str | None = None) -> None:
        """Replaces the weights, also released ones, and the name of their version unless it is None. Raises as
        `Runner.load_weights`."""
        self._runner.load_weights(model_path)
        self.weight_version = self.weight_version if version is None else version
        self.released -= {MemoryTag.WEIGHTS}

    def step(self) -> None:
        """Launches the next step, unless paused; finishes the previous one, samples the next one if it has masks, and
        publishes."""
        self._stress_now()
        self._queue_compiled()
        for request in self.sessions.ready():
            self._queues.add(request)
        launched = None if self.paused else self._launch_next()
        self._finish_in_flight()
        if launched is not None and launched.planned.masked:
            self._sample(launched)
        self._in_flight = launched
        if self.rows.num_leaving:
            self.rows.release(RELEASES_PER_STEP)
        self.sessions.maintain()
        self._publisher.flush()
        if self._check:
            check_conservation(self.cache)
        if self.idle:
            self._check_idle_pages()

    def report_cache(self) -> CacheReport:
        return report_cache(self.cache, self.sessions.all(), self._clock())

    def _stress_now(self) -> None:
        if self.paused:
            return
        if self._stress.retracts(self.log.steps):
            self._finish_in_flight()
            self._finisher.retract_one_of(retractable(self.rows))
            self.log.write_retractions(RetractionCause.TEST)
        if self._stress.evicts(self.log.steps):
            evict_all(self.cache)

    def retract_newest(self, rank: int | None = None) -> bool:
        """See `Finisher.retract_newest`. No step may be in flight."""
        return self._finisher.retract_newest(rank)

    def drain_in_flight(self) -> None:
        self._finish_in_flight()

    def _queue_compiled(self) -> None:
        for done in self.constraints.compiled():
            if done.error is not None:
                self._finisher.end(done.request, "error", insert=False, error=done.error)
            else:
                done.request.move_to(RequestState.WAITING)
                self._enqueue(done.request)

    def _sample(self, launched: LaunchedStep) -> None:
        masks, closed = self.constraints.masks(launched.planned.masked)
        launched.handle.sample(masks)
        self._finisher.close(closed)

    def _launch_next(self) -> LaunchedStep | None:
        if self.background.must_give_back():
            self._finish_in_flight()
            self.background.give_back()
            self.log.write_retractions(RetractionCause.OTHERS_WAIT)
        if self._planner.starved is not None:
            self._feed(self._planner.starved)
        while True:
            self._planned_at_rest = self._in_flight is None
            try:
                planned = self._plan(self.cache.launched_step + 1)
            except OutOfPages:
                self._make_room()
                continue
            self.log.write_retractions(RetractionCause.KV_FULL)
            if planned is None:
                return None
            self._announce(planned)
            handle = self._runner.launch(planned.plan)
            self.cache.launched(planned.plan.step)
            self._note_chunks(planned)
            self.log.launched(planned)
            return LaunchedStep(planned, handle, self._clock())

    def _plan(self, step: int) -> PlannedStep | None:
        """None if there is nothing to compute; raises `OutOfPages` if there is, but pages are short."""
        prompts_wait = len(self._queues) > 0
        decode = self._planner.extend_decode(prompts_wait)
        if prompts_wait:
            for decisions in self.background.decisions(step, lambda: self._planner.allowance(step, decode)):
                self._carry_out(decisions)
        self.log.looked(self.background.short_of_slots)
        return self._planner.plan(step, decode)

    def _carry_out(self, decisions: Decisions) -> None:
        if decisions.seated:
            self.rows.seat(decisions.seated)
            rows = np.array([request.row for request in decisions.seated], np.intp)
            self._drafting.reset_rows(rows)
            if self._recent is not None:
                self._recent.reset_rows(rows)
        for request in decisions.too_large:
            self._finisher.refuse_too_large(request)

    def _make_room(self) -> None:
        """Frees pages: of ended requests, else by finishing the step in flight, else those of the rank that is short:
        of rejected drafts and idle sessions, else by retracting a request."""
        if self.rows.release(RECLAIMED_AT_ONCE):
            return
        if self._in_flight is not None:
            self._finish_in_flight()
        elif not (self.cache.give_up_drafts() or self.cache.relieve_sessions()):
            self._end_or_retract(self.cache.short_rank)

    def _feed(self, rank: int) -> None:
        """Frees pages of a rank whose prompts had none in the last step, however often requests of other ranks end: of
        the steps in flight, and if there were none, as `_make_room` does."""
        at_rest = self._planned_at_rest
        self._finish_in_flight()
        self.rows.release(self.rows.num_leaving)
        cache = self.cache.ranks[rank]
        if not at_rest or cache.available_pages or not self._finisher.running(rank):
            return
        if not cache.relieve_sessions():
            self._end_or_retract(rank)
            self.rows.release(self.rows.num_leaving)

    def _end_or_retract(self, rank: int) -> None:
        if len(self._finisher.running(rank)) > 1:
            self.retract_newest(rank)
        else:
            self._finisher.end_the_only_one(rank)

    def _announce(self, planned: PlannedStep) -> None:
        """Publishes `Started` before a launch, to distinguish executed from queued requests after a crash."""
        first_time = [request for request in planned.newcomers if request.cached_tokens is None]
        for request in first_time:
            request.cached_tokens = request.record.kv_committed_len
            self._publisher.started(request, self._clock())
            self.log.started(request)
        if first_time:
            self._publisher.flush()

    def _note_chunks(self, planned: PlannedStep) -> None:
        """Inserts the KV of launched chunks into the tree, and lets whole prompts decode from the next step on."""
        whole = []
        for chunk in planned.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            self.cache.lengths.kv_committed[request.row] = end
            self.cache.cache_prefix(request.record, request.tokens, end, planned.plan.step)
            if chunk.last:
                whole.append(request)
        if planned.chunks:
            self._queues.look_again()
        if whole:
            self.rows.prefilled(whole)

    def _finish_in_flight(self) -> None:
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return
        planned = launched.planned
        result = launched.handle.result()
        self._note_time(launched)
        for chunk in planned.chunks:
            if chunk.last and chunk.request.first_token is None:
                chunk.request.first_token = self._finisher.finished_at
        self.cache.settle(planned.plan.step)
        if planned.plan.copies:
            self._queues.look_again()  # the copied states can be evicted now
        sampled = self._results.process(planned, result)
        self.log.finished(sampled, result.replayed)
        self.reserve.decay()

    def _note_time(self, launched: LaunchedStep) -> None:
        """Records the duration of a step, which started when it was launched, or when the previous one ended."""
        begun, ended = max(launched.at, self._finisher.finished_at), self._clock()
        self._finisher.finished_at = ended
        self.budget.observe(launched.planned.plan, ended - begun)
        if not launched.planned.chunks:
            widths = launched.planned.decode.widths
            most_drafts = 0 if widths is None else int(widths.max()) - 1
            self._drafting.observe_time(launched.planned.plan.num_tokens, ended - begun, most_drafts)

    def _release_one(self) -> None:
        """Releases a row at once if no step is in flight."""
        if self._in_flight is None:
            self.rows.release(1)

    def _check_idle_pages(self) -> None:
        """Checks that at idle every page is free or evictable. A fault is logged and counted; the server continues."""
        if self._pages_checked_at == self.log.counts.finished:
            return
        self._pages_checked_at = self.log.counts.finished
        fault = idle_fault(self.cache)
        if fault:
            self.log.counts.memory_faults += 1
            logger.error("KV pages do not add up at idle: %s", fault)

    def _cached_prefix(self, request: Request) -> int:
        return self.cache.peek(request.tokens, request.match_limit, request.namespace, request.waiting.bookmark)


def _prompt_tokens(config: EngineConfig, spec: RunnerSpec) -> int:
    """Maximum prompt tokens of a step."""
    return min(config.chunked_prefill_size or spec.prompt_tokens, spec.token_budget)


def _chunk_budget(config: EngineConfig, spec: RunnerSpec) -> ChunkBudget:
    size = _prompt_tokens(config, spec)
    if config.target_itl_ms is None:
        return FixedChunk(size)
    return TimedChunk(config.target_itl_ms / 1000.0, size, Padding(spec.mixed_shapes))


def _drafting(config: EngineConfig, spec: RunnerSpec) -> Drafting:
    if config.speculative_algorithm is SpeculativeAlgorithm.NONE:
        return FixedDrafts()
    one_by_one = config.speculative_algorithm is SpeculativeAlgorithm.DRAFT
    return AdaptiveDrafts(spec.max_rows, spec.max_samples, one_by_one=one_by_one)

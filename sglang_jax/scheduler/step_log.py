"""The log of steps for operators: a line per prefill step, a line every few decode steps, and counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang_jax.scheduler.messages import ExpertBalance, GroupUsage, SchedulerStats
from sglang_jax.scheduler.planner import PlannedStep
from sglang_jax.scheduler.request import Request

if TYPE_CHECKING:
    from sglang_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

THROUGHPUT_SECONDS = 0.5
"""Minimum interval over which the generation throughput is averaged."""


class RetractionCause(Enum):
    """Why requests were retracted, as the log says it."""

    KV_FULL = "KV cache pool is full. Retract requests."
    OTHERS_WAIT = "Other requests wait. Retract requests of the background."
    TEST = "Testing retraction."


@dataclass(slots=True)
class _Retractions:
    """Retractions without a line yet. `ratio`: of `NewTokenReserve` before the first; `ended`: requests that were ended
    because they do not fit even without others."""

    ratio: float
    retracted: int = 0
    ended: int = 0


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    memory_faults: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class StepLog:
    def __init__(self, scheduler: Scheduler, decode_interval: int) -> None:
        self._scheduler = scheduler
        self._decode_interval = decode_interval
        self.counts = Counts()
        self.steps = 0
        self._decode_steps = 0
        self._throughput = 0.0
        self._throughput_since = time.monotonic()
        self._throughput_tokens = 0
        self._line_since: float | None = None
        self._line_tokens = 0
        self._retractions: _Retractions | None = None
        self._short_of_slots = False

    def started(self, request: Request) -> None:
        self.counts.prompt_tokens += request.prompt_len
        self.counts.cached_tokens += request.cached_tokens or 0

    def launched(self, planned: PlannedStep) -> None:
        self.steps += 1
        if self._line_since is None:
            self._line_since, self._line_tokens = time.monotonic(), self.counts.generation_tokens
        if planned.chunks and logger.isEnabledFor(logging.INFO):
            self._write_prefill_line(planned)

    def drafted(self, counts: NDArray[np.int64]) -> None:
        """Adds the draft counts of a step, `[rows, 3]`: see `DraftCounts`."""
        steps, drafts, right = counts.sum(axis=0).tolist()
        self.counts.draft_steps += steps
        self.counts.draft_tokens += drafts
        self.counts.accepted_tokens += right

    def retracted(self, ratio: float) -> None:
        """Counts a retraction. `ratio`: of `NewTokenReserve` before it."""
        self.counts.retractions += 1
        self._pending(ratio).retracted += 1

    def ended_for_pages(self, ratio: float) -> None:
        """Notes a request that was ended because it does not fit even without others."""
        self._pending(ratio).ended += 1

    def _pending(self, ratio: float) -> _Retractions:
        self._retractions = self._retractions or _Retractions(ratio)
        return self._retractions

    def write_retractions(self, cause: RetractionCause) -> None:
        """Writes one line about all retractions since the last call, if there were any."""
        noted, self._retractions = self._retractions, None
        if noted is None:
            return
        ended = f", #aborted_retracted_reqs: {noted.ended}" if noted.ended else ""
        logger.log(
            logging.WARNING if cause is RetractionCause.KV_FULL else logging.INFO,
            "%s #retracted_reqs: %d%s, #new_token_ratio: %.4f -> %.4f",
            cause.value,
            noted.retracted,
            ended,
            noted.ratio,
            self._scheduler.reserve.ratio,
        )

    def looked(self, short_of_slots: bool) -> None:
        """Writes a line when the first request waits for a slot of states: one until no request does."""
        if short_of_slots and not self._short_of_slots:
            logger.warning(
                "State slots are short. Requests wait. %s, #running-req: %d, #queue-req: %d",
                self._usage(),
                self._scheduler.num_running,
                self._scheduler.num_waiting,
            )
        self._short_of_slots = short_of_slots

    def finished(self, num_tokens: int, replayed: bool) -> None:
        """Counts a finished step, which sampled `num_tokens` tokens. `replayed`: see `StepResult`."""
        self.counts.generation_tokens += num_tokens
        if num_tokens > 0:
            self._decode_steps += 1
            if self._decode_steps % self._decode_interval == 0 and logger.isEnabledFor(logging.INFO):
                self._write_decode_line(replayed)
        if self._scheduler.num_running + self._scheduler.num_waiting == 0:
            self._line_since = None  # the next line's interval starts with the next step

    def stats(
        self, compiles_after_warm_up: int, programs_left: int = 0, experts: Sequence[ExpertBalance] = ()
    ) -> SchedulerStats:
        scheduler, counts = self._scheduler, self.counts
        return SchedulerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_used_tokens=scheduler.num_used_tokens,
            max_total_tokens=scheduler.max_total_tokens,
            gen_throughput=self._measure(),
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            generation_tokens=counts.generation_tokens,
            num_finished=counts.finished,
            num_aborted=counts.aborted,
            num_retractions=counts.retractions,
            num_evicted_pages=scheduler.cache.num_evicted,
            num_memory_faults=counts.memory_faults,
            num_draft_steps=counts.draft_steps,
            num_draft_tokens=counts.draft_tokens,
            num_accepted_tokens=counts.accepted_tokens,
            compiles_after_warm_up=compiles_after_warm_up,
            programs_left=programs_left,
            num_sessions=scheduler.sessions.count,
            num_session_tokens=scheduler.num_session_tokens,
            num_pins_let_go=scheduler.cache.pins.num_let_go,
            num_sessions_timed_out=scheduler.sessions.num_timed_out,
            new_token_reserve=scheduler.reserve.ratio,
            steps=self.steps,
            weight_version=scheduler.weight_version,
            groups=self._groups() if self._names_groups() else [],
            experts=list(experts),
        )

    def _measure(self) -> float:
        """Output tokens per second over the present interval, or the previous one if the present is too short."""
        now = time.monotonic()
        elapsed = now - self._throughput_since
        if elapsed >= THROUGHPUT_SECONDS:
            self._throughput = (self.counts.generation_tokens - self._throughput_tokens) / elapsed
            self._throughput_since, self._throughput_tokens = now, self.counts.generation_tokens
        return self._throughput

    def _usage(self) -> str:
        groups = self._groups()
        if self._names_groups():
            return ", ".join([_usage_of(group) for group in groups])
        return f"token usage: {groups[0].usage:.2f}"

    def _names_groups(self) -> bool:
        """Whether there is more than one pool of layers that see all tokens."""
        return [group.name for group in self._scheduler.cache.ranks[0].groups] != ["full"]

    def _groups(self) -> list[GroupUsage]:
        of_all_ranks = zip(*(one.groups for one in self._scheduler.cache.ranks), strict=True)
        return [
            GroupUsage(
                same[0].name,
                sum(group.used_tokens for group in same),
                sum(group.max_tokens for group in same),
                same[0].unit,
                sum(group.session_tokens for group in same),
            )
            for same in of_all_ranks
        ]

    def _write_prefill_line(self, planned: PlannedStep) -> None:
        scheduler = self._scheduler
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, %s, #running-req: %d, #queue-req: %d",
            len(planned.newcomers),
            sum(chunk.length for chunk in planned.chunks),
            sum(request.cached_tokens or 0 for request in planned.newcomers),
            self._usage(),
            scheduler.num_running,
            scheduler.num_waiting,
        )

    def _write_decode_line(self, replayed: bool) -> None:
        scheduler = self._scheduler
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, %s, cuda graph: %s, gen throughput (token/s): %.2f, "
            "#queue-req: %d",
            scheduler.num_running,
            scheduler.num_used_tokens,
            self._usage(),
            replayed,
            self._line_throughput(),
            scheduler.num_waiting,
        )

    def _line_throughput(self) -> float:
        """Output tokens per second since the previous decode line, or since the engine was idle."""
        now, since = time.monotonic(), self._line_since
        tokens, self._line_tokens = self.counts.generation_tokens - self._line_tokens, self.counts.generation_tokens
        self._line_since = now
        return tokens / (now - since) if since is not None and now > since else 0.0


def _usage_of(group: GroupUsage) -> str:
    number = f"{group.name} num: {group.used_tokens}, " if group.unit == "slot" else ""
    return f"{number}{group.usage_name}: {group.usage:.2f}"

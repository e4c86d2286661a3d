"""A scheduler over `FakeRunner`, a channel that records messages, and shorthands for requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from helpers import fake_grammars
from helpers.caches import states_of
from helpers.fake_grammars import FakeCompiler, FakeGrammars

from sglang_jax.architectures import CacheKind, group_names
from sglang_jax.architectures.pooling import Pooling
from sglang_jax.config import EngineConfig
from sglang_jax.mem_cache.guesses import Guesses
from sglang_jax.mem_cache.ledger import OwnershipError
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import POOLED, TokenScores
from sglang_jax.scheduler.messages import (
    DraftCounts,
    Finished,
    Inbound,
    NewRequest,
    Outbound,
    SchedulerStats,
    StepOutputs,
)
from sglang_jax.scheduler.scheduler import Scheduler

Sees = int | None | CacheKind
"""What a group of layers sees: a number of last tokens, all of them (None), or all by a state (`CacheKind.STATE`)."""

VOCAB = 40
EOS = 0
POOLED_WIDTH = 3


class RecordingChannel:
    """Records published messages, and delivers queued ones."""

    def __init__(self) -> None:
        self.inbox: list[Inbound] = []
        self.messages: list[Outbound] = []
        self.streams: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[tuple[int, float | None]]] = {}
        self.prompt_logprobs: dict[int, list[tuple[int, float | None]]] = {}
        self.pooled: dict[int, list[float]] = {}
        self.drafts: dict[int, DraftCounts] = {}

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        assert self.inbox or not block, "the loop would sleep for ever"
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, message: Outbound) -> None:
        self.messages.append(message)
        if not isinstance(message, StepOutputs):
            return
        ids, tokens = np.frombuffer(message.ids, np.int64), np.frombuffer(message.tokens, np.int32)
        for started in message.started:
            assert started.id not in self.cached, "started twice"
            self.cached[started.id] = started.cached_tokens
        for request_id, token in zip(ids.tolist(), tokens.tolist(), strict=True):
            assert request_id not in self.finished, "a token after the end"
            self.streams.setdefault(request_id, []).append(token)
        for request_id, entry in message.logprobs:
            self.logprobs.setdefault(request_id, []).append((entry.token_id, entry.logprob))
        for request_id, entries in message.prompt_logprobs:
            self.prompt_logprobs.setdefault(request_id, []).extend((e.token_id, e.logprob) for e in entries)
        for request_id, numbers in message.pooled:
            assert request_id not in self.pooled, "a vector twice"
            assert request_id not in self.finished, "a vector after the end"
            self.pooled[request_id] = np.frombuffer(numbers, "<f4").tolist()
        for request_id, drafts, right in np.frombuffer(message.drafts, np.int64).reshape(-1, 3).tolist():
            assert request_id not in self.finished, "drafts after the end"
            told = self.drafts.get(request_id, DraftCounts(0, 0, 0))
            self.drafts[request_id] = DraftCounts(told.steps + 1, told.drafts + drafts, told.right + right)
        for finished in message.finished:
            if finished.drafts is not None and finished.id in self.streams:
                assert self.drafts.get(finished.id, DraftCounts(0, 0, 0)) == finished.drafts
            assert finished.id not in self.finished, "finished twice"
            self.finished[finished.id] = finished

    def output(self, request_id: int) -> list[int]:
        """All output tokens of a finished request."""
        finished = self.finished[request_id]
        streamed = self.streams.get(request_id, [])
        tokens = np.frombuffer(finished.tokens, np.int32).tolist() or streamed
        assert len(tokens) == finished.num_tokens
        return tokens

    @property
    def stats(self) -> SchedulerStats:
        return next(message for message in reversed(self.messages) if isinstance(message, SchedulerStats))


class Subject(Protocol):
    """A runner used instead of `FakeRunner`, and the tokens that it must sample."""

    def runner(self, spec: RunnerSpec) -> Runner: ...

    def output(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        most: int,
        stop_ids: Collection[int],
        allowed: Callable[[Sequence[int]], Sequence[int]] | None,
    ) -> list[int]:
        """Output tokens of a request, the stop token included; `allowed`: as in `Oracle.output`."""
        ...


@dataclass
class Bench:
    """A scheduler under test, over `FakeRunner` unless a subject is given. `pages` does not count the pad page.

    `window`: what the first group of layers sees; `more`: the same, with pages (slots), for further groups;
    `max_samples`: maximum tokens of a row in a step, above 1 with drafts; `max_drafts`: of a step; `least_gain`,
    `gain_over_loss`: of snapshots; `tails`: where prompts are guessed to diverge at first, at a cost of one token each;
    None: as on a server, which makes no guess for prompts of fewer than 200 tokens; `pooling`: every request wants a
    vector; `whole`: of a prompt that is computed whole; `ranks`: with `rows`, `pages` and `budget` of each.
    """

    pages: int = 64
    page_size: int = 4
    rows: int = 8
    chunk: int = 16
    budget: int = 32
    context: int = 128
    lazy: bool = True
    scribble: bool = True
    invalid_token: int | None = None
    options: dict[str, object] = field(default_factory=dict)
    subject: Subject | None = None
    window: Sees = None
    more: tuple[tuple[Sees, int], ...] = ()
    max_samples: int = 1
    least_gain: int = 1
    gain_over_loss: int = 1
    max_drafts: int | None = None
    tails: tuple[int, ...] | None = None
    pooling: Pooling | None = None
    whole: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        groups = ((self.window, self.pages), *self.more)
        pools = pools_of([(sees, pages + 1) for sees, pages in groups], self.page_size)
        spec = RunnerSpec(
            pools,
            self.rows * self.ranks,
            self.budget * self.ranks,
            self.context,
            VOCAB,
            max_samples=self.max_samples,
            max_drafts=self.max_drafts,
            pooling=self.pooling,
            pooled_width=0 if self.pooling is None else POOLED_WIDTH,
            whole_prompts=self.whole,
            dp_ranks=self.ranks,
        )
        if self.subject is None:
            self.runner = FakeRunner(spec, lazy=self.lazy, invalid_token=self.invalid_token)
        else:
            self.runner = self.subject.runner(spec)
        self.config = EngineConfig(
            chunked_prefill_size=self.chunk * self.ranks, page_size=self.page_size, debug_memory=True, **self.options
        )
        self.channel = RecordingChannel()
        grammars = FakeCompiler(FakeGrammars(VOCAB, EOS))
        self.scheduler = Scheduler(self.runner, (EOS,), self.config, self.channel, grammars=grammars)
        if (states := states_of(self.scheduler.cache.ranks[0])) is not None:
            states.least_gain = self.least_gain
            states.gain_over_loss = self.gain_over_loss
            if self.tails is not None:
                states.guesses = Guesses(self.page_size, step_cost=1, tails=self.tails)
        if self.subject is None:
            self.runner.namespace_of = lambda row: self.scheduler.rows.at(row).namespace
        if self.scribble and self.subject is None:
            scribble_on_free(self.scheduler, self.runner)
        self.oracle = Oracle(VOCAB, tuple(pool.window for pool in pools))
        self.prompts: dict[int, list[int]] = {}
        self.requests: dict[int, NewRequest] = {}
        self.logprob_starts: dict[int, int] = {}
        self.wanted: dict[int, list[int]] = {}
        self.wanted_pooled: dict[int, list[float]] = {}
        self._next_id = 1

    def add(self, prompt: list[int], max_new_tokens: int = 8, *, seed: int = 5, **fields: object) -> int:
        """Queues a request; its expected output is in `wanted`. `sent`: the part of the prompt that is sent, where the
        rest belongs to a session."""
        request_id = self._next_id
        sampling = fields.pop("sampling", None) or SamplingParams(max_new_tokens=max_new_tokens, seed=seed)
        assert isinstance(sampling, SamplingParams)
        namespace = fields.get("extra_key")
        assert namespace is None or isinstance(namespace, str)
        wants = fields.get("wants")
        if self.pooling is not None:
            sampling = replace(sampling, max_new_tokens=0, grammar=None)
            fields |= {"wants": POOLED, "top_logprobs": -1, "logprob_start": -1}
            self.wanted_pooled[request_id] = self.oracle.pooled(
                prompt, self.pooling, POOLED_WIDTH, namespace, whole=self.whole
            )
        elif isinstance(wants, TokenScores):
            self.wanted_pooled[request_id] = self.oracle.token_scores(prompt, wants.token_ids, namespace)
        self.wanted[request_id] = self._wanted(prompt, sampling, namespace)
        self.prompts[request_id] = prompt
        self.logprob_starts[request_id] = int(fields.get("logprob_start", -1))  # type: ignore[call-overload]
        self._next_id += 1
        message = self.requests[request_id] = NewRequest(
            id=request_id,
            token_ids=np.array(fields.pop("sent", prompt), np.int32).tobytes(),
            sampling=sampling,
            **{"stream": True, **fields},
        )
        self.scheduler.add(message)
        return request_id

    def _wanted(self, prompt: list[int], sampling: SamplingParams, namespace: str | None) -> list[int]:
        most = self.context if sampling.max_new_tokens is None else sampling.max_new_tokens
        limit = min(most, self.context - len(prompt))
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        allowed = None
        if sampling.grammar is not None:
            allowed = partial(fake_grammars.choice, sampling, vocab=VOCAB, eos=EOS)
        if self.subject is None:
            return self.oracle.output(prompt, sampling.seed or 0, limit, stops, namespace, allowed)
        return self.subject.output(prompt, sampling, limit, stops, allowed)

    def run(self, most_steps: int = 2000) -> None:
        """Steps until idle, at least once: even an idle scheduler may have something to publish."""
        for _ in range(most_steps):
            self.scheduler.step()
            if self.scheduler.idle:
                return
        raise AssertionError(f"not idle after {most_steps} steps")

    def check_outputs(self) -> None:
        """Every request that ended by itself has the oracle's output."""
        for request_id, finished in self.channel.finished.items():
            if finished.kind in ("stop", "length"):
                assert self.channel.output(request_id) == self.wanted[request_id], f"request {request_id}"
                assert self.channel.pooled.get(request_id) == self.wanted_pooled.get(request_id)


def pools_of(groups: Sequence[tuple[Sees, int]], page_size: int) -> tuple[PoolSpec, ...]:
    """Pools with the given numbers of pages, pad pages included, and the names that a model's pools would have."""

    def lifetime(sees: Sees) -> tuple[CacheKind, int | None]:
        if isinstance(sees, CacheKind):
            return sees, None
        return (CacheKind.FULL if sees is None else CacheKind.WINDOW), sees

    lifetimes = [lifetime(sees) for sees, _ in groups]
    named = zip(group_names(lifetimes), lifetimes, groups, strict=True)
    return tuple(PoolSpec(name, kind, pages, page_size, window) for name, (kind, window), (_, pages) in named)


def scribble_on_free(scheduler: Scheduler, runner: FakeRunner) -> None:
    """From now on a page's content is destroyed as soon as it is free."""
    for one in scheduler.cache.ranks:
        for index, group in enumerate(one.groups):
            _scribble_on_free(group.pool, runner, index, one.rank)


def _scribble_on_free(pool: PagePool, runner: FakeRunner, group: int, rank: int) -> None:
    free = pool.free

    def free_and_scribble(pages: np.ndarray, owner: object) -> None:
        free(pages, owner)
        runner.scribble(pages, group, rank)

    pool.free = free_and_scribble


__all__ = ["EOS", "VOCAB", "Bench", "OwnershipError", "RecordingChannel", "scribble_on_free"]

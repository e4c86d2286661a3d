"""Drives a runner by hand: the work of a scheduler, with every choice left to the test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_jax.runner.plan import (
    LAST_TOKEN,
    NO_LOGPROBS,
    PageDeltas,
    PromptLogprobs,
    RowUpdates,
    SamplingUpdate,
    StepPlan,
    StepResult,
    TokenMasks,
    TopLogprobs,
    mask_words,
)
from sglang_jax.runner.protocol import Runner, StepHandle
from sglang_jax.sampling.params import SamplingParams

DECODE = 0
"""Used instead of a number of prompt tokens: the sequence decodes."""


@dataclass(eq=False)
class Driven:
    """A request: its tokens so far, its row and pages, and how much of it is in the KV pages."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    stop_ids: list[int]
    row: int = -1
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    pages_on_device: int = 0
    committed: int = 0
    logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


@dataclass
class LaunchedStep:
    """A step in flight; `finish` passes its tokens to their requests."""

    handle: StepHandle
    requests: Sequence[Driven]
    plan: StepPlan

    def finish(self) -> StepResult:
        result = self.handle.result()
        for index, request in enumerate(self.requests):
            if self.plan.samples[index]:
                (token,) = result.tokens[index, : result.counts[index]].tolist()
                request.output.append(token)
                if result.logprobs is not None:
                    entries = (result.logprobs.logprobs, result.logprobs.top_ids, result.logprobs.top_logprobs)
                    request.logprobs.append(TopLogprobs(*(entry[index : index + 1] for entry in entries)))
        for wanted, found in zip(self.plan.prompt_logprobs, result.prompt_logprobs, strict=True):
            self.requests[wanted.sequence].prompt_logprobs.append(found)
        return result


def masks_of(allowed: Sequence[Collection[int]], vocab: int) -> TokenMasks:
    """Masks that allow the given tokens."""
    words = np.zeros((len(allowed), mask_words(vocab)), np.uint32)
    for line, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            line[token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(words.view(np.int32))


class PlanDriver:
    """Admits, steps, retracts and finishes requests on a runner, allocating pages in a scattered order."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.page_size = runner.spec.pools[0].page_size
        self.free_pages = np.random.default_rng(5).permutation(np.arange(1, runner.spec.pools[0].num_pages)).tolist()
        self.free_rows = list(range(runner.spec.max_rows))
        self._updates: list[SamplingUpdate] = []
        self._steps = 0

    def admit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Driven:
        """Gives a new request the lowest free row."""
        request = Driven(list(prompt), sampling or SamplingParams(temperature=0.0), seed, list(stop_ids))
        self.readmit(request)
        return request

    def readmit(self, request: Driven) -> None:
        """Gives a row to a retracted request: all its tokens must be computed again."""
        request.row = self.free_rows.pop(0)
        history = np.array(request.tokens, np.int32) if request.sampling.counts_tokens else None
        stop_ids = np.array(request.stop_ids, np.int32)
        update = SamplingUpdate(request.row, request.sampling, request.seed, len(request.prompt), stop_ids, history)
        self._updates.append(update)

    def release(self, request: Driven) -> None:
        """Takes back row and pages, which are the first to be allocated again."""
        self.free_pages.extend(request.pages)
        self.free_rows.insert(0, request.row)
        request.pages, request.pages_on_device, request.row, request.committed = [], 0, -1, 0

    def share_prefix(self, owner: Driven, other: Driven, num_pages: int) -> None:
        """Gives `other`, just admitted, the first pages of `owner`, as a prefix cache would."""
        other.pages = owner.pages[:num_pages]
        other.committed = num_pages * self.page_size

    def launch(
        self,
        parts: Sequence[tuple[Driven, int]],
        *,
        top_logprobs: int = NO_LOGPROBS,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        prompt_top_logprobs: int = 0,
        masked: Collection[Driven] = (),
    ) -> LaunchedStep:
        """Launches a step of (request, number of tokens, or `DECODE`); decode sequences come first.

        `masked`: the requests that sample under a mask, which the step's handle waits for.
        """
        num_decode = sum(count == DECODE for _, count in parts)
        assert all((count == DECODE) == (index < num_decode) for index, (_, count) in enumerate(parts))
        counts = [max(count, 1) for _, count in parts]
        sources, samples = [], []
        for (request, count), tokens in zip(parts, counts, strict=True):
            known = request.tokens[request.committed : request.committed + count]
            sources += [LAST_TOKEN] if count == DECODE else known
            request.committed += tokens
            samples.append(count == DECODE or request.committed == len(request.tokens))
        plan = StepPlan(
            step=self._steps,
            rows=np.array([request.row for request, _ in parts], np.int32),
            num_decode=num_decode,
            query_lens=np.array(counts, np.int32),
            kv_lens=np.array([request.committed for request, _ in parts], np.int32),
            tokens=np.array(sources, np.int32),
            samples=np.array(samples, np.bool_),
            page_deltas=(self._new_pages([request for request, _ in parts]),),
            row_updates=RowUpdates(tuple(self._updates)),
            top_logprobs=top_logprobs,
            prompt_logprobs=tuple(prompt_logprobs),
            prompt_top_logprobs=prompt_top_logprobs,
            masked=np.array([request in masked for request, _ in parts]) & np.array(samples) if masked else None,
        )
        self._steps += 1
        self._updates = []
        return LaunchedStep(self.runner.launch(plan), [request for request, _ in parts], plan)

    def step(self, parts: Sequence[tuple[Driven, int]], **wanted: object) -> StepResult:
        """Launches a step and waits for it."""
        return self.launch(parts, **wanted).finish()  # type: ignore[arg-type]

    def generate(self, request: Driven, count: int, chunk: int = 1000) -> list[int]:
        """Runs a single request: prefill in chunks, then decode until it has `count` outputs."""
        if not request.output or request.committed < len(request.tokens) - 1:
            goal = len(request.tokens)
            while request.committed < goal:
                self.step([(request, min(chunk, goal - request.committed))])
        while len(request.output) < count:
            self.step([(request, DECODE)])
        return request.output

    def _new_pages(self, requests: Sequence[Driven]) -> PageDeltas:
        entries = []
        for request in requests:
            while len(request.pages) * self.page_size < request.committed:
                request.pages.append(self.free_pages.pop())
            for column in range(request.pages_on_device, len(request.pages)):
                entries.append((request.row, column, request.pages[column]))
            request.pages_on_device = len(request.pages)
        return PageDeltas(*np.array(entries, np.int32).reshape(-1, 3).T)

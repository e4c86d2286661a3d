"""A runner without a model, for tests: a row's sample is a hash of everything that the row can see (`fake_model.py`).

Each KV slot holds a hash of its token, its position, and all that its query saw when it was written, and each group has
separate slots, so a wrong page, now or earlier, changes samples. `FakeRunner` updates its page tables, last tokens and
sampling state only from plans, so errors in a plan change samples, too. A slot of recurrent states is a hash of
everything written since the row's first token, in order and without rejected drafts, so a state that is stale, of
another row, or of another length changes samples.

With a `RunnerSpec.max_samples` above 1, it makes drafts, some of which are right, and writes their KV like any other. A
row's samples do not depend on them, but the number of samples in one step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.errors import CheckpointError
from sglang_jax.runner import fake_model
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import (
    DRAFT,
    INVALID_TOKEN,
    LAST_TOKEN,
    NO_LOGPROBS,
    Float64,
    Int32,
    PooledPart,
    PromptLogprobs,
    RunnerSpec,
    SamplingUpdate,
    StepPlan,
    StepResult,
    TokenMasks,
    TopLogprobs,
    allowed_tokens,
    mask_words,
)
from sglang_jax.runner.protocol import RunnerReport
from sglang_jax.runner.pulse import Building


class FakeHandle:
    """A launched step. It runs when its result is asked for if the runner is lazy, otherwise as soon as it can. `run`:
    runs it with the masks of its `masked` sequences."""

    def __init__(self, run: Callable[[TokenMasks | None], StepResult], lazy: bool, masked: int, words: int) -> None:
        self._run = run
        self._lazy = lazy
        self._shape = (masked, words)
        self._masks: TokenMasks | None = None
        self._result = None if lazy or masked else run(None)

    @property
    def waits(self) -> bool:
        return self._shape[0] > 0 and self._masks is None

    def sample(self, masks: TokenMasks) -> None:
        assert self.waits, "masks for a step that has none to come"
        assert masks.words.shape == self._shape, f"masks of {masks.words.shape}, expected {self._shape}"
        assert masks.words.any(axis=1).all(), "a mask allows no token"
        self._masks = masks
        if not self._lazy:
            self._result = self._run(masks)

    def result(self) -> StepResult:
        assert not self.waits, "asked for the result of a step that waits for its masks"
        return self._run(self._masks) if self._result is None else self._result


class FakeRunner:
    """- `lazy`: steps run when their result is asked for, as late as a device may; otherwise when launched.
    - `invalid_token`: a row that samples right after computing this token reports logits that are not finite.
    - `spoil_next`: the next launched step writes KV that is not finite and samples `INVALID_TOKEN`, as after a device
      fault.
    - `namespace_of`: returns the namespace of a row's request at the launch, on which KV depends; if not set, all are
      None.
    """

    def __init__(self, spec: RunnerSpec, *, lazy: bool = True, invalid_token: int | None = None) -> None:
        self.spoil_next = False
        self.namespace_of: Callable[[int], str | None] = lambda row: None
        self._spec = spec
        self._lazy = lazy
        self._invalid_token = invalid_token
        self._page_size = spec.pools[0].page_size
        self._windows = tuple([pool.window for pool in spec.pools])
        self._slots = [[0xBAD] * (pool.num_pages * self._page_size * spec.dp_ranks) for pool in spec.pools]
        self._tables = [np.zeros((spec.max_rows, pool.columns(spec.max_context)), np.int32) for pool in spec.pools]
        self._states = {
            number: [0xBAD] * pool.num_pages for number, pool in enumerate(spec.pools) if pool.kind.keeps_states
        }
        self._last_token: Int32 = np.full(spec.max_rows, -7, np.int32)
        self._kv_lens: Int32 = np.zeros(spec.max_rows, np.int32)
        self._rows: dict[int, SamplingUpdate] = {}
        self._texts: set[int] = set()
        self._lengths_of_prompts: dict[int, int] = {}
        self._next_step = 0
        self._handle: FakeHandle | None = None
        self._profile: tuple[Path, int] | None = None
        self.weights = ""
        self.has_weights = self.has_kv = True
        self.plans: list[StepPlan] = []
        self.keep_plans = False

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        progress(1, 1, "nothing to build")

    def announce_builds(self, building: Building) -> None:
        """Does nothing: there are no programs."""

    def start_profile(self, folder: str) -> None:
        self._profile = Path(folder), self._next_step

    def stop_profile(self) -> None:
        assert self._profile is not None, "no profile is taken"
        (folder, first), self._profile = self._profile, None
        (folder / "steps.txt").write_text(str(self._next_step - first))

    def report(self) -> RunnerReport:
        return RunnerReport("fake", "none", 0, 0, 0, 0, {})

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        return ()

    def close(self) -> None:
        """Does nothing: it holds no resources."""

    def load_weights(self, model_path: str) -> None:
        """See `Runner`. All KV of later steps depends on the path. Paths with `missing` do not exist."""
        if "missing" in model_path:
            raise CheckpointError(f"{model_path} does not exist")
        self.weights, self.has_weights = model_path, True

    def release_memory(self, *, weights: bool, kv: bool) -> None:
        self.has_weights, self.has_kv = self.has_weights and not weights, self.has_kv and not kv
        if kv:
            self._slots = [[0xBAD] * len(slots) for slots in self._slots]

    def resume_memory(self, *, weights: bool, kv: bool) -> None:
        self.has_weights, self.has_kv = self.has_weights or weights, self.has_kv or kv

    def _begin_of(self, row: int) -> str | None:
        namespace = self.namespace_of(row)
        return self.weights + (namespace or "") if self.weights else namespace

    def launch(self, plan: StepPlan) -> FakeHandle:
        assert self.has_weights
        assert self.has_kv
        self._check(plan)
        if self.keep_plans:
            self.plans.append(plan)
        begin = [fake_model.begin(self._begin_of(row)) for row in plan.rows.tolist()]
        if self.spoil_next:
            begin = [fake_model.NOT_FINITE] * len(begin)
            self.spoil_next = False
        assert self._handle is None or not self._handle.waits, "launched while the step before waits for its masks"
        masked = 0 if plan.masked is None else int(np.count_nonzero(plan.masked))
        words = mask_words(self._spec.vocab_size)
        self._handle = FakeHandle(lambda masks: self._run(plan, begin, masks), self._lazy, masked, words)
        return self._handle

    def scribble(self, pages: Int32, group: int = 0, rank: int = 0) -> None:
        """Overwrites pages, or slots, of a rank with noise, as may happen to free ones."""
        for page in pages.tolist():
            if group in self._states:
                self._states[group][page] = fake_model.mix(page, 0xDEAD)
                continue
            first = self._first_of(group, rank, page)
            self._slots[group][first : first + self._page_size] = [fake_model.mix(page, 0xDEAD)] * self._page_size

    def _check(self, plan: StepPlan) -> None:
        count = len(plan.rows)
        assert plan.step == self._next_step, f"step {plan.step} launched, expected {self._next_step}"
        self._next_step += 1
        assert 0 < count == len(plan.query_lens) == len(plan.kv_lens) == len(plan.samples)
        assert len(set(plan.rows.tolist())) == count, "a row appears twice"
        assert (plan.query_lens >= 1).all()
        assert (plan.query_lens[: plan.num_decode] == 1).all()
        assert plan.num_tokens == plan.query_lens.sum()
        assert (plan.tokens[: plan.num_decode] == LAST_TOKEN).all()
        assert plan.tokens.min() >= DRAFT
        assert plan.tokens.max() < self._spec.vocab_size
        drafts = np.flatnonzero(plan.tokens == DRAFT)
        assert (plan.tokens[drafts - 1] < 0).all(), "a draft behind a token of the plan"
        assert self._spec.max_samples > 1 or not len(drafts), "the runner was not asked to draft"
        self._check_texts(plan, drafts)
        self._check_pooled(plan)
        if plan.masked is not None:
            assert plan.masked.any(), "a step in two parts for nobody"
            assert plan.samples[plan.masked].all(), "a mask for a sequence that does not sample"
            ends = np.cumsum(plan.query_lens)[plan.masked] - 1
            assert (plan.tokens[ends] != DRAFT).all(), "a masked sequence with drafts"
        assert plan.length_on_device is None or self._spec.max_samples > 1, "the runner was not asked to learn lengths"
        assert plan.num_tokens <= self._spec.token_budget, f"{plan.num_tokens} tokens in one step"
        on_ranks = np.bincount(plan.rows // self._spec.rows_of_rank, plan.query_lens)
        assert on_ranks.max() <= self._spec.rank_tokens, f"{on_ranks.max()} tokens in one step of a rank"
        assert plan.samples[: plan.num_decode].all()
        assert int(plan.kv_lens.max()) <= self._spec.max_context
        assert len(plan.page_deltas) == len(self._tables)
        for deltas in plan.page_deltas:
            keys = set(zip(deltas.rows.tolist(), deltas.columns.tolist(), strict=True))
            assert len(keys) == len(deltas.pages), "a page-table entry appears twice"
            assert (deltas.pages > 0).all(), "the pad page was handed out"
        for copies in plan.copies:
            assert copies.pool in self._states, "a copy in a pool without states"
            targets = set(copies.targets.tolist())
            assert len(targets) == len(copies.targets) == len(copies.sources), "a slot is copied to twice"
            assert not targets & set(copies.sources.tolist()), "a slot is copied from and to"

    def _check_pooled(self, plan: StepPlan) -> None:
        self._lengths_of_prompts |= {update.row: update.prompt_len for update in plan.row_updates.sampling}
        asked = [part.sequence for part in plan.pooled]
        assert asked == sorted(set(asked)), "a sequence is asked twice, or out of order"
        assert all(plan.num_decode <= each < len(plan.rows) for each in asked), "a sequence that is no chunk is pooled"
        assert all((part.token_ids is None) == (self._spec.pooling is not None) for part in plan.pooled)
        if self._spec.pooling is None:
            return
        assert not plan.samples.any(), "a runner that pools was asked for a sample"
        starts = plan.kv_lens - plan.query_lens
        if self._spec.whole_prompts:
            lengths = [self._lengths_of_prompts[row] for row in plan.rows.tolist()]
            assert plan.query_lens.tolist() == lengths, "a prompt that is computed whole was cut"
        if self._spec.pooling is Pooling.MEAN:
            assert asked == list(range(len(plan.rows))), "a chunk without its part of the mean"
        if self._spec.pooling is Pooling.CLS:
            assert asked == np.flatnonzero(starts == 0).tolist(), "another chunk than that with the first token"

    def _check_texts(self, plan: StepPlan, drafts: NDArray[np.intp]) -> None:
        for update in plan.row_updates.sampling:
            self._texts.discard(update.row)
        self._texts.update(update.row for update in plan.row_updates.texts)
        hinted = {update.row for update in plan.row_updates.hints}
        assert self._texts.issuperset(hinted), "a row without a text has a hint"
        drafting = np.searchsorted(np.cumsum(plan.query_lens), drafts, side="right")
        assert self._texts.issuperset(plan.rows[drafting].tolist()), "a row drafts without a text"

    def _run(self, plan: StepPlan, begin: list[int], masks: TokenMasks | None) -> StepResult:
        choices = self._choices(plan, masks)
        for update in plan.row_updates.sampling:
            self._rows[update.row] = update
        for table, deltas in zip(self._tables, plan.page_deltas, strict=True):
            table[deltas.rows, deltas.columns] = deltas.pages
        self._copy(plan)
        tokens = np.full((len(plan.rows), self._spec.max_samples), INVALID_TOKEN, np.int32)
        counts = np.zeros(len(plan.rows), np.int32)
        seen_after: list[list[int]] = []
        first = 0
        for index, row in enumerate(plan.rows.tolist()):
            length = int(plan.query_lens[index])
            queries, first = plan.tokens[first : first + length].tolist(), first + length
            seen, sampled = self._forward(row, self._start(plan, index), queries, begin[index], choices[index])
            seen_after.append(seen)
            if plan.samples[index]:
                counts[index] = len(sampled)
                tokens[index, : len(sampled)] = sampled
                self._last_token[row] = sampled[-1]
                self._kv_lens[row] += len(sampled) - 1
        return StepResult(
            tokens,
            counts,
            None if plan.top_logprobs == NO_LOGPROBS else self._logprobs(plan, tokens, seen_after),
            tuple(self._prompt_logprobs(asked, plan, seen_after) for asked in plan.prompt_logprobs),
            tuple(self._pooled(asked, seen_after[asked.sequence]) for asked in plan.pooled),
        )

    def _choices(self, plan: StepPlan, masks: TokenMasks | None) -> list[Sequence[int]]:
        choices: list[Sequence[int]] = [range(self._spec.vocab_size)] * len(plan.rows)
        if plan.masked is not None and masks is not None:
            for words, index in zip(masks.words, np.flatnonzero(plan.masked).tolist(), strict=True):
                choices[index] = allowed_tokens(words).tolist()
        return choices

    def _copy(self, plan: StepPlan) -> None:
        for copies in plan.copies:
            slots = set(self._tables[copies.pool][plan.rows, 0].tolist())
            assert slots.issuperset(copies.targets.tolist()), "a copy to a slot that no row of the step has"
            states = self._states[copies.pool]
            for source, target in zip(copies.sources.tolist(), copies.targets.tolist(), strict=True):
                states[target] = states[source]

    def _start(self, plan: StepPlan, index: int) -> int:
        row, length = int(plan.rows[index]), int(plan.query_lens[index])
        start = int(plan.kv_lens[index]) - length
        if plan.length_on_device is not None and plan.length_on_device[index]:
            assert self._kv_lens[row] <= start, f"row {row} is at {self._kv_lens[row]}, the plan says at most {start}"
            return int(self._kv_lens[row])
        return start

    def _slot(self, group: int, row: int, position: int) -> int:
        page = int(self._tables[group][row, position // self._page_size])
        return self._first_of(group, row // self._spec.rows_of_rank, page) + position % self._page_size

    def _first_of(self, group: int, rank: int, page: int) -> int:
        """The first slot of a page, whose number is that of its rank."""
        return (rank * self._spec.pools[group].num_pages + page) * self._page_size

    def _forward(
        self, row: int, start: int, tokens: list[int], begin: int, choice: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Computes tokens at positions from `start`. Returns the hash that each of their queries sees, starting from
        `begin`, and the row's sample of `choice` after each. Drafts are not part of the row yet."""
        written: dict[int, list[int]] = {group: [] for group in self._states}

        def read(group: int, place: int) -> int:
            if group in written:
                return written[group][place - start]
            return self._slots[group][self._slot(group, row, place)]

        sight = fake_model.Sight(self._windows, begin, read, start, self._begin_states(row, start, begin))
        seen: list[int] = []
        after: list[dict[int, int]] = []
        sampled: list[int] = []
        committed = start + len(tokens) - tokens.count(DRAFT)
        wrong = False
        for position, token in enumerate(tokens, start):
            if token == LAST_TOKEN:
                assert self._kv_lens[row] == start, f"row {row} ended at {self._kv_lens[row]} and goes on at {start}"
                token = int(self._last_token[row])
            elif token == DRAFT:
                token = self._guess(seen[-1], sampled[-1])
                wrong = wrong or token != sampled[-1]
            value = fake_model.write(sight.of(position, position), token, position)
            for group, slots in enumerate(self._slots):
                if group in written:
                    written[group].append(fake_model.content(value, group))
                else:
                    slots[self._slot(group, row, position)] = fake_model.content(value, group)
            seen.append(sight.of(position, position + 1))
            after.append({group: sight.state(group) for group in self._states})
            if position >= committed - 1 and not wrong:
                sampled.append(self._sample(row, seen[-1], token, choice))
        if self._spec.whole_prompts:
            assert start == 0, "a prompt that is computed whole was cut"
            end = start + len(tokens)
            seen = [fake_model.from_place(sight.of(position, end), position) for position in range(start, end)]
        self._kv_lens[row] = committed
        kept = self._kept_tokens(len(tokens), tokens.count(DRAFT), len(sampled))
        for group, states in self._states.items():
            states[self._tables[group][row, 0]] = after[kept - 1][group]
        return seen, sampled

    @staticmethod
    def _kept_tokens(tokens: int, drafts: int, sampled: int) -> int:
        """How many of a sequence's tokens belong to the row after `sampled` samples: the last sample is of the token
        after them."""
        return tokens - drafts + max(sampled - 1, 0)

    def _begin_states(self, row: int, start: int, begin: int) -> dict[int, int]:
        return {
            group: begin if start == 0 or begin == fake_model.NOT_FINITE else states[self._tables[group][row, 0]]
            for group, states in self._states.items()
        }

    def _sample(self, row: int, seen: int, token: int, choice: Sequence[int]) -> int:
        state = self._rows.get(row)
        if state is None or seen == fake_model.NOT_FINITE or token == self._invalid_token:
            return INVALID_TOKEN
        return fake_model.sample(seen, state.seed, state.prompt_len, choice)

    def _guess(self, seen: int, sampled: int) -> int:
        """A draft for `sampled`: right half of the time, and never after logits that are not finite."""
        if sampled != INVALID_TOKEN and fake_model.mix(seen, 0xD4AF7) & 64:
            return sampled
        return (sampled + 1) % self._spec.vocab_size

    def _logprobs(self, plan: StepPlan, tokens: Int32, seen_after: list[list[int]]) -> TopLogprobs:
        """Logprobs of each entry of `tokens` `[n, width]`; entries without a sample are arbitrary."""
        width = tokens.shape[1]
        drafts = np.add.reduceat(plan.tokens == DRAFT, np.cumsum(plan.query_lens) - plan.query_lens).tolist()
        seen: list[int] = []
        for queries, count in zip(seen_after, drafts, strict=True):
            seen += (queries[-1 - count :] + [0] * width)[:width]
        return _report(seen, tokens.reshape(-1), plan.top_logprobs)

    def _pooled(self, asked: PooledPart, seen: list[int]) -> Float64:
        if asked.token_ids is not None:
            return np.array([fake_model.logprob(seen[-1], token) for token in asked.token_ids.tolist()])
        assert self._spec.pooling is not None, "a vector from a runner that samples"
        return fake_model.pooled(seen, self._spec.pooling, self._spec.pooled_width)

    def _prompt_logprobs(self, asked: PromptLogprobs, plan: StepPlan, seen_after: list[list[int]]) -> TopLogprobs:
        seen = seen_after[asked.sequence][asked.first : asked.first + len(asked.targets)]
        return _report(seen, asked.targets, plan.prompt_top_logprobs)


def _report(seen: list[int], tokens: Int32, count: int) -> TopLogprobs:
    logprobs = [fake_model.logprob(each, token) for each, token in zip(seen, tokens.tolist(), strict=True)]
    return TopLogprobs(
        np.array(logprobs, np.float32),
        np.tile(np.arange(count, dtype=np.int32), (len(seen), 1)),
        np.zeros((len(seen), count), np.float32),
    )

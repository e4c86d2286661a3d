"""The data that scheduler and runner exchange. A plan is immutable and owns its arrays: the scheduler never writes to
them again, so a runner may read them until it has returned the result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures import CacheKind
from sglang_jax.architectures.pooling import Pooling
from sglang_jax.sampling.params import SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

LOGPROB_BUCKETS = (0, 1, 5, 20)
"""Numbers of alternatives that a step may report; a step uses the smallest that is enough for its rows."""

NO_LOGPROBS = -1
INVALID_TOKEN = -1
"""The sample of a row whose logits were not finite."""

LAST_TOKEN = -1
"""In `StepPlan.tokens`: the token that the row sampled last, on the device; the host may not have it yet."""

MASK_WORD = 32
"""Tokens per word of a mask."""

SUM_STEP = 2.0**-18
"""The unit of sums of hidden states. Sums over 2**22 tokens are exact in float64."""

MAX_SUMMED = 2.0**12
"""Hidden states of this size or above are not summed: their sum is NaN."""

DRAFT = -2
"""In `StepPlan.tokens`, after a `LAST_TOKEN`: the runner's draft of the row's next token, if `RunnerSpec.max_samples`
is above 1."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The KV pages of one cache group of the model (`architectures.CacheGroup` has its layers), or of its draft model
    (`draft`). `name`: unique in a runner. `num_pages` includes the pad page 0, which is never allocated. `window`:
    tokens that a query attends to, its own included; None for all.

    In a pool of kind `state`, pages are slots: each has the states of the group's layers after some number of a row's
    tokens. Its `page_size` is that of the other pools, because states are shared at the ends of pages."""

    name: str
    kind: CacheKind
    num_pages: int
    page_size: int
    window: int | None = None
    draft: bool = False

    def __post_init__(self) -> None:
        wrong = self.window is None or self.window < 1 if self.kind is CacheKind.WINDOW else self.window is not None
        if wrong:
            raise ValueError(f"a pool of kind {self.kind} has a window of {self.window} tokens")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"pages of {self.page_size} tokens; it must be a power of two")

    def columns(self, max_context: int) -> int:
        """Columns of its page table, for rows of at most `max_context` tokens."""
        return 1 if self.kind.keeps_states else -(-max_context // self.page_size)


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The limits and properties of a runner, which never change.

    - `max_rows`: rows of the page table, and so the maximum number of running requests; `max_context`: maximum tokens
      per row.
    - `token_budget`: maximum tokens (decode rows + prefill chunks) per step; `prompt_tokens`: default maximum of the
      chunks.
    - `mixed_shapes`: (tokens, rows) of the programs for steps with chunks, smallest first; a step costs as much as the
      first one that it fits in. Empty for a runner without padding.
    - `max_samples`: maximum tokens that a row samples in one step; above 1 for a runner with drafts.
    - `drafts_with_prompts`: a step may have both drafts and chunks. If False, decode rows plus drafts of a step are at
      most `max_rows`.
    - `max_drafts`: maximum drafts of one step, in all rows; None if only the other limits apply.
    - `pooling`: the runner gives vectors of prompts, `pooled_width` numbers each, or scores of as many labels; no plan
      samples. None for a runner that samples.
    - `whole_prompts`: a query sees all tokens of its prompt, so a sequence is a whole prompt.
    - `dp_ranks`: ranks that divide rows among them, in runs of the same length: each computes the attention of its
      rows, at most `rank_tokens` tokens a step, and has separate pools of `num_pages` pages.
    """

    pools: tuple[PoolSpec, ...]
    max_rows: int
    token_budget: int
    max_context: int
    vocab_size: int
    mixed_shapes: tuple[tuple[int, int], ...] = ()
    max_samples: int = 1
    drafts_with_prompts: bool = True
    max_drafts: int | None = None
    prompt_tokens: int = 512
    pooling: Pooling | None = None
    pooled_width: int = 0
    whole_prompts: bool = False
    dp_ranks: int = 1

    def __post_init__(self) -> None:
        if len({pool.name for pool in self.pools}) < len(self.pools):
            raise ValueError(f"pools named {', '.join(pool.name for pool in self.pools)}: names must differ")

    def check_ranks(self) -> None:
        """Raises `ValueError` if rows cannot be divided among its ranks."""
        for name, number in (("max_rows", self.max_rows), ("token_budget", self.token_budget)):
            if number % self.dp_ranks:
                raise ValueError(f"{name} {number} cannot be divided among {self.dp_ranks} ranks")
        kept = [pool.name for pool in self.pools if pool.kind.keeps_states]
        if kept or self.max_samples > 1 or self.pooling is not None:
            what = f"states ({kept[0]})" if kept else "drafts" if self.max_samples > 1 else "pooling"
            raise ValueError(f"{self.dp_ranks} ranks cannot divide rows with {what}")

    @property
    def rows_of_rank(self) -> int:
        return self.max_rows // self.dp_ranks

    @property
    def rank_tokens(self) -> int:
        """Maximum tokens of a step on one rank."""
        return self.token_budget // self.dp_ranks

    @property
    def max_pages_per_row(self) -> int:
        """Columns of each page table, except those of states."""
        return -(-self.max_context // self.pools[0].page_size)

    @property
    def table_columns(self) -> int:
        return sum(pool.columns(self.max_context) for pool in self.pools)

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the first pool with pages holds, on all ranks; slots times the maximum context if there are only
        states."""
        pool = next((pool for pool in self.pools if not pool.kind.keeps_states), self.pools[0])
        tokens = self.max_context if pool.kind.keeps_states else pool.page_size
        return (pool.num_pages - 1) * tokens * self.dp_ranks


@dataclass(frozen=True, slots=True)
class PageDeltas:
    """Entries of one page table to overwrite before the step runs: `table[rows[i], columns[i]] = pages[i]`, all
    `[deltas]`. A (row, column) pair appears at most once."""

    rows: Int32
    columns: Int32
    pages: Int32

    def __getitem__(self, part: slice) -> PageDeltas:
        return PageDeltas(self.rows[part], self.columns[part], self.pages[part])


@dataclass(frozen=True, slots=True)
class SlotCopies:
    """Copies in pool `pool`, one of states: after the previous step has run, and before this step writes anything, slot
    `sources[i]` is copied to `targets[i]`, both `[copies]`. Targets are the slots of rows of the plan, after its
    deltas. Each occurs once, and none is a source, so a runner may also start a row's sequence from the source and
    write its last state to the target."""

    pool: int
    sources: Int32
    targets: Int32


@dataclass(frozen=True, slots=True)
class SamplingUpdate:
    """The sampling of a row from now on, for a request that was admitted, or again after a retraction.

    - `seed`: resolved, non-negative, below 2**63.
    - `prompt_len`: tokens before the first output token; output number k is sampled at `kv_len == prompt_len + k`.
    - `stop_ids`: `[ids]`, masked while fewer than `sampling.min_new_tokens` outputs were sampled.
    - `history`: `[tokens]` prompt and kept output, given only if `sampling.counts_tokens`. The runner counts later
      samples.
    """

    row: int
    sampling: SamplingParams
    seed: int
    prompt_len: int
    stop_ids: Int32
    history: Int32 | None


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The text of a row's new request, from which the runner drafts: `tokens` `[tokens]`, prompt and kept output. The
    runner adds tokens that are sampled later."""

    row: int
    tokens: Int32


HINT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HintUpdate:
    """A second source of a row's drafts: `tokens` `[tokens]`, at most `HINT_TOKENS`, with which another text continued
    after the same tokens as at the end of the row's text. It replaces the row's hint; a new text removes the hint."""

    row: int
    tokens: Int32


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """Changes of rows before a step runs, by kind; the kinds are independent. `texts`, and `hints`, which apply after
    them, are only for runners with a `RunnerSpec.max_samples` above 1."""

    sampling: tuple[SamplingUpdate, ...] = ()
    texts: tuple[TextUpdate, ...] = ()
    hints: tuple[HintUpdate, ...] = ()


NO_UPDATES = RowUpdates()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Requested logprobs of prompt tokens within one prefill chunk: query `first + i` of sequence `sequence` (an index
    into `StepPlan.rows`) predicts `targets[i]`."""

    sequence: int
    first: int
    targets: Int32


@dataclass(frozen=True, slots=True)
class PooledPart:
    """What is wanted of sequence `sequence` (an index into `StepPlan.rows`), a chunk of a prompt.

    - `token_ids`: `[ids]`, whose logprobs after its last query are wanted. None for a runner with `RunnerSpec.pooling`:
      this chunk's part of the prompt's vector.
    """

    sequence: int
    token_ids: Int32 | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step over `n` sequences, each in a separate row; decode rows come first.

    - `step`: counts up by one; plans are executed in this order. `rows`: `[n]`.
    - `num_decode`: the first `num_decode` sequences have one query each, `LAST_TOKEN`, and sample.
    - `query_lens`: `[n]` >= 1; `kv_lens`: `[n]` KV length after this step has written. Query i of a sequence is at
      position `kv_len - query_len + i` and attends to every key at or before its own position.
    - `tokens`: `[sum(query_lens)]`, the source of each query's token: an id, `LAST_TOKEN` or `DRAFT`.
    - `samples`: `[n]` True if the sequence samples a token after its last query; False for a chunk that does not end
      its prompt, or whose request only scores the prompt. The token sampled last becomes the row's last token.
    - `length_on_device`: `[n]` True if the sequence continues where the row's previous step ends, which only the device
      knows while that step is in flight; `kv_lens` is then the maximum. None if this applies to no sequence. Only with
      a `RunnerSpec.max_samples` above 1. A sequence with drafts samples after its last token and after each correct
      draft, up to the first wrong one.
    - `masked`: `[n]` True if the sequence samples under a mask; such a sequence has no drafts. The step then runs in
      two parts: `Runner.launch` starts the forward pass, and `StepHandle.sample`, which supplies the masks, samples for
      all sequences. None if no sequence is masked; the step then has one part.
    - `page_deltas`: one for each pool of the spec. In a pool with a window, only the entries that the step's queries
      attend to are valid; earlier ones may name pages that belong to other rows by now. In a pool of states, column 0
      is the row's slot: its sequence continues from the state there, and writes the state after its last token, or
      after the last correct draft, to it. A sequence whose first query is at position 0 starts without a state,
      whatever is in the slot.
    - `top_logprobs`: `NO_LOGPROBS`, or one of `LOGPROB_BUCKETS`: alternatives reported with the sampled token's
      logprob.
    - `pooled`: at most one for each sequence, in order. With a pooling of the last token, the last chunk of a prompt;
      of the first token, the chunk with it; of the mean, every chunk.
    """

    step: int
    rows: Int32
    num_decode: int
    query_lens: Int32
    kv_lens: Int32
    tokens: Int32
    samples: Bool
    page_deltas: tuple[PageDeltas, ...]
    copies: tuple[SlotCopies, ...] = ()
    length_on_device: Bool | None = None
    masked: Bool | None = None
    row_updates: RowUpdates = NO_UPDATES
    top_logprobs: int = NO_LOGPROBS
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    prompt_top_logprobs: int = 0
    pooled: tuple[PooledPart, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def place_of(self, wanted: PromptLogprobs) -> int:
        """The place in `tokens` of the first query that predicts one of the `wanted` tokens."""
        return int(self.query_lens[: wanted.sequence].sum()) + wanted.first


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the masked sequences of a step may sample. `words`: int32 `[masked, mask_words(vocab_size)]`, in the
    order of the plan's sequences, never written to again; bit `t % 32` of word `t // 32` is set if token t may be
    sampled. Each mask allows at least one token."""

    words: Int32


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_WORD)


def allowed_tokens(words: Int32) -> Int32:
    """Ids of the tokens that a mask `[words]` allows."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Logprobs `[m]` of m tokens under the raw logits; ids and logprobs of the k most likely tokens at each of the m
    positions, `[m, k]`, most likely first."""

    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled.

    - `tokens`: `[n, width]`, `counts`: `[n]`: sequence i sampled `tokens[i, :counts[i]]`, and nothing if not
      `plan.samples`. If logits were not finite, the last of them is `INVALID_TOKEN`. `width` is at most the runner's
      `max_samples`.
    - `logprobs`: None unless requested; m = n * width, entry `i * width + j` belongs to `tokens[i, j]`.
    - `prompt_logprobs`: one for each of the plan's, in order.
    - `pooled`: for each of the plan's, in order: the logprobs of its tokens `[ids]`, or its part of a vector
      `[pooled_width]`. For a mean, this is the sum over its queries, each rounded to a multiple of `SUM_STEP`, and
      exact: the parts of a prompt add up to the same number, whatever its chunks were.
    - `replayed`: whether the model ran as one captured CUDA graph.
    """

    tokens: Int32
    counts: Int32
    logprobs: TopLogprobs | None = None
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    pooled: tuple[Float64, ...] = ()
    replayed: bool = False


def one_each(tokens: Int32, samples: Bool) -> tuple[Int32, Int32]:
    """`tokens` and `counts` of a result in which each row with `samples` `[n]` sampled its one token of `tokens`
    `[n]`."""
    return tokens[:, None], samples.astype(np.int32)


def check_plan(plan: StepPlan, spec: RunnerSpec, *, states: bool) -> None:
    """Raises `ValueError` for a plan that a runner with `spec` does not run. `states`: it has recurrent states."""
    if spec.max_samples == 1:
        _refuse_drafts(plan)
    _check_pooled(plan, spec)
    if states:
        _refuse_drafts_of_states(plan, spec)
    else:
        _refuse_states(plan)
    if spec.dp_ranks > 1:
        _check_parts(plan, spec)
    _check_page_bounds(plan, spec)


def _check_parts(plan: StepPlan, spec: RunnerSpec) -> None:
    """Raises `ValueError` for a plan with more tokens of one rank than fit into its part of a step: the program would
    leave some out."""
    tokens = np.bincount(plan.rows // spec.rows_of_rank, plan.query_lens).astype(np.int64)
    most = int(tokens.argmax())
    if tokens[most] > spec.rank_tokens:
        raise ValueError(
            f"step {plan.step} has {tokens[most]} tokens of rank {most}, which computes at most {spec.rank_tokens}"
        )


def _check_pooled(plan: StepPlan, spec: RunnerSpec) -> None:
    """Raises `ValueError` for a plan that samples on a runner that pools, or the reverse."""
    if spec.whole_prompts and (plan.kv_lens != plan.query_lens).any():
        raise ValueError(f"step {plan.step} has a part of a prompt, which this runner computes whole")
    if spec.pooling is not None and (plan.num_decode or plan.samples.any()):
        raise ValueError(f"step {plan.step} samples, but this runner gives vectors of prompts")
    for part in plan.pooled:
        if (part.token_ids is None) != (spec.pooling is not None):
            gives = "logprobs" if spec.pooling is None else "vectors"
            raise ValueError(
                f"step {plan.step} asks sequence {part.sequence} for what this runner does not give: it "
                f"gives {gives} of prompts"
            )
        if part.token_ids is not None and _outside(part.token_ids, spec.vocab_size):
            raise ValueError(
                f"step {plan.step} asks for logprobs of tokens {part.token_ids.tolist()}: the vocabulary has "
                f"{spec.vocab_size}"
            )


def _refuse_states(plan: StepPlan) -> None:
    """Raises `ValueError` for a plan that copies states: for runners without recurrent states."""
    if plan.copies:
        raise ValueError(f"step {plan.step} copies states, but this runner has no recurrent states")


def _refuse_drafts(plan: StepPlan) -> None:
    """Raises `ValueError` for a plan with drafts, or with rows that learn their length on the device: for runners
    without drafts, where the host knows every length."""
    if plan.length_on_device is not None or int(plan.tokens.min()) < LAST_TOKEN:
        raise ValueError(f"step {plan.step} has drafts, or rows after drafts: this runner samples one token a row")


def _refuse_drafts_of_states(plan: StepPlan, spec: RunnerSpec) -> None:
    """Raises `ValueError` for a plan with more drafts than the `spec.max_drafts` slots for them, or with drafts
    alongside prompts: for runners with recurrent states."""
    drafts = int(np.count_nonzero(plan.tokens == DRAFT))
    if drafts > (spec.max_drafts or 0):
        slots = spec.max_drafts or 0
        raise ValueError(f"step {plan.step} has {drafts} drafts, but there are only {slots} slots for their states")
    if drafts and int(plan.tokens.max()) >= 0:
        raise ValueError(f"step {plan.step} has drafts alongside prompts: their states would be lost")


def _check_page_bounds(plan: StepPlan, spec: RunnerSpec) -> None:
    """Raises `ValueError` if a page or slot is outside its pool, or a row longer than its page table. On a device, such
    a fault would end the process without an error."""
    for deltas, pool in zip(plan.page_deltas, spec.pools, strict=True):
        if _outside(deltas.pages, pool.num_pages):
            first = int(np.argmax(deltas.pages.view(np.uint32) >= pool.num_pages))
            raise ValueError(
                f"step {plan.step} gives row {deltas.rows[first]} page {deltas.pages[first]} in column "
                f"{deltas.columns[first]} of page table {pool.name}: its pool has pages 0 to {pool.num_pages - 1}"
            )
    for copies in plan.copies:
        pool = spec.pools[copies.pool]
        for places in (copies.sources, copies.targets):
            if _outside(places, pool.num_pages):
                raise ValueError(
                    f"step {plan.step} copies states between slots {copies.sources.tolist()} and "
                    f"{copies.targets.tolist()}: pool {pool.name} has slots 0 to {pool.num_pages - 1}"
                )
    most = spec.max_pages_per_row * spec.pools[0].page_size
    if _outside(plan.kv_lens, most + 1):
        first = int(np.argmax(plan.kv_lens.view(np.uint32) > most))
        raise ValueError(
            f"step {plan.step} has {plan.kv_lens[first]} tokens in row {plan.rows[first]}: a row of the page table "
            f"holds at most {most}"
        )


def _outside(numbers: Int32, end: int) -> bool:
    """Whether any number is not in `[0, end)`. As unsigned numbers, negative ones are larger than all others."""
    return numbers.size > 0 and int(numbers.view(np.uint32).max()) >= end

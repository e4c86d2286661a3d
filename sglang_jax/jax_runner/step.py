"""The step program: page-table deltas, forward pass, logits, sampling and bookkeeping in one computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.jax_runner.drafts import DraftedTokens, KnownTokens, Sequences, kept_samples
from sglang_jax.jax_runner.logprobs import Logprobs, prompt_logprobs
from sglang_jax.jax_runner.packing import SampleLayout, StepInputs, StepLayout
from sglang_jax.jax_runner.readers import LogitsReader, Masks, reader_over
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.layers.batch import ForwardBatch, GroupPages, SequenceRanks
from sglang_jax.layers.part import States
from sglang_jax.layers.pooler import sums_of_sequences
from sglang_jax.runner.drafts import REJECTED, FlatPlan
from sglang_jax.runner.packing import pack_rows
from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from sglang_jax.runner.plan import INVALID_TOKEN, NO_LOGPROBS, Int32, RunnerSpec

Weights = list[jax.Array]
KVCaches = Any
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelFunctions:
    """A model as functions `forward(weights, batch, kv) -> (hidden [T, hidden], kv)` and `logits(weights, hidden [m,
    hidden]) -> float32 [m, columns]`, whose columns past the vocabulary are padding. `tile_rows`: rows of logprobs, see
    `in_tiles`. `shards_on_device`: see `kv_cache_spec`. `pooling`:
    `logits` returns vectors or scores of texts, `[m, width]`."""

    forward: Callable[[Weights, ForwardBatch, KVCaches], tuple[jax.Array, KVCaches]]
    logits: Callable[[Weights, jax.Array], jax.Array]
    tile_rows: int | None = None
    shards_on_device: int = 1
    pooling: Pooling | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """The state that steps change. A program takes the parts that it changes donated, and returns them. There is one
    more row than the runner offers, the dump row, to which padding writes.

    - `kv`: KV pages or states of every layer.
    - `page_table`: int32 `[rows + 1, columns]`, for all cache groups (see `TableLayout`); the dump row has page 0 only.
    - `last_tokens`: int32 `[rows + 1]`, the last sample of each row.
    - `known`: the rows' texts, if steps have drafts. `drafted`: the drafts of a draft model, if there is one.
    """

    kv: KVCaches
    page_table: jax.Array
    last_tokens: jax.Array
    sampling: SamplingState
    known: KnownTokens | None = None
    drafted: DraftedTokens | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledState:
    """The part of `DeviceState` that sampling changes."""

    last_tokens: jax.Array
    sampling: SamplingState
    known: KnownTokens | None = None
    drafted: DraftedTokens | None = None

    @classmethod
    def of(cls, state: DeviceState) -> SampledState:
        return cls(state.last_tokens, state.sampling, state.known, state.drafted)

    def inputs_of(self, flags: jax.Array, rows: jax.Array, kv_lens: jax.Array) -> Sequences:
        last_tokens = self.last_tokens[rows]
        if self.known is None:
            return Sequences(flags > 0, kv_lens, last_tokens, None)
        return Sequences.with_drafts(flags, rows, kv_lens, last_tokens, self.known, self.drafted)

    def after(
        self, sequences: Sequences, rows: jax.Array, tokens: jax.Array, max_drafts: int
    ) -> tuple[SampledState, jax.Array]:
        """The state after the sequences of a step have sampled `tokens` `[R]`; and the tokens for the host."""
        samples, for_host, last = sequences.samples, tokens, sequences.samples
        known, drafted = self.known, self.drafted
        if known is not None and sequences.draft_numbers is not None:
            kept, last = kept_samples(sequences.draft_numbers, sequences.own, tokens, max_drafts)
            for_host = jnp.where(kept | ~samples, tokens, REJECTED)
            samples, last = samples & kept, samples & last
            known = known.append(rows, sequences.kv_lens, tokens, samples)
            known = known.set_accepted(rows, sequences.draft_numbers, last)
            drafted = None if drafted is None else drafted.up_to(known)
        sampled = samples & (tokens != INVALID_TOKEN) & self.sampling.penalised[rows]
        state = SampledState(
            last_tokens=_set_last_tokens(self.last_tokens, rows, tokens, last, known is not None),
            sampling=self.sampling.count(rows, tokens, sampled),
            known=known,
            drafted=drafted,
        )
        return state, for_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceOutputs:
    """The outputs of a step: `tokens` int32 `[R]`, `REJECTED` after a rejected draft, and logprobs of these and of
    prompt tokens (`[R]` and `[T]`), zeros if the plan asks for none; `prompt_logprobs` is None in a decode program.
    `logits`: `[R, columns]`, after the last query of each sequence, from which the second part of a step samples; of a
    model with a pooler, vectors or scores of the sequences, `[R, width]`, or sums as of `sums_of_sequences`."""

    tokens: jax.Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs | None
    logits: jax.Array


EmptyRows = tuple[jax.Array, jax.Array, SamplingState, KnownTokens | None, DraftedTokens | None]


def empty_rows(spec: RunnerSpec, placement: NamedSharding | None, *, drafted: bool = False) -> EmptyRows:
    """Empty page table, last tokens, sampling state, texts (if steps have drafts) and drafts (if a draft model makes
    them), with the dump row, replicated on every device of every node."""

    def make() -> EmptyRows:
        rows = spec.max_rows + 1
        page_table = jnp.zeros((rows, spec.table_columns), jnp.int32)
        known = KnownTokens.empty(rows, spec.max_context) if spec.max_samples > 1 else None
        drafted_tokens = DraftedTokens.empty(rows, spec.max_samples - 1) if drafted else None
        return page_table, jnp.zeros(rows, jnp.int32), SamplingState.empty(rows, spec.vocab_size), known, drafted_tokens

    return jax.jit(make, out_shardings=placement)()


def apply_deltas(page_table: jax.Array, rows: jax.Array, columns: jax.Array, pages: jax.Array) -> jax.Array:
    return page_table.at[rows, columns].set(pages)


def build_batch(
    inputs: StepInputs,
    page_table: jax.Array,
    own: jax.Array,
    page_size: int,
    num_slots: int,
    table: TableLayout = ONE_GROUP,
    draft_numbers: jax.Array | None = None,
) -> ForwardBatch:
    """The forward batch of `num_slots` (T) tokens, with the position and the KV slot of each. `own` `[R]`: the token of
    each decode sequence; `draft_numbers`: as in `Sequences`."""
    places = jnp.arange(num_slots, dtype=jnp.int32)
    if inputs.tokens.shape[0] == 0:
        sequences, tokens = places, own
        positions = inputs.kv_lens - 1
    else:
        ends = inputs.query_starts[1:]
        sequences = jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)
        sequences = jnp.minimum(sequences, inputs.rows.shape[0] - 1)
        positions = inputs.kv_lens[sequences] - (ends[sequences] - places)
        tokens = jnp.where(inputs.tokens < 0, own[sequences], inputs.tokens)
    real = places < inputs.num_tokens
    positions = jnp.where(real, positions, 0)

    def pages_of(own_pages: jax.Array) -> GroupPages:
        pages = own_pages[sequences, positions // page_size]
        return GroupPages(jnp.where(real, pages * page_size + positions % page_size, 0), own_pages)

    own_table = page_table[inputs.rows]
    states = None
    if table.slots is not None:
        slots = own_table[:, table.slots]
        states = _state_rows(inputs, slots, sequences, places, table.first_draft_slot, draft_numbers)
    # If all layers keep states, there are no pages, and none are read.
    tables = [own_table[:, first:last] for first, last in table.paged] or [jnp.zeros_like(inputs.rows)[:, None]]
    first, *further = map(pages_of, tables)
    # A row whose logits were not finite has no token; its request ends when the host finds out. Neither has a draft
    # without a draft.
    tokens = jnp.where(real & (tokens >= 0), tokens, 0)
    return ForwardBatch(
        tokens=tokens,
        positions=positions,
        write_slots=first.write_slots,
        page_table=first.page_table,
        kv_lens=inputs.kv_lens,
        query_starts=inputs.query_starts,
        num_decode=inputs.num_decode,
        further=tuple(further),
        states=states,
        ranks=None
        if table.ranks is None
        else SequenceRanks(inputs.rows // table.ranks.rows, table.ranks.rows, table.ranks.tokens),
    )


def _state_rows(
    inputs: StepInputs,
    slots: jax.Array,
    sequences: jax.Array,
    places: jax.Array,
    first_draft_slot: int,
    draft_numbers: jax.Array | None,
) -> StateRows:
    """The places of the sequences' states; `slots` `[R]`: of their rows."""
    # Targets are the sequences' own slots. Starting from the source instead costs nothing, unlike a copy.
    copied = slots[:, None] == inputs.copy_targets
    begin = jnp.where(copied.any(1), jnp.where(copied, inputs.copy_sources, 0).sum(1), slots)
    decode_only, own = inputs.tokens.shape[0] == 0, slots
    drafts = draft_numbers if decode_only else None  # steps with prompts have none
    if drafts is not None:
        own = jnp.where(drafts > 0, first_draft_slot - 1 + jnp.cumsum(drafts > 0), slots)
    return StateRows(
        begin=begin,
        fresh=inputs.kv_lens <= jnp.diff(inputs.query_starts),
        own=own,
        sequences=sequences,
        offsets=places - inputs.query_starts[sequences],
        query_starts=inputs.query_starts,
        num_decode=inputs.num_decode,
        decode_only=decode_only,
        drafts=drafts,
    )


def make_step(
    model: ModelFunctions,
    layout: StepLayout,
    page_size: int,
    mesh: Mesh | None = None,
    table: TableLayout = ONE_GROUP,
    max_drafts: int = 0,
) -> Callable[[Weights, DeviceState, jax.Array], tuple[DeviceState, DeviceOutputs]]:
    """The step of one bucket as a function of (weights, state, packed plan); donate the state. `max_drafts`: maximum
    drafts of a row, above 0 if the state has the rows' texts.

    The logits are an output for steps with a second part. For others they only cost memory, as the sampler reads them
    from there anyway.
    """
    if model.pooling is not None:
        return _make_pooling_step(model, model.pooling, layout, page_size, mesh, table)
    bucket = layout.bucket
    reader = reader_over(mesh, model.tile_rows)
    replicate = on_every_device(mesh)

    def step(weights: Weights, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, DeviceOutputs]:
        vocab_size = state.sampling.vocab_size

        def to_logprobs(hidden: jax.Array, tokens: jax.Array, alternatives: jax.Array) -> Logprobs:
            return reader.logprobs(model.logits(weights, hidden), tokens, alternatives, vocab_size)

        inputs = replicate(layout.unpack(packed))
        page_table = apply_deltas(state.page_table, inputs.delta_rows, inputs.delta_columns, inputs.delta_pages)
        before = SampledState.of(state)
        sequences = before.inputs_of(inputs.flags, inputs.rows, inputs.kv_lens)
        inputs = replace(inputs, kv_lens=sequences.kv_lens)
        batch = build_batch(inputs, page_table, sequences.own, page_size, bucket.tokens, table, sequences.draft_numbers)
        batch = replicate(batch)
        hidden, kv = model.forward(weights, batch, state.kv)
        before = replace(before, drafted=_computed_with(before.drafted, inputs, bucket))
        last_hidden = hidden if bucket.decode_only else hidden[jnp.maximum(inputs.query_starts[1:] - 1, 0)]
        logits = model.logits(weights, last_hidden)
        with jax.named_scope("sample"):
            tokens = reader.sample(logits, state.sampling, inputs.rows, inputs.kv_lens, sequences.samples)
        sampled, for_host = before.after(sequences, inputs.rows, tokens, max_drafts)
        new_state = DeviceState(kv, page_table, sampled.last_tokens, sampled.sampling, sampled.known, sampled.drafted)
        logprobs = _logprobs_of(reader, logits, tokens, inputs.top_logprobs, vocab_size)
        of_prompts = None
        if not bucket.decode_only:
            targets, alternatives = inputs.prompt_targets, inputs.prompt_top_logprobs
            of_prompts = prompt_logprobs(hidden, targets, alternatives, inputs.num_tokens, to_logprobs, vocab_size)
        return new_state, DeviceOutputs(for_host, logprobs, of_prompts, logits)

    return step


def _make_pooling_step(
    model: ModelFunctions,
    pooling: Pooling,
    layout: StepLayout,
    page_size: int,
    mesh: Mesh | None,
    table: TableLayout,
) -> Callable[[Weights, DeviceState, jax.Array], tuple[DeviceState, DeviceOutputs]]:
    """The step of a model with a pooler: no sequence samples."""
    bucket = layout.bucket
    replicate = on_every_device(mesh)

    def step(weights: Weights, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, DeviceOutputs]:
        inputs = replicate(layout.unpack(packed))
        page_table = apply_deltas(state.page_table, inputs.delta_rows, inputs.delta_columns, inputs.delta_pages)
        own = state.last_tokens[inputs.rows]
        batch = replicate(build_batch(inputs, page_table, own, page_size, bucket.tokens, table))
        hidden, kv = model.forward(weights, batch, state.kv)
        starts, ends = inputs.query_starts[:-1], inputs.query_starts[1:]
        match pooling:
            case Pooling.LAST:
                pooled = model.logits(weights, hidden[jnp.maximum(ends - 1, 0)])
            case Pooling.CLS:
                pooled = model.logits(weights, hidden[jnp.minimum(starts, bucket.tokens - 1)])
            case Pooling.MEAN:
                places, rows = jnp.arange(bucket.tokens, dtype=jnp.int32), bucket.rows
                sequences = jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)
                sequences = jnp.where(places < inputs.num_tokens, sequences, rows)
                pooled = sums_of_sequences(hidden, sequences, rows)
        tokens = jnp.full(bucket.rows, INVALID_TOKEN, jnp.int32)
        nothing = Logprobs.empty(1, state.sampling.vocab_size)
        return replace(state, kv=kv, page_table=page_table), DeviceOutputs(tokens, nothing, None, pooled)

    return step


def make_token_scores(vocab_size: int, mesh: Mesh | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of (logits `[R, columns]`, token ids int32 `[R, MAX_SCORED_TOKENS]`) that returns their
    logprobs float32 `[R, MAX_SCORED_TOKENS]`."""
    replicate = on_every_device(mesh)

    def scores(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
        real = jnp.arange(logits.shape[1]) < vocab_size
        normaliser = jax.nn.logsumexp(jnp.where(real, logits, -jnp.inf), axis=-1, keepdims=True)
        return replicate(jnp.take_along_axis(logits, replicate(token_ids), axis=1) - normaliser)

    return scores


def _computed_with(drafted: DraftedTokens | None, inputs: StepInputs, bucket: Bucket) -> DraftedTokens | None:
    """Notes that a step with chunks has computed the draft model, too."""
    if drafted is None or bucket.decode_only:
        return drafted
    chunks = jnp.arange(inputs.rows.shape[0]) >= inputs.num_decode
    starts = inputs.kv_lens - jnp.diff(inputs.query_starts)
    return drafted.computed_with(inputs.rows, starts, inputs.kv_lens, chunks)


def make_sample(
    layout: SampleLayout, mesh: Mesh | None = None, max_drafts: int = 0, tile_rows: int | None = None
) -> Callable[[SampledState, jax.Array, jax.Array, jax.Array], tuple[SampledState, tuple[jax.Array, Logprobs]]]:
    """The second part of a step with masks, as a function of (state, logits `[R, columns]`, the first part's tokens
    `[R]`, which show the logits that are not finite, packed plan and masks); donate the state. Returns tokens and
    logprobs as in `DeviceOutputs`. `tile_rows`: see `ModelFunctions`."""
    reader = reader_over(mesh, tile_rows)
    replicate = on_every_device(mesh)

    def sample(
        state: SampledState, logits: jax.Array, first: jax.Array, packed: jax.Array
    ) -> tuple[SampledState, tuple[jax.Array, Logprobs]]:
        inputs = replicate(layout.unpack(packed))
        sequences = state.inputs_of(inputs.flags, inputs.rows, inputs.kv_lens)
        masks = Masks(inputs.masks, first != INVALID_TOKEN)
        tokens = reader.sample(logits, state.sampling, inputs.rows, sequences.kv_lens, sequences.samples, masks)
        new_state, for_host = state.after(sequences, inputs.rows, tokens, max_drafts)
        logprobs = _logprobs_of(reader, logits, tokens, inputs.top_logprobs, state.sampling.vocab_size)
        return new_state, (for_host, logprobs)

    return sample


def _logprobs_of(
    reader: LogitsReader, logits: jax.Array, tokens: jax.Array, alternatives: jax.Array, vocab_size: int
) -> Logprobs:
    return lax.cond(
        alternatives != NO_LOGPROBS,
        lambda: reader.logprobs(logits, tokens, alternatives, vocab_size),
        lambda: Logprobs.empty(len(tokens), vocab_size),
    )


def make_settle(
    dump_row: int, slots: int, shards_on_device: int = 1
) -> Callable[[list[States], jax.Array, jax.Array, jax.Array], list[States]]:
    """A function of (pools of states, donated, page table, `KnownTokens.accepted`, packed rows) to run after a step
    with drafts: it copies the state after each row's last accepted draft to the row's slot. `slots`: the page table's
    column of slots; `packed`: see `pack_settled`; `shards_on_device`: see `kv_cache_spec`."""

    def settle(states: list[States], page_table: jax.Array, accepted: jax.Array, packed: jax.Array) -> list[States]:
        rows, first_drafts = packed
        own, accepted = page_table[rows, slots], accepted[rows]
        sources = jnp.where(accepted > 0, first_drafts + accepted - 1, own)

        def one(number: jax.Array, states: list[States]) -> list[States]:
            def move(pool: jax.Array) -> jax.Array:
                for first in range(0, len(pool), len(pool) // shards_on_device):
                    state = lax.dynamic_slice_in_dim(pool, first + sources[number], 1)
                    pool = lax.dynamic_update_slice_in_dim(pool, state, first + own[number], 0)
                return pool

            return jax.tree.map(move, states)

        return lax.fori_loop(0, jnp.count_nonzero(rows != dump_row), one, states)

    return settle


def pack_settled(flat: FlatPlan, size: int, pad_row: int, first_draft_slot: int) -> Int32:
    """The rows of a plan with drafts, and the slot of the state after the first draft of each: int32 `[2, size]`.
    Unused entries have row `pad_row`."""
    firsts = flat.draft_numbers == 1
    slots = first_draft_slot - 1 + np.cumsum(flat.draft_numbers > 0)
    return pack_rows(size, pad_row, flat.plan.rows[firsts], slots[firsts])


def on_every_device(mesh: Mesh | None) -> Callable[[T], T]:
    """Replicates small arrays on every device. Otherwise the compiler may shard them, and with them everything computed
    from them: the rows of a batch, and so the residual stream."""
    if mesh is None:
        return lambda arrays: arrays
    sharding = NamedSharding(mesh, PartitionSpec())
    return partial(lax.with_sharding_constraint, shardings=sharding)


def _set_last_tokens(
    last_tokens: jax.Array, rows: jax.Array, tokens: jax.Array, samples: jax.Array, repeated: bool
) -> jax.Array:
    """The last tokens after a step: rows that sampled get their new token (padding writes to the dump row). `repeated`:
    whether a row may occur several times in `rows`, at most one of which samples."""
    if repeated:
        return last_tokens.at[jnp.where(samples, rows, last_tokens.shape[0] - 1)].set(tokens)
    return last_tokens.at[rows].set(jnp.where(samples, tokens, last_tokens[rows]))

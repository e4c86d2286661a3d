"""Drafts tokens with a draft model, on the device: see `runner.draft_model`.

A draft is sampled like the token that it predicts: with the row's parameters, and the noise of its position. So models
with similar distributions sample the same tokens at any temperature (Leviathan et al. 2023 accept at random; here,
equal samples are accepted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from sglang_jax.jax_runner.drafts import DraftedTokens, KnownTokens
from sglang_jax.jax_runner.packing import StepInputs
from sglang_jax.jax_runner.readers import reader_over
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.jax_runner.step import KVCaches, ModelFunctions, Weights, build_batch, on_every_device
from sglang_jax.layers.batch import ForwardBatch, GroupPages
from sglang_jax.runner.page_tables import TableLayout
from sglang_jax.runner.plan import DRAFT, INVALID_TOKEN

CATCH_UP_TOKENS = (16, 128)
"""Sizes of the programs that compute tokens which the draft model has missed."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The functions of a draft model. Its weights and its layers' memory are last in the runner's lists for both
    models.

    - `groups`: indices of its cache groups among those with pages of both models.
    - `num_weights`, `num_layers`: number of its entries in the lists.
    - `windows`: of its cache groups, None for groups that see all tokens.
    """

    functions: ModelFunctions
    groups: tuple[int, ...]
    num_weights: int
    num_layers: int
    windows: tuple[int | None, ...]

    def forward(
        self, weights: Weights, batch: ForwardBatch, kv: KVCaches, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCaches]:
        """Computes a batch that has the pages of both models. `lengths` int32 `[T]`: each token's row's length, to
        compute tokens far before the end: KV before windows is then not written, since other rows may own those pages
        by now."""
        pages = (GroupPages(batch.write_slots, batch.page_table), *batch.further)

        def kept(group: GroupPages, window: int | None) -> GroupPages:
            if lengths is None or window is None:
                return group
            return replace(group, write_slots=jnp.where(batch.positions >= lengths - window, group.write_slots, 0))

        own_pages = zip([pages[group] for group in self.groups], self.windows, strict=True)
        first, *further = [kept(group, window) for group, window in own_pages]
        own = replace(batch, write_slots=first.write_slots, page_table=first.page_table, further=tuple(further))
        hidden, kv = self.functions.forward(weights, own, kv)
        return hidden, tuple(kv)

    def own(self, weights: Weights) -> Weights:
        return weights[len(weights) - self.num_weights :]

    def split(self, kv: KVCaches) -> tuple[KVCaches, KVCaches]:
        """The memory of the model's layers, and of the draft model's."""
        first = len(kv) - self.num_layers
        return tuple(kv[:first]), tuple(kv[first:])

    def combined_with(self, model: ModelFunctions) -> ModelFunctions:
        """`model` together with the draft model, which also computes steps with chunks."""

        def forward(weights: Weights, batch: ForwardBatch, kv: KVCaches) -> tuple[jax.Array, KVCaches]:
            models, drafts = self.split(kv)
            hidden, models = model.forward(weights[: len(weights) - self.num_weights], batch, models)
            if batch.tokens.shape[0] != batch.kv_lens.shape[0]:
                _, drafts = self.forward(self.own(weights), batch, drafts)
            return hidden, (*models, *drafts)

        def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
            return model.logits(weights[: len(weights) - self.num_weights], hidden)

        return replace(model, forward=forward, logits=logits)


class DraftState(NamedTuple):
    """The state that the draft model's programs change: donated, and returned."""

    kv: KVCaches
    drafted: DraftedTokens


class RowState(NamedTuple):
    page_table: jax.Array
    known: KnownTokens
    sampling: SamplingState


Draft = Callable[[Weights, DraftState, RowState, jax.Array], DraftState]


def make_draft(draft: DraftModel, rows: int, page_size: int, mesh: Mesh | None, table: TableLayout) -> Draft:
    """A function of (weights, `DraftState`, `RowState`, packed) that drafts the next samples of up to `rows` rows.
    `packed`: the rows, and their numbers of drafts (see `pack_rows`). Its loop runs once per draft of the row with the
    most."""
    reader, replicate = reader_over(mesh), on_every_device(mesh)

    def run(weights: Weights, state: DraftState, row_state: RowState, packed: jax.Array) -> DraftState:
        own, counts = replicate((packed[0], packed[1]))
        dump_row = row_state.page_table.shape[0] - 1
        lengths = row_state.known.lengths[own]
        most = state.drafted.tokens.shape[1]

        def forward(
            row_ids: jax.Array, kv_lens: jax.Array, tokens: jax.Array, real: jax.Array, kv: KVCaches
        ) -> tuple[jax.Array, KVCaches]:
            row_ids, kv_lens = jnp.where(real, row_ids, dump_row), jnp.where(real, kv_lens, 1)
            inputs = _decode_inputs(row_ids, kv_lens)
            batch = build_batch(inputs, row_state.page_table, tokens, page_size, len(row_ids), table)
            return draft.forward(weights, replicate(batch), kv)

        def sample(hidden: jax.Array, kv_lens: jax.Array, real: jax.Array) -> jax.Array:
            logits = draft.functions.logits(weights, hidden)
            tokens = reader.sample(logits, row_state.sampling, own, kv_lens, real)
            return jnp.where(tokens == INVALID_TOKEN, DRAFT, tokens)

        def draft_next(number: jax.Array, carry: tuple[KVCaches, jax.Array]) -> tuple[KVCaches, jax.Array]:
            kv, found = carry
            real = counts > number
            before = lax.dynamic_index_in_dim(found, number - 1, 1, keepdims=False)
            hidden, kv = forward(own, lengths + number, before, real, kv)
            tokens = sample(hidden, lengths + number, real)
            return kv, lax.dynamic_update_index_in_dim(found, tokens, number, 1)

        # The first of the last two tokens is computed if it was missed: see `AT_ONCE`.
        active = counts > 0
        places = jnp.maximum(jnp.concatenate((lengths - 2, lengths - 1)), 0)
        missed = active & (state.drafted.lengths[own] < lengths - 1)
        last_two = row_state.known.tokens[jnp.tile(own, 2), places]
        hidden, kv = forward(jnp.tile(own, 2), places + 1, last_two, jnp.concatenate((missed, active)), state.kv)
        found = jnp.full((rows, most), DRAFT, jnp.int32).at[:, 0].set(sample(hidden[rows:], lengths, active))
        kv, found = lax.fori_loop(1, jnp.max(counts), draft_next, (kv, found))
        drafted = state.drafted
        computed = jnp.where(active, lengths + counts - 1, 0)
        return DraftState(kv, DraftedTokens(drafted.tokens.at[own].set(found), drafted.lengths.at[own].set(computed)))

    return run


def make_catch_up(draft: DraftModel, tokens: int, page_size: int, mesh: Mesh | None, table: TableLayout) -> Draft:
    """Like `make_draft`, computes up to `tokens` tokens that the draft model has missed. `packed`: rows, how many
    tokens before the end of each to stop, and how many to compute."""
    replicate = on_every_device(mesh)

    def run(weights: Weights, state: DraftState, row_state: RowState, packed: jax.Array) -> DraftState:
        rows, backs, counts = replicate((packed[0], packed[1], packed[2]))
        drafted = state.drafted
        ends = row_state.known.lengths[rows] - backs
        starts = jnp.clip(drafted.lengths[rows], ends - counts, ends)
        query_ends = jnp.cumsum(jnp.where(counts > 0, ends - starts, 0))
        inputs = replace(
            _decode_inputs(rows, jnp.where(counts > 0, ends, 0)),
            num_decode=jnp.zeros((), jnp.int32),
            num_tokens=query_ends[-1],
            query_starts=jnp.concatenate((jnp.zeros(1, jnp.int32), query_ends)),
        )
        places = jnp.arange(tokens, dtype=jnp.int32)
        sequences = jnp.searchsorted(query_ends, places, side="right", method="compare_all")
        sequences = jnp.minimum(sequences, len(rows) - 1)
        positions = jnp.maximum(inputs.kv_lens[sequences] - (query_ends[sequences] - places), 0)
        text = row_state.known.tokens[rows[sequences], positions]
        batch = build_batch(replace(inputs, tokens=text), row_state.page_table, text, page_size, tokens, table)
        _, kv = draft.forward(weights, replicate(batch), state.kv, row_state.known.lengths[rows[sequences]])
        computed = jnp.where(counts > 0, jnp.maximum(ends, drafted.lengths[rows]), 0)
        return DraftState(kv, replace(drafted, lengths=drafted.lengths.at[rows].set(computed)))

    return run


def _decode_inputs(rows: jax.Array, kv_lens: jax.Array) -> StepInputs:
    """The inputs of a step with one token of each of `rows` `[R]`."""
    nothing, number = jnp.zeros(0, jnp.int32), jnp.asarray(rows.shape[0], jnp.int32)
    return StepInputs(
        num_decode=number,
        num_tokens=number,
        top_logprobs=number,
        prompt_top_logprobs=number,
        rows=rows,
        kv_lens=kv_lens,
        flags=nothing,
        query_starts=jnp.arange(rows.shape[0] + 1, dtype=jnp.int32),
        delta_rows=nothing,
        delta_columns=nothing,
        delta_pages=nothing,
        tokens=nothing,
        prompt_targets=nothing,
        copy_sources=nothing,
        copy_targets=nothing,
    )

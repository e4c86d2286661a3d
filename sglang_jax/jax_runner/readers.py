"""Reads a step's logits, for sampling and logprobs, on one device or several.

With several devices, the head and its logits are sharded by the vocabulary. Operations that pass over the vocabulary
many times would need a sum over devices per pass, so each device gets some lines whole for these. All of this is
explicit per device (`shard_map`). If the compiler chose the sharding, it would also shard the inputs of the logits by
lines, up to the model's residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.jax_runner.logprobs import Logprobs, token_logprobs
from sglang_jax.jax_runner.packing import unpack_all, unpack_masks
from sglang_jax.jax_runner.sampler import (
    LineMasks,
    LineNeeds,
    adjust_and_sample,
    are_finite,
    first_argmax,
    largest_logit,
    only_finite,
    sample,
)
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.layers.sharding import TENSOR, parallelism_of

T = TypeVar("T")


class Masks(NamedTuple):
    """Masks of lines, int32 `[n, words]` (see `TokenMasks`), and whether their logits are finite (see `LineMasks`)."""

    words: jax.Array
    finite: jax.Array


class LogitsReader(Protocol):
    """Reads logits float32 `[n, columns]`; columns past the vocabulary are padding."""

    def sample(
        self,
        logits: jax.Array,
        state: SamplingState,
        rows: jax.Array,
        kv_lens: jax.Array,
        active: jax.Array,
        masks: Masks | None = None,
    ) -> jax.Array:
        """See `sampler.sample`. `masks`: None to allow all tokens."""
        ...

    def logprobs(self, logits: jax.Array, tokens: jax.Array, alternatives: jax.Array, vocab_size: int) -> Logprobs: ...


def reader_over(mesh: Mesh | None, tile_rows: int | None = None) -> LogitsReader:
    """`tile_rows`: of logprobs, see `in_tiles`."""
    if mesh is None or parallelism_of(mesh).devices == 1:
        return WholeLogits(tile_rows)
    return ShardedLogits(mesh, tile_rows)


def logits_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of the logits of a head that is sharded over `mesh`."""
    return NamedSharding(mesh, PartitionSpec(None, TENSOR))


class WholeLogits:
    def __init__(self, tile_rows: int | None = None) -> None:
        self._tile_rows = tile_rows

    def sample(
        self,
        logits: jax.Array,
        state: SamplingState,
        rows: jax.Array,
        kv_lens: jax.Array,
        active: jax.Array,
        masks: Masks | None = None,
    ) -> jax.Array:
        masked = None if masks is None else LineMasks(unpack_all(masks.words, state.vocab_size), masks.finite)
        return sample(logits[:, : state.vocab_size], state, rows, kv_lens, active, masked)

    def logprobs(self, logits: jax.Array, tokens: jax.Array, alternatives: jax.Array, vocab_size: int) -> Logprobs:
        return token_logprobs(logits[:, :vocab_size], tokens, alternatives, self._tile_rows)


class ShardedLogits:
    """The reader on several devices with equal shares of the columns. Other arguments and all results are
    replicated."""

    def __init__(self, mesh: Mesh, tile_rows: int | None = None) -> None:
        self._mesh, self._tile_rows = mesh, tile_rows
        self._devices = parallelism_of(mesh).devices

    def sample(
        self,
        logits: jax.Array,
        state: SamplingState,
        rows: jax.Array,
        kv_lens: jax.Array,
        active: jax.Array,
        masks: Masks | None = None,
    ) -> jax.Array:
        def run(
            columns: jax.Array,
            state: SamplingState,
            rows: jax.Array,
            kv_lens: jax.Array,
            active: jax.Array,
            masks: Masks | None,
        ) -> jax.Array:
            own = state.select(rows)
            needs = LineNeeds.of(own, kv_lens, active, state.vocab_size)
            if masks is not None:
                tokens_here = lax.axis_index(TENSOR) * columns.shape[1] + jnp.arange(columns.shape[1], dtype=jnp.int32)
                columns = jnp.where(unpack_masks(masks.words, tokens_here), columns, -jnp.inf)
            largest, least, greedy_tokens = _extremes(columns, state.vocab_size)
            finite = are_finite(largest, least) if masks is None else masks.finite

            def randomly() -> jax.Array:
                lines = _Lines(columns.shape[0], self._devices)
                small = replace(own, occurrences=own.temperature, stop_ids=own.temperature)
                mine, needs_here, rows_here, kv_lens_here = lines.mine((small, needs, rows, kv_lens))
                mine = replace(mine, occurrences=own.occurrences, stop_ids=own.stop_ids)
                whole = lines.exchange(columns)[:, : state.vocab_size]
                return lines.gather(adjust_and_sample(whole, mine, needs_here, rows_here, kv_lens_here))

            tokens = lax.cond(needs.anything(), randomly, lambda: greedy_tokens)
            return only_finite(tokens, finite, state.vocab_size)

        return self._on_each(run, 5)(logits, state, rows, kv_lens, active, masks)

    def logprobs(self, logits: jax.Array, tokens: jax.Array, alternatives: jax.Array, vocab_size: int) -> Logprobs:
        def run(columns: jax.Array, tokens: jax.Array, alternatives: jax.Array) -> Logprobs:
            lines = _Lines(columns.shape[0], self._devices)
            whole = lines.exchange(columns)[:, :vocab_size]
            return lines.gather(token_logprobs(whole, lines.mine(tokens), alternatives, self._tile_rows))

        return self._on_each(run, 2)(logits, tokens, alternatives)

    def _on_each(self, run: Callable[..., T], others: int) -> Callable[..., T]:
        """Runs `run` on each device with its columns, the first argument, and `others` more, which are replicated."""
        whole = PartitionSpec()
        specs = (PartitionSpec(None, TENSOR), *[whole] * others)
        return jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=whole, check_vma=False)


class _Lines:
    """`count` lines divided among devices, with padding. For use on each device."""

    def __init__(self, count: int, devices: int) -> None:
        self._count = count
        self._own = -(-count // devices)
        self._padding = self._own * devices - count

    def mine(self, arrays: T) -> T:
        """This device's lines of replicated arrays `[count, ...]`."""
        first = lax.axis_index(TENSOR) * self._own
        return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(self._filled(array), first, self._own), arrays)

    def exchange(self, columns: jax.Array) -> jax.Array:
        """Exchanges this device's columns of all lines for all columns of its lines."""
        return lax.all_to_all(self._filled(columns), TENSOR, split_axis=0, concat_axis=1, tiled=True)

    def gather(self, arrays: T) -> T:
        """Gathers the lines of all devices: `[count, ...]`."""
        return jax.tree.map(lambda array: lax.all_gather(array, TENSOR, tiled=True)[: self._count], arrays)

    def _filled(self, array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, self._padding), *[(0, 0)] * (array.ndim - 1)))


def _extremes(columns: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest and the smallest logit of each line over all devices, and the first token with the largest, as by
    `first_argmax`. Exchanges three numbers per line."""
    width = columns.shape[1]
    first = lax.axis_index(TENSOR) * width
    upper = lower = columns
    if width * lax.axis_size(TENSOR) > vocab_size:
        real = first + jnp.arange(width, dtype=jnp.int32) < vocab_size
        upper, lower = jnp.where(real, columns, -jnp.inf), jnp.where(real, columns, jnp.inf)
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    own = jnp.stack([bits(largest_logit(upper)), bits(jnp.min(lower, axis=-1)), first + first_argmax(upper)])
    every = lax.all_gather(own, TENSOR)
    largest, least = (lax.bitcast_convert_type(every[:, part], jnp.float32) for part in (0, 1))
    whole = jnp.max(largest, axis=0)
    tokens = jnp.min(jnp.where(largest == whole, every[:, 2], vocab_size), axis=0)
    return whole, jnp.min(least, axis=0), tokens

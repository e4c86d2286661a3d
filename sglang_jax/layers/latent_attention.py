"""Latent attention over paged latent vectors, in two forms.

Absorbed: a score `(W_k c) . q`, of a token's latent vector c, a head's key projection W_k and its query q, equals `c .
(W_k^T q)`. So attention sees one KV head for all query heads. Its keys are the latent vectors with the rotated keys
after them, and its values the latent vectors, to which the heads' value projections are applied afterwards. Decode rows
and short chunks use this form, and on TPUs all rows do.

Expanded: keys and values of heads are computed from the cached vectors. With many queries this takes fewer products, so
rows with at least twice `LatentAttentionConfig.expands_from` tokens of their own use it. The forms round differently:
see docs/architecture/models.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, AttentionOptions, expanded_attention
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttention, CpuLatents, LatentForm
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.attention import write_and_attend
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import Norm
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions, RotaryTables
from sglang_jax.layers.ranks import on_each_rank
from sglang_jax.layers.rotary import apply_rotary

_TOKENS_PER_BLOCK = 64
_TIMES_LIMIT = 2
"""Rows are expanded from this multiple of `expands_from` tokens. XLA's CPU backend multiplies the small matrices of
heads at about two thirds of the rate of the large ones of latent vectors (for DeepSeek-V2-Lite on an EPYC, 60 and 90
billion multiply-adds per second), so 256 tokens take as long in either form, while 171 take as many products."""


class LatentAttention(nnx.Module):
    """Projections to latent vectors, cache write, attention, values, output projection."""

    def __init__(self, config: LatentAttentionConfig, options: PartOptions) -> None:
        dtype, self.implementation = options.dtype, options.implementation
        self.config = config
        self.kernels = options.cpu_attention(LatentForm(config.num_heads, config.latent, config.rotary_dim))
        inputs = hidden = [(Axis.HIDDEN, options.hidden_size)]
        of_heads = Axis.HEADS if options.dp_ranks == 1 else Axis.WHOLE_HEADS
        latent, heads = [(Axis.LATENT, config.latent)], (of_heads, config.num_heads)
        keys, rotated, values = (
            [heads, (Axis.HEAD_DIM, size)] for size in (config.key_dim, config.rotary_dim, config.value_dim)
        )
        two_steps, query = config.query_latent is not None, Part.QUERY
        if config.query_latent is not None:
            inputs, query = [(Axis.LATENT, config.query_latent)], Part.QUERY_UP
        down = Linear(hidden, inputs, (Part.QUERY_LATENT,), options, bias=config.bias) if two_steps else None
        self.query_latent = down
        self.query_latent_norm = Norm(inputs, config.norm, dtype, Part.QUERY_LATENT_NORM) if two_steps else None
        self.query = Linear(inputs, keys, (query,), options)
        self.query_rotated = Linear(inputs, rotated, (Part.QUERY_ROTATED,), options)
        self.latent = Linear(hidden, latent, (Part.LATENT,), options, bias=config.bias)
        self.latent_norm = Norm(latent, config.norm, dtype, Part.LATENT_NORM)
        self.key_rotated = Linear(hidden, rotated[1:], (Part.KEY_ROTATED,), options, bias=config.bias)
        self.key_up = parameter([*keys, *latent], dtype, Part.KEY_UP)
        self.value_up = parameter([*values, *latent], dtype, Part.VALUE_UP)
        self.output = Linear(values, hidden, (Part.OUTPUT,), options, bias=config.out_bias)

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """See `LayerPart`. Writes the step's latent vectors into the pages."""
        assert memory.pages is not None, "a layer with attention"
        if step.batch.own is not None:
            return self._on_each_rank(x, step, memory)
        tile_rows = self.implementation.tile_rows
        plain, queries, cached = in_tiles(self._inputs, (x, step.rotary), tile_rows)
        values, kv_pages = attend_latents(
            self.implementation,
            self.config,
            (plain, queries),
            cached,
            (self.key_up[...], self.value_up[...]),
            memory.pages,
            step.batch,
            self.kernels,
        )
        return in_tiles(self.output, values, tile_rows), replace(memory, pages=kv_pages)

    def _on_each_rank(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        graph, weights = nnx.split(self)

        def attend(
            weights: nnx.State, x: jax.Array, rotary: tuple[jax.Array, ...], pages: jax.Array, batch: ForwardBatch
        ) -> tuple[jax.Array, jax.Array]:
            layer: LatentAttention = nnx.merge(graph, weights)
            tables = (rotary[0], rotary[1]) if rotary else None
            found, own = layer(x, LayerStep(batch, tables), LayerMemory(pages))
            assert own.pages is not None
            return found, own.pages

        assert memory.pages is not None
        assert step.batch.own is not None
        found, pages = on_each_rank(attend, weights, x, step.rotary or (), memory.pages, step.batch.own)
        return found, replace(memory, pages=pages)

    def _inputs(self, tokens: tuple[jax.Array, RotaryTables | None]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries without and with rotation, and what is cached, of tokens `[T, hidden]` with their rotation."""
        x, rotary = tokens
        of_queries = x
        if self.query_latent is not None and self.query_latent_norm is not None:
            of_queries = self.query_latent_norm(self.query_latent(x))
        plain = self.query(of_queries)
        queries, keys = self.query_rotated(of_queries), self.key_rotated(x)[:, None]
        if rotary is not None:
            queries, keys = apply_rotary(queries, *rotary), apply_rotary(keys, *rotary)
        latent = self.latent_norm(self.latent(x))[:, None]
        return plain, queries, jnp.concatenate([latent, keys], axis=-1)


def attend_latents(
    implementation: AttentionImplementation,
    config: LatentAttentionConfig,
    queries: tuple[jax.Array, jax.Array],
    cached: jax.Array,
    up: tuple[jax.Array, jax.Array],
    kv_pages: jax.Array,
    batch: ForwardBatch,
    kernels: CpuAttention | CpuLatents | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stores a step's latent vectors, and computes attention, each row in the form for its length: `[T, heads,
    value_dim]`, and the pages after the write.

    `queries` `[T, heads, key_dim]` and `[T, heads, rotary_dim]`; `cached` `[T, 1, latent + rotary_dim]`; `up`: the
    projections to keys `[heads, key_dim, latent]` and values `[heads, value_dim, latent]`. `kernels`: see
    `write_and_attend`.
    """
    (plain, rotated), (key_up, value_up) = queries, up
    expanded = _expanded_rows(implementation, config, batch)
    needed = None if expanded is None else _tokens_of_others(expanded, batch)
    by_head = partial(_by_head, needed=needed, tile_rows=implementation.tile_rows)
    attended, kv_pages = write_and_attend(
        implementation,
        jnp.concatenate([by_head("thk,hkl->htl", plain, key_up), rotated], axis=-1),
        cached,
        None,
        kv_pages,
        batch,
        scale=config.scale,
        options=AttentionOptions(value_dim=config.latent, unread=expanded),
        kernels=kernels,
    )
    values = by_head("thl,hvl->htv", attended, value_up)
    if expanded is not None:  # each is 0 for rows of the other form
        asked = jnp.concatenate([plain, rotated], axis=-1)
        values += expanded_attention(asked, kv_pages, batch, expanded, key_up, value_up, scale=config.scale)
    return values, kv_pages


def _expanded_rows(
    implementation: AttentionImplementation, config: LatentAttentionConfig, batch: ForwardBatch
) -> jax.Array | None:
    """Rows in the expanded form, bool `[R]`; None if a step of this size has none."""
    if implementation is not AttentionImplementation.XLA or config.expands_from is None:
        return None
    least, tokens = _TIMES_LIMIT * config.expands_from, len(batch.tokens)
    if tokens < least or tokens == len(batch.kv_lens):
        return None
    return batch.query_starts[1:] - batch.query_starts[:-1] >= least


def _tokens_of_others(expanded: jax.Array, batch: ForwardBatch) -> jax.Array:
    """Tokens of rows in the absorbed form, bool `[T]`, without padding."""
    places, ends = jnp.arange(len(batch.tokens)), batch.query_starts[1:]
    return ~expanded[jnp.searchsorted(ends, places, side="right")] & (places < ends[-1])


def _by_head(
    form: str, x: jax.Array, kernel: jax.Array, needed: jax.Array | None = None, tile_rows: int | None = None
) -> jax.Array:
    """A product per head in the dtype of `x`, with float32 sums. `form`: an einsum whose result has heads first; they
    are moved to second place afterwards. With heads second in the einsum, XLA's CPU backend fails for some bfloat16
    products, and takes ten times as long for some in float32. `needed`: bool `[T]`, None for all tokens; blocks without
    needed tokens are skipped, and are 0. `tile_rows`: see `in_tiles`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(x: jax.Array) -> jax.Array:
        narrow = x.astype(kernel.dtype)
        found = jnp.einsum(form, narrow, kernel, precision=precision, preferred_element_type=jnp.float32)
        return found.astype(x.dtype).swapaxes(0, 1)

    if needed is None:
        return in_tiles(product, x, tile_rows)
    blocks = -(-len(x) // _TOKENS_PER_BLOCK)
    behind = blocks * _TOKENS_PER_BLOCK - len(x)
    parts = jnp.pad(x, ((0, behind), (0, 0), (0, 0))).reshape(blocks, _TOKENS_PER_BLOCK, *x.shape[1:])
    some = jnp.pad(needed, (0, behind)).reshape(blocks, -1).any(axis=1)
    skipped = jnp.zeros_like(jax.eval_shape(product, parts[0]))
    found = jax.lax.map(lambda each: jax.lax.cond(each[0], product, lambda _: skipped, each[1]), (some, parts))
    return found.reshape(-1, *found.shape[2:])[: len(x)]

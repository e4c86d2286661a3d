"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.kernels.ragged_paged_attention import (
    AttentionImplementation,
    AttentionOptions,
    plan_writes,
    ragged_paged_attention,
    write_kv,
)
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttention, CpuLatents, HeadForm
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import Norm, divide_by_rms
from sglang_jax.layers.parameter import Sizes, parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions, RotaryTables
from sglang_jax.layers.ranks import divide
from sglang_jax.layers.rotary import apply_rotary, apply_rotary_by_product
from sglang_jax.layers.sharding import KV_AXES, automatic_mesh, partition_spec

_MAX_TOKENS_TOGETHER = 512
"""Maximum tokens of a step that normalises and rotates queries, keys and values together. By libtpu 0.0.51 for v6e,
that takes half the cycles for 64 tokens, as many for 512, and a sixth more for 2,048."""


class Attention(nnx.Module):
    """Projections, optional norms of queries, keys and values, rotation, cache write, attention, output projection. The
    fused projection is `[hidden, kv_heads, group + 2, head_dim]`: for each KV head its queries, its key, its value."""

    def __init__(self, config: AttentionConfig, options: PartOptions) -> None:
        dtype, self.implementation = options.dtype, options.implementation
        self.config = config
        self.group = config.num_heads // config.num_kv_heads
        self.kernels = options.cpu_attention(HeadForm(config.head_dim, self.group))
        hidden = [(Axis.HIDDEN, options.hidden_size)]
        head = (Axis.HEAD_DIM, config.head_dim)
        fused = [(Axis.KV_HEADS, config.num_kv_heads), (Axis.HEAD_PART, self.group + 2), head]
        heads = [(Axis.HEADS, config.num_heads), head]
        self.qkv = Linear(hidden, fused, (Part.QUERY, Part.KEY, Part.VALUE), options, bias=config.bias)
        gated = config.output_gate
        self.gate = Linear(hidden, heads, (Part.OUTPUT_GATE,), options, bias=config.bias) if gated else None
        self.output = Linear(heads, hidden, (Part.OUTPUT,), options, bias=config.out_bias)
        kv_heads = [(Axis.KV_HEADS, config.num_kv_heads), head]
        self.query_norm = _norm_of(config.qk_norm, heads, dtype, Part.QUERY_NORM)
        self.key_norm = _norm_of(config.qk_norm, kv_heads, dtype, Part.KEY_NORM)
        whole = config.qk_norm is not None and config.qk_norm.whole
        self.together = options.implementation.for_tpu and not options.implementation.fixed and not whole
        one_a_head = [(Axis.HEADS, config.num_heads)]
        self.sinks = parameter(one_a_head, jnp.dtype(jnp.float32), Part.SINKS) if config.sinks else None
        scales = [(Axis.KV_HEADS, config.num_kv_heads), (Axis.KEY_OR_VALUE, 2)]
        scaled, sides = options.kv_dtype is not None and options.kv_dtype.itemsize == 1, (Part.KEY, Part.VALUE)
        self.kv_scales = parameter(scales, jnp.dtype(jnp.float32), *sides, kind=ParameterKind.SCALE) if scaled else None

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """See `LayerPart`. Writes the step's keys and values into the pages."""
        assert memory.pages is not None, "a layer with attention"
        queries, keys, values = in_tiles(self._inputs, (x, step.rotary), self.implementation.tile_rows)
        queries = queries.reshape(x.shape[0], -1, queries.shape[-1])
        attended, kv_pages = write_and_attend(
            self.implementation,
            queries,
            keys,
            values,
            memory.pages,
            step.batch,
            scale=self.config.scale,
            options=self._options(),
            kernels=self.kernels,
        )
        output = in_tiles(self._output, (x, attended), self.implementation.tile_rows)
        return output, replace(memory, pages=kv_pages)

    def _inputs(self, tokens: tuple[jax.Array, RotaryTables | None]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of tokens `[T, hidden]` with their rotation."""
        x, rotary = tokens
        fused = self.qkv(x)
        together = self.together and len(x) <= _MAX_TOKENS_TOGETHER
        queries, keys, values = (self._together if together else self._apart)(fused, rotary)
        if self.config.value_norm is not None:
            values = divide_by_rms(values.astype(jnp.float32), self.config.value_norm.eps).astype(values.dtype)
        return queries, keys, values

    def _output(self, tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The part's output for tokens `[T, hidden]`, and the attention `[T, heads, head_dim]`."""
        x, attended = tokens
        if self.gate is not None:
            gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))
            attended = (attended.astype(jnp.float32) * gate).astype(x.dtype)
        return self.output(attended)

    def _apart(self, fused: jax.Array, rotary: RotaryTables | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the fused projection, with norms and rotation."""
        queries, keys, values = self._parts(fused)
        if self.config.qk_norm is not None and self.config.qk_norm.whole:
            queries = queries.reshape(fused.shape[0], -1, queries.shape[-1])
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rotary is not None:
            queries, keys = apply_rotary(queries, *rotary), apply_rotary(keys, *rotary)
        return queries, keys, values

    def _together(self, fused: jax.Array, rotary: RotaryTables | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`_apart` in half as many operations: normalises and rotates all parts of a KV head together, and then takes
        the values from before. With few rows, each operation takes about a microsecond on a TPU, whatever it does."""
        part = np.arange(self.group + 2)[:, None]
        found = fused
        if self.query_norm is not None and self.key_norm is not None:
            scales = jnp.where(part < self.group, self.query_norm.weight, self.key_norm.weight)
            found = self.query_norm.scaled_by(scales, found, axes=(-1,))
        if rotary is not None:
            found = apply_rotary_by_product(found, *rotary)
        return self._parts(jnp.where(part <= self.group, found, fused))

    def _parts(self, fused: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return fused[:, :, : self.group], fused[:, :, self.group], fused[:, :, self.group + 1]

    def _options(self) -> AttentionOptions:
        return AttentionOptions(
            causal=self.config.causal,
            window=self.config.window,
            soft_cap=self.config.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            kv_scales=None if self.kv_scales is None else self.kv_scales[...],
        )


def _norm_of(config: QKNorm | None, heads: Sizes, dtype: jnp.dtype, part: Part) -> Norm | None:
    """A norm over `heads` (heads, head_dim), or over each head separately."""
    if config is None:
        return None
    return Norm(heads if config.whole else heads[1:], config.norm, dtype, part if config.weight else None)


def with_write_plan(implementation: AttentionImplementation, batch: ForwardBatch, kv_pages: jax.Array) -> ForwardBatch:
    """A cache group's batch with the write plan that all its layers share, of each rank if ranks divide sequences.
    `kv_pages`: of one of them."""
    if batch.ranks is not None:
        return divide(implementation, batch, kv_pages)
    find = partial(plan_writes, implementation, kv_pages)
    mesh = automatic_mesh()
    if implementation.for_tpu and mesh is not None:
        whole = PartitionSpec()
        find = jax.shard_map(find, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return replace(batch, write_plan=find(batch.write_slots))


def write_and_attend(
    implementation: AttentionImplementation,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    kv_pages: jax.Array,
    batch: ForwardBatch,
    *,
    scale: float,
    options: AttentionOptions,
    kernels: CpuAttention | CpuLatents | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stores a step's keys and values, and computes attention (see `ragged_paged_attention`): `[T, heads,
    value_dim or head_dim]`, and the pages after the write. Under a mesh, kernels run on each device for its heads, with
    its shard of the options, since the compiler shards operations but not kernels.

    `queries` `[T, heads, head_dim]`; `keys`, `values` `[T, kv_heads, head_dim]`; `kv_pages`: see `kernels.kv_storage`.
    If `values` is None, they are the keys, which every device has. `kernels`: compute attention instead of
    `implementation`, on one device.
    """

    def run(
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array | None,
        kv_pages: jax.Array,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]:
        slots, plan = batch.write_slots, batch.write_plan
        kv_pages = write_kv(implementation, kv_pages, keys, values, slots, plan=plan, options=options)
        if implementation.for_tpu and not options.causal:
            batch, options = batch.seeing_all(), replace(options, causal=True)
        attend = partial(ragged_paged_attention, implementation) if kernels is None else kernels
        return attend(queries, kv_pages, batch, scale=scale, options=options), kv_pages

    mesh = automatic_mesh()
    if not implementation.for_tpu or mesh is None:
        return run(queries, keys, values, kv_pages, batch, options)
    heads = partition_spec((Axis.TOKENS, Axis.HEADS, Axis.HEAD_DIM))
    kv_heads, pages = partition_spec((Axis.TOKENS, Axis.KV_HEADS, Axis.HEAD_DIM)), partition_spec(KV_AXES)
    if values is None:
        kv_heads = pages = PartitionSpec()
    by_device = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, kv_heads, kv_heads, pages, PartitionSpec(), _option_specs(options)),
        out_specs=(heads, pages),
        check_vma=False,
    )
    return by_device(queries, keys, values, kv_pages, batch, options)


def _option_specs(options: AttentionOptions) -> AttentionOptions:
    """The sharding of each array of the options."""
    return replace(
        options,
        sinks=None if options.sinks is None else partition_spec((Axis.HEADS,)),
        kv_scales=None if options.kv_scales is None else partition_spec((Axis.KV_HEADS, Axis.KEY_OR_VALUE)),
    )

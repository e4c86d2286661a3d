"""Loads checkpoints into models: each device is given its part of each fused parameter, read for it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.checkpoint.reader import Array, TensorReader
from sglang_jax.checkpoint.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, check_tensors
from sglang_jax.layers.attention import Attention
from sglang_jax.layers.feed_forward import FeedForward
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import RMSNorm
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import named_sharding
from sglang_jax.models.transformer import Transformer

Index = tuple[slice, ...]
ReadPart = Callable[[Index], Array]
"""Reads the part of a parameter at an index: one slice for each axis."""


def load_weights(
    model: Transformer, reader: TensorReader, config: ModelConfig, mesh: Mesh, *, kv_copies: int = 1
) -> None:
    """Gives every parameter of `model` its value, of the model's dtype, spread over `mesh` by its axes.

    At any time the host holds no more than the parts of one parameter. `config` is the checkpoint's; a model with
    `kv_copies` as many kv heads has each of the checkpoint's that many times, and one with a larger vocabulary has
    zeros past the checkpoint's.

    Scales of keys and values are not among them: see `kv_scales`.

    **Raises:** `CheckpointError` naming tensors that are missing, extra or misshapen.
    """
    check_tensors(reader, config)
    for parameter, read in _sources(model, _Source(reader, config, kv_copies)):
        _place(parameter, read, mesh)


def _place(parameter: Parameter, read: ReadPart, mesh: Mesh) -> None:
    target = parameter.get_value()

    def part(index: Index) -> np.ndarray:
        # A copy, in order: a view of the file would keep it open, and a transposed one would be read against the grain.
        return np.array(read(index), dtype=target.dtype, order="C")

    parameter.set_value(jax.make_array_from_callback(target.shape, named_sharding(mesh, parameter.axes), part))


def _sources(model: Transformer, source: _Source) -> Iterator[tuple[Parameter, ReadPart]]:
    """Every parameter of the model, with what reads it."""
    yield model.embedding.table, source.padded(source.tensor(EMBEDDING), 0, model.embedding.table.shape)
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}"
        yield layer.attention_norm.scale, source.tensor(f"{prefix}.input_layernorm.weight")
        yield from _attention_sources(layer.attention, source, f"{prefix}.self_attn")
        yield layer.feed_forward_norm.scale, source.tensor(f"{prefix}.post_attention_layernorm.weight")
        yield from _feed_forward_sources(layer.feed_forward, source, f"{prefix}.mlp")
    yield model.final_norm.scale, source.tensor(FINAL_NORM)
    if model.head is not None:
        table = EMBEDDING if source.config.tie_word_embeddings else LM_HEAD
        yield model.head.kernel, source.padded(source.transposed(table), 1, model.head.kernel.shape)


def _attention_sources(layer: Attention, source: _Source, prefix: str) -> Iterator[tuple[Parameter, ReadPart]]:
    yield from _linear_sources(layer.qkv, lambda kind: source.fused_heads(prefix, kind))
    yield layer.output.kernel, source.heads_to_hidden(f"{prefix}.o_proj.weight")
    if layer.output.bias is not None:
        yield layer.output.bias, source.tensor(f"{prefix}.o_proj.bias")
    norms: tuple[tuple[RMSNorm | None, str], ...] = ((layer.query_norm, "q_norm"), (layer.key_norm, "k_norm"))
    for norm, name in norms:
        if norm is not None:
            yield norm.scale, source.tensor(f"{prefix}.{name}.weight")


def _feed_forward_sources(layer: FeedForward, source: _Source, prefix: str) -> Iterator[tuple[Parameter, ReadPart]]:
    yield from _linear_sources(layer.gate_up, lambda kind: source.gate_up(prefix, kind))
    yield layer.down.kernel, source.transposed(f"{prefix}.down_proj.weight")
    if layer.down.bias is not None:
        yield layer.down.bias, source.tensor(f"{prefix}.down_proj.bias")


def _linear_sources(linear: Linear, fused: Callable[[str], ReadPart]) -> Iterator[tuple[Parameter, ReadPart]]:
    yield linear.kernel, fused("weight")
    if linear.bias is not None:
        yield linear.bias, fused("bias")


class _Source:
    """Readers of parameters by their layout in the model; a checkpoint's matrices are [out, in]."""

    def __init__(self, reader: TensorReader, config: ModelConfig, kv_copies: int) -> None:
        self.config = config
        self._reader = reader
        self._kv_copies = kv_copies

    def tensor(self, name: str) -> ReadPart:
        return lambda index: self._reader.read(name, index)

    def transposed(self, name: str) -> ReadPart:
        return lambda index: self._reader.read(name, index[::-1]).T

    def padded(self, read: ReadPart, axis: int, shape: tuple[int, ...]) -> ReadPart:
        """`read` for a parameter of `shape`, whose vocabulary (`axis`) is filled with zeros past the checkpoint's."""
        length = self.config.vocab_size

        def read_padded(index: Index) -> Array:
            first, last, _ = index[axis].indices(shape[axis])
            if last <= length:
                return read(index)
            start = min(first, length - 1)
            found = np.moveaxis(read((*index[:axis], slice(start, length), *index[axis + 1 :])), axis, 0)
            padded = np.zeros((last - first, *found.shape[1:]), found.dtype)
            kept = max(length - first, 0)
            padded[:kept] = found[:kept]
            return np.moveaxis(padded, 0, axis)

        return read_padded

    def gate_up(self, prefix: str, kind: str) -> ReadPart:
        """`[hidden, 2, intermediate]`, or the bias `[2, intermediate]`."""

        def read(index: Index) -> Array:
            *inputs, which, outputs = index
            names = (f"{prefix}.gate_proj.{kind}", f"{prefix}.up_proj.{kind}")[which]
            return np.stack([self._reader.read(name, (outputs, *inputs)).T for name in names], axis=-2)

        return read

    def fused_heads(self, prefix: str, kind: str) -> ReadPart:
        """`[hidden, kv_heads, group + 2, head_dim]`, or the bias without `hidden`."""
        config, copies = self.config, self._kv_copies
        model_heads = config.num_kv_heads * copies
        group = config.num_heads // model_heads

        def read(index: Index) -> Array:
            *inputs, kv_heads, parts, dims = index
            first, last, _ = kv_heads.indices(model_heads)
            queries = self._heads(f"{prefix}.q_proj.{kind}", slice(first * group, last * group), inputs)
            found = [queries.reshape(*queries.shape[:-2], last - first, group, config.head_dim)]
            own = slice(first // copies, (last - 1) // copies + 1)
            chosen = np.arange(first, last) // copies - own.start
            for name in ("k_proj", "v_proj"):
                found.append(self._heads(f"{prefix}.{name}.{kind}", own, inputs)[..., chosen, None, :])
            return np.concatenate(found, axis=-2)[..., parts, dims]

        return read

    def _heads(self, name: str, heads: slice, inputs: list[slice]) -> Array:
        """`[inputs, heads, head_dim]` of a projection, or the bias without `inputs`."""
        head_dim = self.config.head_dim
        tensor = self._reader.read(name, (slice(heads.start * head_dim, heads.stop * head_dim), *inputs))
        return tensor.T.reshape(*tensor.shape[1:], heads.stop - heads.start, head_dim)

    def heads_to_hidden(self, name: str) -> ReadPart:
        """`[heads, head_dim, hidden]`."""
        config = self.config

        def read(index: Index) -> Array:
            heads, dims, outputs = index
            first, last, _ = heads.indices(config.num_heads)
            columns = slice(first * config.head_dim, last * config.head_dim)
            tensor = self._reader.read(name, (outputs, columns))
            return tensor.T.reshape(last - first, config.head_dim, -1)[:, dims]

        return read

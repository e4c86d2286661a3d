"""Loads checkpoints into models: each rank reads its part of each tensor, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sglang_jax.checkpoint import ModelConfig, TensorReader, check_tensors
from sglang_jax.checkpoint.reader import Array
from sglang_jax.checkpoint.tensors import EMBEDDING, FINAL_NORM, LM_HEAD
from torch_backend.layers.attention import Attention
from torch_backend.layers.feed_forward import FeedForward
from torch_backend.layers.linear import Linear
from torch_backend.layers.packed import packing_works
from torch_backend.layers.shard import ModelShard
from torch_backend.models.transformer import Transformer
from torch_backend.parallel import SINGLE, TensorParallel


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of each axis of a checkpoint's tensor, which may be fewer axes than it has."""

    name: str
    index: tuple[slice, ...] = ()


def load_weights(
    model: Transformer,
    reader: TensorReader,
    config: ModelConfig,
    parallel: TensorParallel = SINGLE,
    *,
    pack: bool = True,
) -> None:
    """Gives every parameter of `model` its value, of the model's dtype, on its device.

    At any time the host holds no more than one parameter beside those of a model on the host. On a CPU, matrices are
    then packed (see `Transformer.pack`) where torch can do it, unless `pack` is false.

    **Raises:** `CheckpointError` naming tensors that are missing, extra or misshapen.
    """
    check_tensors(reader, config)
    for module, name, parts in _sources(model, config, ModelShard.of(config, parallel.rank, parallel.size)):
        empty: nn.Parameter = module.get_parameter(name)
        value = _read(reader, parts, empty.shape, empty.dtype).to(model.device)
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    if model.tied:
        model.head.linear.weight = model.embedding.weight
    if pack and _packs(model):
        model.pack()


def weight_bytes(model: Transformer) -> int:
    """Bytes that the weights of `model` take once `load_weights` is done with it; known before."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    # Packed matrices replace plain ones, but for tied embeddings.
    return plain + (model.embedding.weight.nbytes if model.tied and _packs(model) else 0)


def _packs(model: Transformer) -> bool:
    return model.device.type == "cpu" and packing_works(model.embedding.weight.dtype)


def _read(reader: TensorReader, parts: list[Part], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The parts one after the other along the first axis; zeros where they do not reach the end."""
    value = torch.zeros(shape, dtype=dtype)
    target = _as_numpy(value)
    first = 0
    for part in parts:
        found = reader.read(part.name, part.index or None)
        target[first : first + len(found)] = found
        first += len(found)
    return value


def _as_numpy(tensor: torch.Tensor) -> Array:
    """A numpy view of a tensor on the host."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits: NDArray[np.int16] = tensor.view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


_Source = tuple[nn.Module, str, list[Part]]
"""A parameter, by its module and name, and what it is made of."""


def _sources(model: Transformer, config: ModelConfig, shard: ModelShard) -> Iterator[_Source]:
    rows = (_slice(shard.vocabulary),)
    yield model.embedding, "weight", [Part(EMBEDDING, rows)]
    for number, layer in enumerate(model.decoder_layers):
        prefix = f"model.layers.{number}"
        yield layer.attention_norm, "weight", [Part(f"{prefix}.input_layernorm.weight")]
        yield from _attention_sources(layer.attention, config, shard, f"{prefix}.self_attn")
        yield layer.feed_forward_norm, "weight", [Part(f"{prefix}.post_attention_layernorm.weight")]
        yield from _feed_forward_sources(layer.feed_forward, shard, f"{prefix}.mlp")
    yield model.final_norm, "weight", [Part(FINAL_NORM)]
    if not model.tied:
        yield model.head.linear, "weight", [Part(LM_HEAD, rows)]


def _attention_sources(layer: Attention, config: ModelConfig, shard: ModelShard, prefix: str) -> Iterator[_Source]:
    heads, kv_heads = (_slice(part, config.head_dim) for part in (shard.heads, shard.kv_heads))
    names = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    yield from _by_outputs(layer.qkv, {f"{prefix}.{name}": rows for name, rows in names.items()})
    yield from _by_inputs(layer.output, f"{prefix}.o_proj", heads)
    for norm, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if config.qk_norm:
            yield layer, norm, [Part(f"{prefix}.{name}.weight")]


def _feed_forward_sources(layer: FeedForward, shard: ModelShard, prefix: str) -> Iterator[_Source]:
    columns = _slice(shard.intermediate)
    yield from _by_outputs(layer.gate_up, {f"{prefix}.{name}": columns for name in ("gate_proj", "up_proj")})
    yield from _by_inputs(layer.down, f"{prefix}.down_proj", columns)


def _by_outputs(linear: Linear, rows_of: dict[str, slice]) -> Iterator[_Source]:
    """Matrices of which the rank computes some outputs, fused."""
    yield linear, "weight", [Part(f"{name}.weight", (rows,)) for name, rows in rows_of.items()]
    if linear.bias is not None:
        yield linear, "bias", [Part(f"{name}.bias", (rows,)) for name, rows in rows_of.items()]


def _by_inputs(linear: Linear, name: str, columns: slice) -> Iterator[_Source]:
    """A matrix of which the rank multiplies some inputs."""
    yield linear, "weight", [Part(f"{name}.weight", (slice(None), columns))]
    if linear.bias is not None:
        yield linear, "bias", [Part(f"{name}.bias")]


def _slice(part: range, width: int = 1) -> slice:
    return slice(part.start * width, part.stop * width)

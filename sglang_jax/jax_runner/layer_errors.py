"""How much the quantisation of each layer changes what a model predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig, num_paged_groups
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.jax_runner.weights import load_weights, read_parameters
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.layers.batch import ForwardBatch, GroupPages
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, KVCaches, allocate, build_model, kv_cache_spec
from sglang_jax.models.parameters import ModelParameter, parameters_of

_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerError:
    """`layer`: None for all layers together. `divergence`: from the plain model's prediction of the next token, the
    Kullback-Leibler divergence in nats, mean over the tokens of a text."""

    layer: int | None
    divergence: float


def bytes_to_measure(config: ModelConfig) -> int:
    """Bytes of memory that `layer_errors` needs for weights: all in float32, and a layer twice."""
    weights = [sum(math.prod(spec.shape) for spec in manifest_of(config).of_layer(None))]
    weights += [
        sum(math.prod(spec.shape) for spec in manifest_of(config).of_layer(layer)) for layer in range(config.num_layers)
    ]
    return 4 * (sum(weights) + max(weights))


def measured_layers(num_layers: int, most: int) -> list[int]:
    """At most `most` layers, evenly spaced, with the first and the last one."""
    return np.unique(np.linspace(0, num_layers - 1, min(most, num_layers)).round().astype(int)).tolist()


def layer_errors(
    reader: TensorReader,
    config: ModelConfig,
    quantization: Quantization,
    tokens: Sequence[int],
    layers: Sequence[int],
    device: jax.Device,
) -> Iterator[LayerError]:
    """The error with only one of `layers` quantised, for each, and then with all layers. It computes `tokens`, at least
    two, once for each, in float32: weights are rounded, and activations are not. Raises `CheckpointError` for numbers
    that cannot be quantised."""
    mesh = make_mesh([device])
    model = build_model(
        config, dtype=jnp.dtype(jnp.float32), attention=AttentionImplementation.XLA, platform=device.platform
    )
    load_weights(model, reader, config, mesh)
    graph, _ = nnx.split(model)
    batch = _one_sequence(config, tokens)
    num_pages = 1 + _pages(len(tokens))
    spec = kv_cache_spec(config, jnp.dtype(jnp.float32), num_pages, _PAGE_SIZE, platform=device.platform)
    memory = allocate(spec, mesh)

    @jax.jit
    def step(state: nnx.State, batch: ForwardBatch, memory: KVCaches) -> jax.Array:
        merged = nnx.merge(graph, state)
        hidden, _ = merged(batch, memory)
        return jax.nn.log_softmax(merged.logits(hidden)[:, : config.vocab_size])

    def logprobs() -> NDArray[np.float64]:
        return np.asarray(step(nnx.state(model), batch, memory), np.float64)

    plain = logprobs()
    rounded = ParameterReader(reader, config, quantization)

    def quantised(layer: int) -> list[ModelParameter]:
        return [
            each
            for each in parameters_of(model)
            if any(name.layer == layer and quantization.of(rounded.spec(name)) is not None for name in each.names)
        ]

    def divergence() -> float:
        return float((np.exp(plain) * (plain - logprobs())).sum(-1).mean())

    for layer in layers:
        changed = quantised(layer)
        before = [each.value.get_value() for each in changed]
        read_parameters(changed, rounded, config, mesh)
        yield LayerError(layer, divergence())
        for each, value in zip(changed, before, strict=True):
            each.value.set_value(value)
    for layer in range(config.num_layers):
        read_parameters(quantised(layer), rounded, config, mesh)
    yield LayerError(None, divergence())


def _one_sequence(config: ModelConfig, tokens: Sequence[int]) -> ForwardBatch:
    """A step that computes all tokens of one sequence, in pages from 1 on and, for states, slot 1."""
    count = len(tokens)
    table = jnp.arange(1, 1 + _pages(count), dtype=jnp.int32)[None]
    slots = jnp.arange(_PAGE_SIZE, _PAGE_SIZE + count, dtype=jnp.int32)
    starts, none = jnp.array([0, count], jnp.int32), jnp.int32(0)
    states = StateRows(
        begin=jnp.ones(1, jnp.int32),
        fresh=jnp.ones(1, bool),
        own=jnp.ones(1, jnp.int32),
        sequences=jnp.zeros(count, jnp.int32),
        offsets=jnp.arange(count, dtype=jnp.int32),
        query_starts=starts,
        num_decode=none,
        decode_only=False,
    )
    return ForwardBatch(
        tokens=jnp.array(tokens, jnp.int32),
        positions=jnp.arange(count, dtype=jnp.int32),
        write_slots=slots,
        page_table=table,
        kv_lens=jnp.array([count], jnp.int32),
        query_starts=starts,
        num_decode=none,
        further=tuple(GroupPages(slots, table) for _ in range(num_paged_groups(config) - 1)),
        states=states if config.keeps_states else None,
    )


def _pages(tokens: int) -> int:
    return -(-tokens // _PAGE_SIZE)

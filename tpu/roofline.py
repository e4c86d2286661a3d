"""The minimum time of a step on a chip, computed from the model's shapes and not from the compiled program. A step is
bound by its products (peak FLOPs), by the bytes that it reads from HBM, or by the exchange between devices. No program
reaches any of the three limits; the largest shows what the step waits for. After Williams et al. 2009."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part

_LOGIT_BYTES = 4


class Bound(StrEnum):
    """The resource that limits a step."""

    COMPUTE = "FLOPs"
    MEMORY = "HBM"
    EXCHANGE = "ICI"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step in a tensor-parallel group: tokens of the whole step; sequences, of which logits are
    computed; the sum over all tokens of the keys that each attends to, and over all sequences of the keys read from
    HBM."""

    tokens: int
    rows: int
    keys_seen: int
    keys_read: int

    @classmethod
    def decode(cls, rows: int, context: int) -> Work:
        """One token of each row, all of which have `context` tokens."""
        return cls(rows, rows, rows * context, rows * context)

    @classmethod
    def prefill(cls, tokens: int, prompts: int = 1) -> Work:
        """The first tokens of one prompt, or an equal part of them of each of several."""
        each = tokens // prompts
        return cls(tokens, prompts, prompts * (each * (each + 1) // 2), tokens)

    def within(self, window: int | None) -> Work:
        """The same step for layers with a window (None for full attention), with equal rows."""
        if window is None or self.rows == 0:
            return self
        context, queries = self.keys_read // self.rows, self.tokens // self.rows
        seen = sum(min(position, window) for position in range(context - queries + 1, context + 1))
        return Work(self.tokens, self.rows, self.rows * seen, self.rows * min(context, window + queries - 1))


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one device: FLOPs per second, and bytes per second from HBM and to its neighbours."""

    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """`flops`, `hbm_bytes` and `exchanged_bytes` of one device, and the seconds that each takes at its peak."""

    flops: float
    hbm_bytes: float
    exchanged_bytes: float
    compute: float
    memory: float
    exchange: float

    @property
    def seconds(self) -> float:
        """Minimum seconds of a step. The exchanges of a layer wait for its products, so their time is added."""
        return max(self.compute, self.memory) + self.exchange

    @property
    def bound(self) -> Bound:
        return max((self.compute, Bound.COMPUTE), (self.memory, Bound.MEMORY), (self.exchange, Bound.EXCHANGE))[1]


def roofline(
    config: ModelConfig,
    work: Work,
    device: Device,
    *,
    tp: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    ranks: int = 1,
    state_bytes_per_row: int = 0,
    exchanged: float | None = None,
    width: int = 2,
) -> Roofline:
    """Computes the bounds of a step. `weight_bytes`, `kv_bytes_per_token`, `state_bytes_per_row`: of one device, over
    all layers; recurrent states are read and written once per row. `ranks`: of data-parallel attention, as many as
    devices, each of which reads and writes the keys of its own rows. `exchanged`: bytes that one device sends, as
    compiled, if known. `width`: bytes of a number in the tables of embeddings and head, which are not quantised."""
    flops = step_flops(config, work) / tp
    hbm = (
        _hbm_bytes(config, work, tp, weight_bytes, kv_bytes_per_token / ranks, width)
        + 2 * state_bytes_per_row * work.rows
    )
    exchanged = _exchanged_bytes(config, work, tp) if exchanged is None else exchanged
    return Roofline(
        flops=flops,
        hbm_bytes=hbm,
        exchanged_bytes=exchanged,
        compute=flops / device.flops,
        memory=hbm / device.hbm_bandwidth,
        exchange=exchanged / device.ici_bandwidth,
    )


def step_flops(config: ModelConfig, work: Work) -> float:
    """FLOPs of the whole group: two for each weight and token, and for each number of a query and a key. Those of
    recurrent states are comparatively few, and left out."""
    attention = 2.0 * sum(
        attention.products_per_key * work.within(attention.window).keys_seen for attention in config.attention
    )
    head = 2.0 * _table_weights(config) * work.rows
    unused = sum(weights * (1 - experts.share_computed) for weights, experts in _experts(config))
    return 2.0 * (matrix_weights_of_layers(config) - unused) * work.tokens + attention + head


def matrix_weights_of_layers(config: ModelConfig) -> int:
    """Weights of all layers; a token is multiplied by all except those of experts that it did not choose."""
    manifest = manifest_of(config)
    return sum(manifest.matrix_weights(layer) for layer in range(config.num_layers))


def _experts(config: ModelConfig) -> Iterator[tuple[int, ExpertsConfig]]:
    """For each layer with experts, the number of their weights, and their config."""
    for number, layer in enumerate(config.layers):
        if isinstance(layer.feed_forward, ExpertsConfig):
            yield manifest_of(config).expert_weights(number), layer.feed_forward


def _table_weights(config: ModelConfig) -> int:
    """Weights of the embeddings, and of the head."""
    return math.prod(manifest_of(config).specs[ParameterName(Part.HEAD)].shape)


def _hbm_bytes(
    config: ModelConfig, work: Work, tp: int, weight_bytes: int, kv_bytes_per_token: float, width: int
) -> float:
    """Bytes read and written: weights once, but only the looked-up rows of embeddings and the experts expected to be
    chosen; keys and values; logits written and read once."""
    experts = sum(weights * (1 - experts.share_read(work.tokens)) for weights, experts in _experts(config))
    looked_up = 0 if config.tie_word_embeddings else _table_weights(config)
    unread_bytes = (_bytes_per_weight(config, weight_bytes, tp, width) * experts + width * looked_up) / tp
    sizes = [sum(array.numbers(tp) for array in attention.cached) for attention in config.attention]
    keys = [work.within(attention.window).keys_read for attention in config.attention]
    read = sum(size * count for size, count in zip(sizes, keys, strict=True)) / max(sum(sizes), 1)
    kv = kv_bytes_per_token * (read + work.tokens)
    logits = 2 * _LOGIT_BYTES * work.rows * config.vocab_size / tp
    return weight_bytes - unread_bytes + kv + logits


def _bytes_per_weight(config: ModelConfig, weight_bytes: int, tp: int, width: int) -> float:
    """Of the layers, on average."""
    tables = (1 if config.tie_word_embeddings else 2) * _table_weights(config)
    return (weight_bytes * tp - width * tables) / matrix_weights_of_layers(config)


def _exchanged_bytes(config: ModelConfig, work: Work, tp: int) -> float:
    """Bytes that one device sends: two sums per layer over the hidden states and one for the embeddings, in bfloat16
    with ring algorithms, and three numbers per row of logits (see `jax_runner.readers`)."""
    if tp == 1:
        return 0.0
    sums = (2 * config.num_layers + 1) * 2 * (tp - 1) / tp * work.tokens * config.hidden_size * 2
    return sums + 3 * _LOGIT_BYTES * work.rows * (tp - 1)

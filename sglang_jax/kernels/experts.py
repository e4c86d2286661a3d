"""Products of experts: each token by the matrices of the experts that it chose, in three ways.

A token's result is a sum over its own experts in the order of its choice, or over all experts in theirs: which others
chose the same experts changes nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import jax
import jax.numpy as jnp

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, current_chip

_SHARE_READ = 0.8
_MOST_ROWS_OF_ALL = 256
"""Rows of a step beyond which a TPU would compute longer than it reads, if every token passed through all experts."""

_MOST_ROWS_INSTEAD_OF_WIDENING = 4096
"""Rows up to which products of all experts take less time than widening 8 bits in memory: 13 ps a weight on v6e, as
long as products of 6,000 rows (libtpu 0.0.51)."""

_ROWS_AT_ONCE = 512
"""Of a product of all experts: between products there are float32 numbers `[rows, experts, columns]`."""

_LARGEST_TILE = 32

_NARROW = {Chip.V5E: "int8", Chip.V5P: "int8", Chip.V6E: "int8", Chip.TPU7X: "float8_e4m3fn"}
"""What grouped products read as it lies. Of other types of 8 bits libtpu 0.0.51 writes a copy of all experts first."""

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""`activation(gate) * up`, of float32 numbers."""

Select = Callable[[jax.Array], jax.Array]
"""Of an array `[experts, ...]`, what some rows need."""


class ExpertProducts(StrEnum):
    """How a step multiplies."""

    ALL = "all experts"
    """Every token by every expert, and what it did not choose counts for nothing: where a step reads nearly all experts
    anyway."""
    RAGGED = "ragged"
    """Tokens sorted by expert, in XLA's own grouped product."""
    TILES = "tiles"
    """Tokens sorted by expert, some rows of one expert at a time. Each expert that was chosen is read once or, of many
    rows, a few times. For CPUs, where that product computes all experts (jax 0.10)."""

    @classmethod
    def of(cls, config: ExpertsConfig, tokens: int, *, for_tpu: bool, widened: bool = False) -> ExpertProducts:
        """What a step of so many tokens uses. `widened`: weights that grouped products cannot read as they lie."""
        if not for_tpu:
            return cls.TILES
        if widened and tokens <= _MOST_ROWS_INSTEAD_OF_WIDENING:
            return cls.ALL
        reads_nearly_all = config.share_read(tokens) >= _SHARE_READ
        return cls.ALL if reads_nearly_all and tokens <= _MOST_ROWS_OF_ALL else cls.RAGGED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Of all experts, or of a device's part of their columns: `[experts, columns, hidden]`, and biases `[experts,
    columns]`. The bias of `down` is the caller's to add, as it is added once.

    With hidden as the last axis libtpu takes all three as they lie. Of 720 columns, a part of gpt-oss's 2,880, it
    copied `[experts, hidden, columns]` at every step: for v6e, products then took twice as long.

    Of matrices in 8 bits, float32 scales: `[experts, columns]`, and `[experts, hidden]` of `down`.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    gate_scales: jax.Array | None = None
    up_scales: jax.Array | None = None
    down_scales: jax.Array | None = None

    @property
    def widened(self) -> bool:
        """Grouped products of this chip cannot read some of the matrices as they lie."""
        return not all(map(_reads, (self.gate, self.up, self.down)))

    def scaled(self, gates: jax.Array, ups: jax.Array, of_rows: Select) -> tuple[jax.Array, jax.Array]:
        """Products of gate and up, with scales and biases. `of_rows` gives what belongs to each of their rows."""
        if self.gate_scales is not None:
            gates = gates * of_rows(self.gate_scales)
        if self.up_scales is not None:
            ups = ups * of_rows(self.up_scales)
        if self.gate_bias is not None and self.up_bias is not None:
            gates, ups = gates + of_rows(self.gate_bias), ups + of_rows(self.up_bias)
        return gates, ups


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """Of each token the experts that it chose, int32 `[T, chosen]`, and what their outputs are multiplied by, float32
    `[T, chosen]`. Padding has expert number `experts`, which there is not, and scores of 0."""

    experts: jax.Array
    scores: jax.Array

    def by_expert(self, experts: int) -> jax.Array:
        """Scores as float32 `[T, experts]`, 0 for those that were not chosen."""
        chosen = self.experts[..., None] == jnp.arange(experts)
        return jnp.where(chosen, self.scores[..., None], 0.0).sum(1)

    def tokens_of(self, experts: int) -> jax.Array:
        """How many tokens chose each expert: int32 `[experts]`."""
        return _sizes(self.experts.reshape(-1), experts)


def multiply_experts(
    products: ExpertProducts, x: jax.Array, weights: ExpertWeights, choice: Choice, gate: Gate
) -> jax.Array:
    """`x [T, hidden]`, of the type of products → float32 `[T, hidden]`: the sum of the outputs of the chosen experts,
    each by its score."""
    if products is ExpertProducts.ALL:
        return _by_all_in_parts(x, weights, choice, gate)
    experts, chosen = len(weights.gate), choice.experts.shape[1]
    flat = choice.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = _sizes(flat, experts)
    multiply = _ragged if products is ExpertProducts.RAGGED else _in_tiles
    found = multiply(x[order // chosen], weights, flat[order], sizes, gate)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    outputs = found[places].reshape(len(x), chosen, -1)
    scores = choice.scores[..., None]
    # Padding has outputs of nobody, which may be anything.
    return jnp.where(scores != 0, outputs * scores, 0.0).sum(1)


def _sizes(chosen: jax.Array, experts: int) -> jax.Array:
    """How often each expert is in int32 `[n]`, as int32 `[experts]`."""
    return jnp.zeros(experts, jnp.int32).at[chosen].add(1, mode="drop")


def _dot(x: jax.Array, kernel: jax.Array, spec: str) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, kernel.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _reads(kernel: jax.Array) -> bool:
    """Whether grouped products of the chip that is compiled for read a matrix as it lies."""
    return kernel.dtype.itemsize > 1 or kernel.dtype.name == _NARROW.get(current_chip())


def _by_all_in_parts(x: jax.Array, weights: ExpertWeights, choice: Choice, gate: Gate) -> jax.Array:
    """`_by_all` for some rows at a time."""
    if len(x) <= _ROWS_AT_ONCE:
        return _by_all(x, weights, choice, gate)
    further, experts = -len(x) % _ROWS_AT_ONCE, len(weights.gate)

    def parts(array: jax.Array, padding: int) -> jax.Array:
        padded = jnp.pad(array, ((0, further), (0, 0)), constant_values=padding)
        return padded.reshape(-1, _ROWS_AT_ONCE, array.shape[1])

    rows = parts(x, 0), Choice(parts(choice.experts, experts), parts(choice.scores, 0))
    found = jax.lax.map(lambda part: _by_all(part[0], weights, part[1], gate), rows)
    return found.reshape(-1, found.shape[-1])[: len(x)]


def _by_all(x: jax.Array, weights: ExpertWeights, choice: Choice, gate: Gate) -> jax.Array:
    gates, ups = (_dot(x, kernel, "th,eih->tei") for kernel in (weights.gate, weights.up))
    gates, ups = weights.scaled(gates, ups, lambda array: array)
    scores = choice.by_expert(len(weights.gate))[..., None]
    # What an expert makes of tokens that did not choose it may be infinite.
    inner = jnp.where(scores != 0, gate(gates, ups) * scores, 0.0)
    down = weights.down
    if weights.down_scales is not None:
        # One sum over columns and experts, whose scales differ: they widen the weights that it reads.
        down = (down.astype(jnp.float32) * weights.down_scales[:, None]).astype(x.dtype)
    # A matrix for a moment, or libtpu sums in the order of what it made for gate and up, and writes a copy of `down`,
    # widened where that has 8 bits: of DeepSeek-V3 on 64 devices of v6e 450 us a layer instead of 131.
    inner = jax.lax.optimization_barrier(inner.astype(x.dtype).reshape(len(x), -1)).reshape(inner.shape)
    return _dot(inner, down, "tei,eih->th")


def _ragged(x: jax.Array, weights: ExpertWeights, experts: jax.Array, sizes: jax.Array, gate: Gate) -> jax.Array:
    """`x [M, hidden]` in the order of its `experts [M]` → float32 `[M, hidden]`."""

    def dot(rows: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
        axes = (([1], [contracted]), ([], []))
        return jax.lax.ragged_dot_general(
            rows,
            kernel if x.dtype == jnp.bfloat16 and _reads(kernel) else kernel.astype(x.dtype),
            sizes,
            jax.lax.RaggedDotDimensionNumbers(axes, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    gates, ups = weights.scaled(dot(x, weights.gate, 2), dot(x, weights.up, 2), lambda array: array[experts])
    found = dot(gate(gates, ups).astype(x.dtype), weights.down, 1)
    return found if weights.down_scales is None else found * weights.down_scales[experts]


def _in_tiles(x: jax.Array, weights: ExpertWeights, experts: jax.Array, sizes: jax.Array, gate: Gate) -> jax.Array:
    """As `_ragged`. A tile's last rows may be the next expert's, which that one's tile then overwrites."""
    num_rows, num_experts = len(x), len(sizes)
    tile = min(_LARGEST_TILE, 2 ** max(math.ceil(math.log2(num_rows / num_experts)), 0))
    tiles = (sizes + tile - 1) // tile
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    rows = jnp.pad(x, ((0, tile), (0, 0)))

    def compute(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, outputs = carry
        expert = jnp.searchsorted(ends, number, side="right")
        first = starts[expert] + (number - (ends[expert] - tiles[expert])) * tile

        def of_expert(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)

        own = jax.lax.dynamic_slice(rows, (first, 0), (tile, rows.shape[1]))
        gates, ups = (_dot(own, of_expert(kernel), "th,ih->ti") for kernel in (weights.gate, weights.up))
        gates, ups = weights.scaled(gates, ups, of_expert)
        found = _dot(gate(gates, ups).astype(own.dtype), of_expert(weights.down), "ti,ih->th")
        if weights.down_scales is not None:
            found = found * of_expert(weights.down_scales)
        return number + 1, jax.lax.dynamic_update_slice(outputs, found, (first, 0))

    outputs = jnp.zeros((num_rows + tile, weights.down.shape[-1]), jnp.float32)
    first = (jnp.zeros((), ends.dtype), outputs)
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], compute, first)[1][:num_rows]

"""Expert layers: each token through the experts that its router chose, in several ways. Its result is summed over its
experts in the router's order, or over all by number, so it does not depend on the other tokens of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.kernels.expert_groups_pallas import (
    LEAST_ROWS,
    ExpertTiles,
    multiply_experts_in_groups,
    rows_of_tile,
)
from sglang_jax.kernels.expert_pallas import Gate, OfColumns, gated_rows, summed_rows
from sglang_jax.kernels.expert_rows_pallas import gather_rows, sum_rows
from sglang_jax.kernels.expert_tiles import SortedTiles, Widths, columns_of_sums, rows_of_expert
from sglang_jax.kernels.group_product_pallas import GroupedWeights
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, current_chip

_SHARE_READ = 0.8
_MAX_ROWS_OF_ALL = 256
"""With more rows, a TPU takes longer to compute all experts for every token than to read their weights."""

_MAX_ROWS_INSTEAD_OF_WIDENING = 4096
"""Up to this many rows, products with all experts take less time than widening 8-bit weights in memory: 13 ps a weight
on v6e, as long as products with 6,000 rows (libtpu 0.0.51)."""

_ROWS_AT_ONCE = 512
"""Rows per product with all experts, whose intermediate results are float32 `[rows, experts, columns]`."""

_LEAST_TOKENS_OF_A_PART = 256
"""Of a step that `KERNELS` compute in parts: with fewer, reading the weights for each part takes longer than other
products do."""

_LARGEST_TILE = 32

_NARROW = {Chip.V5E: "int8", Chip.V5P: "int8", Chip.V6E: "int8", Chip.TPU7X: "float8_e4m3fn"}
"""The 8-bit type that grouped products read directly; for others, libtpu 0.0.51 first writes a widened copy."""

Select = Callable[[jax.Array], jax.Array]
"""Gathers the entries of an array `[experts, ...]` that some rows need."""


@dataclass(frozen=True)
class ExpertBlocks:
    """The matrices of `count` experts in blocks, on a CPU. `multiply`: rows `[T, inputs]` times the matrix of one
    expert, int32 `[]`, float32 `[T, outputs]`."""

    count: int
    multiply: Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertGroups:
    """The matrices of all experts in groups, on a TPU: see `expert_groups_pallas.folded` and `filled_up`. `interpret`:
    for tests without a TPU."""

    weights: GroupedWeights
    folds: int = field(default=1, metadata={"static": True})
    interpret: bool = field(default=False, metadata={"static": True})


ExpertMatrices = jax.Array | ExpertBlocks | ExpertGroups


@dataclass(frozen=True, slots=True)
class KernelPart:
    """Tokens of a step that `ExpertProducts.KERNELS` compute at once, rows of a tile, and columns of programs."""

    tokens: int
    rows: int
    widths: Widths


class ExpertProducts(StrEnum):
    """How a step computes its experts."""

    ALL = "all experts"
    """Every token through every expert, with score 0 for experts that it did not choose: for steps that read nearly all
    experts anyway."""
    RAGGED = "ragged"
    """Tokens sorted by expert, in XLA's grouped product."""
    TILES = "tiles"
    """Tokens sorted by expert, a tile of one expert's rows at a time; a chosen expert is read once per tile. For CPUs,
    where XLA's grouped product computes all experts (jax 0.10)."""
    KERNELS = "kernels"
    """Tokens sorted by expert, in two kernels for bfloat16 on TPUs: see `expert_pallas`."""
    GROUPS = "groups"
    """Tokens sorted by expert, in a kernel for matrices in groups: see `expert_groups_pallas`."""

    @classmethod
    def of(
        cls, config: ExpertsConfig, tokens: int, *, for_tpu: bool, fits: bool = False, widened: bool = False
    ) -> ExpertProducts:
        """The choice for a step of `tokens` tokens. `fits`: the kernels have room for it. `widened`: see
        `ExpertWeights.widened`."""
        if not for_tpu:
            return cls.TILES
        if fits:
            return cls.KERNELS
        if widened and tokens <= _MAX_ROWS_INSTEAD_OF_WIDENING:
            return cls.ALL
        reads_nearly_all = config.share_read(tokens) >= _SHARE_READ
        return cls.ALL if reads_nearly_all and tokens <= _MAX_ROWS_OF_ALL else cls.RAGGED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a device, or its shard of their columns: matrices `[experts, columns, hidden]` (`gate`: None for
    experts without gates), biases `[experts,
    columns]` (`[experts, hidden]` for `down`, which the caller adds). 8-bit matrices have float32 scales: `[experts,
    columns]`, and `[experts, hidden]` for `down`. Matrices in blocks are for `ExpertProducts.TILES`, on one device; all
    matrices in groups for `ExpertProducts.GROUPS`.

    With hidden as the last axis libtpu reads all three in place. It copied `[experts, hidden, columns]` with 720
    columns, a shard of gpt-oss's 2,880, at every step: on v6e, products then took twice as long.
    """

    gate: ExpertMatrices | None
    up: ExpertMatrices
    down: ExpertMatrices
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    gate_scales: jax.Array | None = None
    up_scales: jax.Array | None = None
    down_scales: jax.Array | None = None

    @property
    def count(self) -> int:
        """The number of experts."""
        if isinstance(self.up, ExpertGroups):
            return len(self.up.weights.levels)
        return self.up.count if isinstance(self.up, ExpertBlocks) else len(self.up)

    @property
    def in_groups(self) -> bool:
        return isinstance(self.up, ExpertGroups)

    @property
    def plain(self) -> tuple[jax.Array | None, jax.Array, jax.Array]:
        """Matrices of gate, up and down that are neither in blocks nor in groups."""
        found = self.gate, self.up, self.down
        assert not any(isinstance(each, ExpertBlocks | ExpertGroups) for each in found)
        return cast("tuple[jax.Array | None, jax.Array, jax.Array]", found)

    @property
    def widened(self) -> bool:
        """Whether this chip's grouped products would widen some of the matrices in memory first."""
        return not all(kernel is None or _reads(kernel) for kernel in self.plain)

    def part(self, tokens: int, chosen: int, experts: int) -> KernelPart | None:
        """How `KERNELS` compute a step of `tokens` tokens, each of which chooses some of `experts` on all devices: at
        once, or in few equal parts, each of which reads the weights again; None if that has no room."""
        gate, up, down = self.plain
        for count in (1, 2, 4, 8):
            own = -(-tokens // count)
            if count > 1 and own < _LEAST_TOKENS_OF_A_PART:
                return None
            rows = rows_of_expert(own * chosen / experts)
            widths = Widths.of(own, chosen, rows, (up, down), gated=gate is not None)
            if widths is not None:
                return KernelPart(own, rows, widths)
        return None

    def inner(self, product: Callable[[ExpertMatrices], jax.Array], gate: Gate, of_rows: Select) -> jax.Array:
        """The inner activations of rows: `gate` of their products with gate and up. `of_rows` gathers scales and biases
        for these rows."""

        def of(matrices: ExpertMatrices, scales: jax.Array | None, bias: jax.Array | None) -> jax.Array:
            found = product(matrices)
            found = found if scales is None else found * of_rows(scales)
            return found if bias is None else found + of_rows(bias)

        gates = None if self.gate is None else of(self.gate, self.gate_scales, self.gate_bias)
        return gate(gates, of(self.up, self.up_scales, self.up_bias))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertChoice:
    """The experts that each token chose, int32 `[T, chosen]`, and the factors of their outputs, float32 `[T, chosen]`.
    Padding has expert number `experts`, which does not exist, and scores of 0."""

    experts: jax.Array
    scores: jax.Array

    def by_expert(self, experts: int) -> jax.Array:
        """Scores, float32 `[T, experts]`; 0 for experts that were not chosen."""
        chosen = self.experts[..., None] == jnp.arange(experts)
        return jnp.where(chosen, self.scores[..., None], 0.0).sum(1)

    def among(self, count: int, first: jax.Array) -> ExpertChoice:
        """The choice among `count` experts from number `first`, int32 `[]`, on, numbered from 0; others become
        padding."""
        numbers = self.experts - first
        own = (numbers >= 0) & (numbers < count)
        return ExpertChoice(jnp.where(own, numbers, count), jnp.where(own, self.scores, 0.0))

    def unweighted(self) -> ExpertChoice:
        """The same choice with a score of 1 for each expert."""
        return ExpertChoice(self.experts, jnp.where(self.scores != 0, 1.0, 0.0))

    def tokens_of(self, experts: int) -> jax.Array:
        """The number of tokens that chose each expert, int32 `[experts]`."""
        return _sizes(self.experts.reshape(-1), experts)


def multiply_experts(
    products: ExpertProducts,
    x: jax.Array,
    weights: ExpertWeights,
    choice: ExpertChoice,
    gate: Gate,
    tile: int | None = None,
    experts: int | None = None,
) -> jax.Array:
    """The outputs of the chosen experts, weighted by their scores and summed: float32 `[T, hidden]`. `x` `[T, hidden]`
    has the type of the products. `tile`: rows of `TILES`, for results that do not depend on the step; None for a number
    that suits it. `experts`: of all devices, if this one has only some of them.

    Raises `ValueError` for `KERNELS` without room in vector memory."""
    if products is ExpertProducts.ALL:
        return _by_all_in_parts(x, weights, choice, gate)
    if products is ExpertProducts.KERNELS:
        return _in_kernels(x, weights, choice, gate, experts or weights.count)
    own, chosen = weights.count, choice.experts.shape[1]
    flat = choice.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = _sizes(flat, own)
    if products is ExpertProducts.GROUPS:
        # The rows of a tile may change the last bits, so they are fixed where `tile` asks for equal results.
        rows = rows_of_tile(len(flat), experts or own) if tile is None else LEAST_ROWS
        columns = columns_of_sums(len(x), chosen, rows, x.shape[1])
        if columns is not None:
            return _groups_in_kernels(x, weights, choice, gate, rows, columns)
        found = _in_groups(x, order // chosen, weights, flat[order], sizes, gate, rows)
    else:
        multiply = _ragged if products is ExpertProducts.RAGGED else partial(_in_tiles, tile=tile)
        found = multiply(x[order // chosen], weights, flat[order], sizes, gate)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    outputs = found[places].reshape(len(x), chosen, -1)
    scores = choice.scores[..., None]
    # Rows of padding are undefined.
    return jnp.where(scores != 0, outputs * scores, 0.0).sum(1)


def _sizes(chosen: jax.Array, experts: int) -> jax.Array:
    """How often each expert occurs in `chosen`, int32 `[experts]`."""
    return jnp.zeros(experts, jnp.int32).at[chosen].add(1, mode="drop")


def _dot(x: jax.Array, kernel: jax.Array, spec: str) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, kernel.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _array(matrices: ExpertMatrices) -> jax.Array:
    assert isinstance(matrices, jax.Array), "neither in blocks nor in groups"
    return matrices


def _reads(kernel: jax.Array) -> bool:
    """Whether the target chip's grouped products read this matrix without widening it in memory."""
    return kernel.dtype.itemsize > 1 or kernel.dtype.name == _NARROW.get(current_chip())


def _by_all_in_parts(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice, gate: Gate) -> jax.Array:
    return _in_parts(lambda part: _by_all(part[0], weights, part[1], gate), x, choice, weights.count, _ROWS_AT_ONCE)


def _in_parts(
    function: Callable[[tuple[jax.Array, ExpertChoice]], jax.Array],
    x: jax.Array,
    choice: ExpertChoice,
    experts: int,
    tokens: int,
) -> jax.Array:
    """A function of tokens and their choices, for some tokens at a time."""
    if len(x) <= tokens:
        return function((x, choice))
    further = -len(x) % tokens

    def parts(array: jax.Array, padding: int) -> jax.Array:
        padded = jnp.pad(array, ((0, further), (0, 0)), constant_values=padding)
        return padded.reshape(-1, tokens, array.shape[1])

    rows = parts(x, 0), ExpertChoice(parts(choice.experts, experts), parts(choice.scores, 0))
    found = jax.lax.map(function, rows)
    return found.reshape(-1, found.shape[-1])[: len(x)]


def _by_all(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice, gate: Gate) -> jax.Array:
    _, _, down = weights.plain
    inner = weights.inner(lambda kernel: _dot(x, _array(kernel), "th,eih->tei"), gate, lambda array: array)
    scores = choice.by_expert(weights.count)[..., None]
    # An expert's output for tokens that did not choose it may be infinite.
    inner = jnp.where(scores != 0, inner * scores, 0.0)
    if weights.down_scales is not None:
        # One sum over columns and experts, whose scales differ: the scales go onto the weights.
        down = (down.astype(jnp.float32) * weights.down_scales[:, None]).astype(x.dtype)
    # Reshaped to a matrix: else libtpu sums in the layout of gate's and up's results and writes a (widened) copy of
    # `down`: 450 us a layer instead of 131 for DeepSeek-V3 on 64 devices of v6e.
    inner = jax.lax.optimization_barrier(inner.astype(x.dtype).reshape(len(x), -1)).reshape(inner.shape)
    return _dot(inner, down, "tei,eih->th")


def _ragged(x: jax.Array, weights: ExpertWeights, experts: jax.Array, sizes: jax.Array, gate: Gate) -> jax.Array:
    """`x` `[M, hidden]` sorted by `experts` `[M]` → float32 `[M, hidden]`."""

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

    _, _, down = weights.plain
    inner = weights.inner(lambda kernel: dot(x, _array(kernel), 2), gate, lambda array: array[experts])
    found = dot(inner.astype(x.dtype), down, 1)
    return found if weights.down_scales is None else found * weights.down_scales[experts]


def _in_kernels(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice, gate: Gate, experts: int) -> jax.Array:
    tokens, chosen = choice.experts.shape
    part = weights.part(tokens, chosen, experts)
    if part is None:
        raise ValueError(f"experts of {tokens} tokens do not fit into the vector memory of {current_chip()}")
    of_gate, of_up = OfColumns(weights.gate_scales, weights.gate_bias), OfColumns(weights.up_scales, weights.up_bias)
    gate_kernel, up_kernel, down = weights.plain

    def of_part(given: tuple[jax.Array, ExpertChoice]) -> jax.Array:
        x, choice = given
        tiles = SortedTiles.of(choice.experts, choice.scores, weights.count, part.rows)
        inner = gated_rows(x, gate_kernel, up_kernel, tiles, part.widths.inner, gate, of_gate, of_up)
        return summed_rows(inner, down, tiles, part.widths.outputs, len(x), OfColumns(weights.down_scales))

    return _in_parts(of_part, x, choice, weights.count, part.tokens)


def _in_groups(
    x: jax.Array,
    tokens: jax.Array,
    weights: ExpertWeights,
    experts: jax.Array,
    sizes: jax.Array,
    gate: Gate,
    rows: int,
) -> jax.Array:
    """As `_ragged`, of the rows of `x` with the numbers `tokens` `[M]`. `rows`: of a tile."""
    tiles = ExpertTiles.of(experts, sizes, rows)
    return _products_of_groups(x[tiles.spread(tokens, rows)], weights, tiles, gate, rows)[tiles.places]


def _groups_in_kernels(
    x: jax.Array, weights: ExpertWeights, choice: ExpertChoice, gate: Gate, rows: int, columns: int
) -> jax.Array:
    """With kernels that gather rows and add their outputs up. `columns`: of a program that adds."""
    assert isinstance(weights.up, ExpertGroups)
    interpret = weights.up.interpret
    tiles = SortedTiles.of(choice.experts, choice.scores, weights.count, rows, interpret=interpret)
    own = gather_rows(x.astype(jnp.bfloat16), tiles, interpret=interpret)
    found = _products_of_groups(own, weights, tiles, gate, rows)
    return sum_rows(found, tiles, columns, len(x), interpret=interpret)


def _products_of_groups(
    own: jax.Array, weights: ExpertWeights, tiles: ExpertTiles | SortedTiles, gate: Gate, rows: int
) -> jax.Array:
    """Of rows in tiles, `[tiles * rows, hidden]`: float32."""

    def product(rows: jax.Array, matrices: ExpertMatrices, outputs: int) -> jax.Array:
        assert isinstance(matrices, ExpertGroups)
        rows, own = rows.astype(jnp.bfloat16), matrices.weights
        found = multiply_experts_in_groups(rows, own, tiles, folds=matrices.folds, interpret=matrices.interpret)
        return found[:, :outputs]

    assert isinstance(weights.down, ExpertGroups)
    inner, hidden = weights.down.weights.levels.shape[1] * weights.down.folds, own.shape[1]
    found = weights.inner(
        lambda matrices: product(own, matrices, inner),
        gate,
        lambda array: jnp.repeat(array[tiles.experts], rows, axis=0),
    )
    return product(found, weights.down, hidden)


def _in_tiles(
    x: jax.Array, weights: ExpertWeights, experts: jax.Array, sizes: jax.Array, gate: Gate, *, tile: int | None
) -> jax.Array:
    """As `_ragged`. A tile may extend into the next expert's rows; that expert's tile then overwrites them."""
    num_rows, num_experts = len(x), len(sizes)
    tile = tile or min(_LARGEST_TILE, 2 ** max(math.ceil(math.log2(num_rows / num_experts)), 0))
    tiles = (sizes + tile - 1) // tile
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    rows = jnp.pad(x, ((0, tile), (0, 0)))

    def compute(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, outputs = carry
        expert = jnp.searchsorted(ends, number, side="right")
        first = starts[expert] + (number - (ends[expert] - tiles[expert])) * tile

        def of_expert(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)

        def product(rows: jax.Array, matrices: ExpertMatrices, spec: str) -> jax.Array:
            if isinstance(matrices, ExpertBlocks):
                return matrices.multiply(rows, expert)
            assert isinstance(matrices, jax.Array)
            return _dot(rows, of_expert(matrices), spec)

        own = jax.lax.dynamic_slice(rows, (first, 0), (tile, rows.shape[1]))
        inner = weights.inner(lambda matrices: product(own, matrices, "th,ih->ti"), gate, of_expert)
        found = product(inner.astype(own.dtype), weights.down, "ti,ih->th")
        if weights.down_scales is not None:
            found = found * of_expert(weights.down_scales)
        return number + 1, jax.lax.dynamic_update_slice(outputs, found, (first, 0))

    outputs = jnp.zeros((num_rows + tile, x.shape[1]), jnp.float32)
    first = (jnp.zeros((), ends.dtype), outputs)
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], compute, first)[1][:num_rows]

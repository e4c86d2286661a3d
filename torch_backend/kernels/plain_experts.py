"""Products of experts with plain weights, which apply the gate and the scores before results leave the registers.

One kernel has two uses. For gate and up, a program multiplies rows of one expert by some rows of both matrices, and
stores the gated numbers. It reads the rows of x where their tokens are, so x is not copied. For down, a program
multiplies the sums by the scores, and stores a row where its token's choice is. A second kernel adds up the choices of
a token in their order. A choice is stored in the type of x: in 16 bits, writing and reading a number takes 4 bytes
instead of the 8 of float32. Atomic sums would take 8, too, and have no order.

Tiles of rows come from `kernels.expert_product.tile_table`: experts without rows are not read. The outputs of a tile
are the rows of the matrix units' product, so few tokens waste none of these units. A row's sums are in one order for
any tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_jax.architectures.kinds.experts import ClampedGate
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels.attention_tiles import TRITON_TYPES
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.expert_product import SKEW
from torch_backend.kernels.gated_activation import activate, activate_clamped
from torch_backend.kernels.scaled_product import ProductTile

_INPUTS = 64
"""Inputs of a tile: those of a row are a line of 128 bytes."""

_VECTORS = (16, 8)
"""Divisors of a row's length that let the compiler copy 16 bytes at a time."""

_MIN_ROWS, _MAX_ROWS = 16, 128
_UNALIGNED_ROWS = 32
"""Maximum rows of a tile where the rows of matrices cannot be copied in 16 bytes, which takes more registers."""

_SQUARED_RELU = tl.constexpr("relu2")

_SUMMED = 1024
"""Numbers of a token that a program of the second kernel adds up."""

_MOST_STAGES = (90, 100, 103)
"""Capabilities of chips whose programs may have over 200 KiB of shared memory."""


@dataclass(frozen=True, slots=True)
class Gate:
    """`activation(gate) * up`; with `clamped`, see `ClampedGate`. `activation`: None for experts without gates, whose
    inner numbers are `relu(up) ** 2`."""

    activation: Activation | None
    clamped: ClampedGate | None = None

    @property
    def matrices(self) -> int:
        """Of an expert, which read its input."""
        return 1 if self.activation is None else 2

    @property
    def name(self) -> str:
        """For the kernel."""
        return _SQUARED_RELU.value if self.activation is None else self.activation.value


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows sorted by expert. `table`: see `tile_table`; `order`: the place of each row among the choices of all tokens,
    int64 `[M]`, None if inputs and outputs are sorted; `chosen`: experts of a token; `per_expert`: see
    `rows_per_expert`."""

    table: torch.Tensor
    order: torch.Tensor | None
    chosen: int
    per_expert: int


def rows_per_expert(expected: int, weights: torch.Tensor) -> int:
    """The rows of an expert for which to choose tiles, of those `expected` for all of `weights`, which are gate and up,
    or those of the only product."""
    per_expert: int = SKEW * triton.cdiv(expected, len(weights))
    aligned = weights.shape[1] % _VECTORS[0] == 0 and weights.shape[2] % _VECTORS[1] == 0
    return per_expert if aligned else min(per_expert, _UNALIGNED_ROWS)


def tile_rows(per_expert: int, dtype: torch.dtype) -> int:
    """Rows of a tile, a power of two, for `rows_per_expert` and a dtype of weights."""
    if dtype == torch.float32:
        return _MIN_ROWS
    rows: int = triton.next_power_of_2(per_expert)
    return min(_MAX_ROWS, max(_MIN_ROWS, rows))


def gate_experts(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, rows: ExpertRows, gate: Gate, chip: Chip
) -> torch.Tensor:
    """Multiplies rows of a contiguous `x [T, inputs]`, bfloat16, float16 or float32, by `weights [experts, 2 * inner,
    inputs]` of the same dtype, gate first, and `bias [experts, 2 * inner]`; without gates, there are `inner` rows.
    Returns the gated sums `[M, inner]`, sorted by expert; rows behind those of the last expert are not written. Sums
    and gate are float32, rounded once. Raises `ValueError` for other shapes and dtypes."""
    _check(x, weights, bias)
    inner, rest = divmod(weights.shape[1], gate.matrices)
    if rest or rows.order is None:
        raise ValueError(f"there are {weights.shape[1]} rows of gate and up, and order is {rows.order}")
    out = torch.empty((len(rows.order), inner), dtype=x.dtype, device=x.device)
    _launch(x, weights, bias, rows, None, out, gate, chip)
    return out


def sum_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    rows: ExpertRows,
    scores: torch.Tensor,
    dtype: torch.dtype,
    chip: Chip,
) -> torch.Tensor:
    """Multiplies a contiguous `x [M, inputs]`, sorted by expert, by `weights [experts, outputs, inputs]`, adds `bias
    [experts, outputs]`, and sums the results of each token, times `scores`, float32 `[T, chosen]`: `[T, outputs]` in
    `dtype`. Choices with score 0 count for nothing, whatever they are. Products are float32, rounded to the dtype of x
    before the sum, which is float32 and in the order of choices. Raises `ValueError` for other shapes and dtypes."""
    _check(x, weights, bias)
    if rows.order is None or scores.shape[1:] != (rows.chosen,) or scores.dtype != torch.float32:
        raise ValueError(f"scores are {list(scores.shape)} in {scores.dtype}; wanted is float32 [T, {rows.chosen}]")
    scores = scores.contiguous()
    choices = torch.empty((len(x), weights.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weights, bias, rows, scores, choices, None, chip)
    outputs = weights.shape[1]
    out = torch.empty((len(scores), outputs), dtype=dtype, device=x.device)
    if len(scores):
        sum_choices[(len(scores), triton.cdiv(outputs, _SUMMED))](
            choices,
            scores,
            out,
            outputs,
            CHOSEN=rows.chosen,
            BLOCK=min(_SUMMED, triton.next_power_of_2(outputs)),
            DEPENDENT=chip.dependent_launches,
            num_warps=4,
            launch_pdl=chip.dependent_launches,
        )
    return out


def multiply_sorted_rows(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, rows: ExpertRows, chip: Chip
) -> torch.Tensor:
    """Only the product, of a contiguous `x [M, inputs]` sorted by expert: `[M, outputs]` in its dtype. Rows behind
    those of the last expert are not written. Raises `ValueError` as `sum_experts`."""
    _check(x, weights, bias)
    if rows.order is not None:
        raise ValueError("the product of sorted rows takes no order")
    out = torch.empty((len(x), weights.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weights, bias, rows, None, out, None, chip)
    return out


def _check(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises `ValueError` for what the kernel would misread."""
    if x.dtype not in TRITON_TYPES or weights.dtype != x.dtype:
        raise ValueError(f"there is no product of {x.dtype} and experts of {weights.dtype}")
    if x.shape[1:] != weights.shape[2:] or not (x.is_contiguous() and weights.is_contiguous()):
        raise ValueError(
            f"x is {list(x.shape)} with strides {list(x.stride())}, experts are {list(weights.shape)} with strides "
            f"{list(weights.stride())}; wanted are contiguous ones with as many inputs"
        )
    if bias is not None and (bias.shape != weights.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"biases are {list(bias.shape)}; wanted are contiguous {list(weights.shape[:2])}")


def plain_tile(per_expert: int, inputs: int, dtype: torch.dtype, chip: Chip, *, gated: bool) -> ProductTile:
    """The tile for `rows_per_expert`; `gated`: of gate and up, each. Its inputs are the same for any number."""
    rows = tile_rows(per_expert, dtype)
    if dtype == torch.float32:
        return ProductTile(rows, 32 if gated else 64, 4, 2, 32)
    if _vector(inputs) == 1:
        return ProductTile(rows, 32, 4, 2, _INPUTS)
    if rows <= 64:
        return ProductTile(rows, 64 if gated or rows <= 32 else 128, 4, 4, _INPUTS)
    if chip.capability == 90 and not gated:
        return ProductTile(rows, 128, 4, 3, _INPUTS)
    return ProductTile(rows, 128, 8, 4 if chip.capability in _MOST_STAGES else 3, _INPUTS)


def _vector(length: int) -> int:
    return next((each for each in _VECTORS if length % each == 0), 1)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    rows: ExpertRows,
    scores: torch.Tensor | None,
    out: torch.Tensor,
    gate: Gate | None,
    chip: Chip,
) -> None:
    """Launches a program for each tile of rows and of outputs."""
    if not len(out):
        return
    outputs, inputs = out.shape[1], x.shape[1]
    tile = plain_tile(rows.per_expert, inputs, x.dtype, chip, gated=gate is not None and gate.matrices == 2)
    of_outputs, of_inputs = _vector(outputs), _vector(inputs)
    clamped = None if gate is None else gate.clamped
    multiply_experts[(len(rows.table), triton.cdiv(outputs, tile.outputs))](
        x,
        weights,
        bias,
        rows.table,
        rows.order,
        scores,
        out,
        outputs // of_outputs,
        inputs // of_inputs,
        rows.chosen,
        ACTIVATION=None if gate is None else gate.name,
        ALPHA=None if clamped is None else clamped.alpha,
        LIMIT=None if clamped is None else clamped.limit,
        OF_OUTPUTS=of_outputs,
        OF_INPUTS=of_inputs,
        WHOLE=inputs % tile.inputs == 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        DEPENDENT=chip.dependent_launches,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chip.dependent_launches,
    )


@triton.jit(do_not_specialize=["output_vectors", "input_vectors", "chosen"])
def multiply_experts(
    x,
    weights,
    bias,
    tiles,
    order,
    scores,
    out,
    output_vectors,
    input_vectors,
    chosen,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OF_OUTPUTS: tl.constexpr,
    OF_INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Computes a tile of the product. With `ACTIVATION`, an expert has gate and up, or only up, and rows are those of x
    in `order`; with `scores`, sums are multiplied by them and stored in `order`. `WHOLE`: inputs fill whole tiles."""
    INNER: tl.constexpr = ACTIVATION is not None
    GATED: tl.constexpr = INNER and ACTIVATION != _SQUARED_RELU
    MATRICES: tl.constexpr = 2 if GATED else 1
    # The factors tell the compiler by what sizes divide.
    outputs, inputs = output_vectors * OF_OUTPUTS, input_vectors * OF_INPUTS
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, INPUTS)
    after_previous(DEPENDENT)
    entry = tiles + 3 * tl.program_id(0)
    expert, first_row, last_row = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    if first_row >= last_row:
        return
    row = first_row + tl.arange(0, ROWS)
    # Where a tile has no more rows or outputs, it reads the last one again, without a mask, and stores nothing.
    some_row, some_output = tl.minimum(row, last_row - 1), tl.minimum(output, outputs - 1)
    source, target = some_row.to(tl.int64), some_row.to(tl.int64)
    if INNER:
        source = tl.load(order + some_row) // chosen
    elif order is not None:
        target = tl.load(order + some_row)
    token_starts = x + source[None, :] * inputs + lanes[:, None]
    starts = weights + expert * (MATRICES * outputs * inputs) + some_output[:, None] * inputs + lanes[None, :]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    ups = sums
    for start in range(0, inputs, INPUTS):
        inside = start + lanes < inputs
        tokens = _load(token_starts + start, inside[:, None], WHOLE)
        sums = tl.dot(_load(starts + start, inside[None, :], WHOLE), tokens, sums, input_precision="ieee")
        if GATED:
            of_up = _load(starts + (outputs * inputs + start), inside[None, :], WHOLE)
            ups = tl.dot(of_up, tokens, ups, input_precision="ieee")
    if bias is not None:
        biases = bias + expert * (MATRICES * outputs) + some_output
        sums += tl.load(biases).to(tl.float32)[:, None]
        if GATED:
            ups += tl.load(biases + outputs).to(tl.float32)[:, None]
    if GATED:
        sums = activate(sums, ups, ACTIVATION) if LIMIT is None else activate_clamped(sums, ups, ALPHA, LIMIT)
    elif INNER:
        sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
        sums *= sums
    if scores is not None:
        sums *= tl.load(scores + target)[None, :]
    wanted = (output < outputs)[:, None] & (row < last_row)[None, :]
    tl.store(out + target[None, :] * outputs + output[:, None], sums.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def sum_choices(choices, scores, out, outputs, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Adds up a token's choices in their order; those with score 0 are not read."""
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_previous(DEPENDENT)
    sums = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        place = token * CHOSEN + choice
        wanted = tl.where(tl.load(scores + place) != 0.0, outputs, 0)
        sums += tl.load(choices + place * outputs + output, mask=output < wanted, other=0.0).to(tl.float32)
    tl.store(out + token * outputs + output, sums.to(out.dtype.element_ty), mask=output < outputs)

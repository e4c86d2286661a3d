"""Products with matrices quantised in groups: the weights of a row that share a scale have 4 or 8 bits each.

A program computes a tile of the product, as in `kernels.scaled_product`, whose tiles, splits and second kernel serve
here too. Levels are widened in registers, exactly. Products of a group are summed first, and then multiplied by its
scale in float32, so that no weight is rounded.

Levels of 4 bits are in words of 16 bits. A word has one level of each of four parts of a row, so that all levels of one
place in words are the weights of neighbouring inputs: no register changes its place when words become weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.attention_tiles import TRITON_TYPES, readable, widen
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.group_layout import IN_WORD, GroupedWeights, part_of
from torch_backend.kernels.scaled_product import WIDE_SHARED, ProductTile, add_and_scale, few_rows, split_length

_OUTPUTS, _MANY_OUTPUTS = 64, 128
"""Outputs of a tile for few rows, and for many."""

_INPUTS = 128
"""Inputs of a tile, for levels of 8 bits."""

MAX_ROWS = 1024
"""Maximum rows for the kernel. With more, widening all levels first costs less (see `kernels.scaled_product`)."""


def group_tile(rows: int, weights: GroupedWeights, chip: Chip) -> ProductTile:
    """The tile for a number of rows. Its inputs are the same for any number. 64 rows at a time take more registers than
    there are if there are zeros, and on chips with less shared memory."""
    inputs = IN_WORD * part_of(weights.group) if weights.bits == 4 else _INPUTS
    wide = chip.capability in WIDE_SHARED
    if rows <= 16:
        return ProductTile(16, _OUTPUTS, 4, 4, inputs)
    at_once = 32 if rows <= 32 or not wide or weights.zeros is not None else 64
    if few_rows(rows):
        return ProductTile(at_once, _OUTPUTS, 4, 3, inputs)
    return ProductTile(at_once, _MANY_OUTPUTS, 8, 3 if wide else 2, inputs)


def group_product(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None, chip: Chip) -> torch.Tensor:
    """Multiplies a contiguous `x [T, inputs]`, bfloat16 or float16, by the weights: `[T, outputs]` in the dtype of x.
    Sums are float32; `bias [outputs]` is added and the result rounded once. Raises `ValueError` for other shapes and
    dtypes."""
    check_inputs(x, weights)
    rows, outputs, inputs = len(x), weights.outputs, weights.inputs
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = group_tile(rows, weights, chip)
    length = split_length(rows, outputs, inputs, tile)
    splits = triton.cdiv(inputs, length)
    sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device) if splits > 1 else out
    launch(x, weights, bias, None, sums, outputs, length, splits, tile, chip)
    if splits > 1:
        add_and_scale(sums, None, None, bias, out, chip.dependent_launches)
    return out


def check_inputs(x: torch.Tensor, weights: GroupedWeights) -> None:
    """Raises `ValueError` for inputs that the kernel would misread."""
    if x.shape[1:] != (weights.inputs,) or not x.is_contiguous():
        raise ValueError(
            f"x is {list(x.shape)} with strides {list(x.stride())}; wanted is contiguous [T, {weights.inputs}]"
        )
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"there is no product of {x.dtype} and weights in groups")


def launch(
    x: torch.Tensor,
    weights: GroupedWeights,
    bias: torch.Tensor | None,
    tiles: torch.Tensor | None,
    target: torch.Tensor,
    outputs: int,
    length: int,
    splits: int,
    tile: ProductTile,
    chip: Chip,
) -> None:
    """Launches `multiply_groups`: a program for each tile of rows (of the table `tiles`, if there is one), of
    `outputs`, and split."""
    levels = weights.levels.view(torch.int32) if weights.bits == 4 else readable(weights.levels, chip)
    of_rows = triton.cdiv(len(x), tile.rows) if tiles is None else len(tiles)
    multiply_groups[(of_rows, triton.cdiv(outputs, tile.outputs), splits)](
        x,
        levels,
        weights.scales,
        weights.zeros,
        bias,
        tiles,
        target,
        len(x),
        outputs,
        weights.outputs,
        weights.inputs,
        levels.shape[1],
        length,
        SPLIT=splits > 1,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        GROUP=weights.group,
        PART=part_of(weights.group) if weights.bits == 4 else weights.group,
        BITS=weights.bits,
        FLOATS=weights.floats,
        COMPUTE=TRITON_TYPES[x.dtype],
        DEPENDENT=chip.dependent_launches,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chip.dependent_launches,
    )


@triton.jit(do_not_specialize=["rows"])
def multiply_groups(
    x,
    levels,
    scales,
    zeros,
    bias,
    tiles,
    target,
    rows,
    outputs,
    all_outputs,
    inputs,
    row_length,
    length,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    COMPUTE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Computes a tile of the product `[rows, outputs]`, or with `SPLIT` of a split's sums, `[splits, rows, outputs]`.
    `row_length`: of levels. A tile has parts of `PART` inputs; scales are read one tile ahead.

    With `tiles`, a table of `kernels.expert_product`, weights are those of all experts, `all_outputs` of them with
    `outputs` each, and a tile of rows belongs to one expert.
    """
    split = tl.program_id(2)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if tiles is None:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        wanted_rows, width = row < rows, outputs
    else:
        after_previous(DEPENDENT)
        entry = tiles + 3 * tl.program_id(0)
        expert, first_row, last_row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if first_row >= last_row:
            return
        row = first_row + tl.arange(0, ROWS)
        wanted_rows, width = row < last_row, all_outputs
        levels += expert.to(tl.int64) * outputs * row_length
        scales += expert * outputs
        if zeros is not None:
            zeros += expert * outputs
        if bias is not None:
            bias += expert * outputs
    wanted_outputs = output < outputs
    row_starts, output_starts = row.to(tl.int64) * inputs, output.to(tl.int64) * row_length
    lanes = tl.arange(0, PART)
    PARTS: tl.constexpr = INPUTS // PART
    PER_GROUP: tl.constexpr = GROUP // PART
    SUBTRACTED: tl.constexpr = 8.0 if BITS == 4 else 0.0
    first = split * length
    last = tl.minimum(first + length, inputs)
    own_scales = _of_groups(scales, first, last, output, wanted_outputs, width, GROUP, INPUTS)
    own_zeros = _of_groups(zeros, first, last, output, wanted_outputs, width, GROUP, INPUTS)
    if tiles is None:
        after_previous(DEPENDENT)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(first, last, INPUTS):
        if BITS == 4:
            # Rows are filled up to whole tiles.
            words = tl.load(
                levels + output_starts[:, None] + (start // 8 + tl.arange(0, PART // 2))[None, :],
                mask=wanted_outputs[:, None],
                other=0,
            )
        for part in tl.static_range(PARTS):
            place = start + part * PART + lanes
            inside = place < inputs
            tokens = tl.load(
                x + row_starts[None, :] + place[:, None], mask=wanted_rows[None, :] & inside[:, None], other=0.0
            )
            if BITS == 4:
                weights = _from_floats(words, part, COMPUTE) if FLOATS else _from_nibbles(words, part, COMPUTE)
            else:
                stored = tl.load(
                    levels + output_starts[:, None] + place[None, :],
                    mask=wanted_outputs[:, None] & inside[None, :],
                    other=0.0,
                )
                weights = widen(stored, COMPUTE)
            if part % PER_GROUP == 0:
                products = tl.zeros([OUTPUTS, ROWS], tl.float32)
                of_ones = products
            products = tl.dot(weights, tokens, products)
            if zeros is not None:
                # Each row has the same sums of inputs, where the products of its weights are.
                of_ones = tl.dot(_ones(OUTPUTS, PART, BITS, COMPUTE), tokens, of_ones)
            if part % PER_GROUP == PER_GROUP - 1:
                if zeros is not None:
                    zero = own_zeros[part // PER_GROUP].to(tl.float32)
                    products -= (zero - SUBTRACTED)[:, None] * of_ones
                scale = own_scales[part // PER_GROUP]
                sums += products * _wide(scale)[:, None]
        behind = start + INPUTS
        own_scales = _of_groups(scales, behind, last, output, wanted_outputs, width, GROUP, INPUTS)
        own_zeros = _of_groups(zeros, behind, last, output, wanted_outputs, width, GROUP, INPUTS)
    wanted = wanted_outputs[:, None] & wanted_rows[None, :]
    at = row.to(tl.int64)[None, :] * outputs + output[:, None]
    if SPLIT:
        tl.store(target + split.to(tl.int64) * rows * outputs + at, sums, mask=wanted)
    else:
        if bias is not None:
            sums += tl.load(bias + output, mask=wanted_outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(target + at, sums.to(target.dtype.element_ty), mask=wanted)


@triton.jit
def _of_groups(numbers, start, last, output, wanted, width, GROUP: tl.constexpr, INPUTS: tl.constexpr):
    """Scales or zeros `[OUTPUTS]` of the one, two or four groups of the tile at `start`, in front of three others; 0
    for groups from `last` on."""
    COUNT: tl.constexpr = INPUTS // GROUP
    if numbers is None:
        return 0, 0, 0, 0
    else:
        first = _of_group(numbers, start, last, output, wanted, width, GROUP)
        second, third, fourth = first, first, first
        if COUNT > 1:
            second = _of_group(numbers, start + GROUP, last, output, wanted, width, GROUP)
        if COUNT > 2:
            third = _of_group(numbers, start + 2 * GROUP, last, output, wanted, width, GROUP)
            fourth = _of_group(numbers, start + 3 * GROUP, last, output, wanted, width, GROUP)
        return first, second, third, fourth


@triton.jit
def _of_group(numbers, start, last, output, wanted, width, GROUP: tl.constexpr):
    at = (start // GROUP).to(tl.int64) * width + output
    return tl.load(numbers + at, mask=wanted & (start < last), other=0)


@triton.jit
def _from_nibbles(words, part: tl.constexpr, COMPUTE: tl.constexpr):
    """The levels of a part minus 8, `[OUTPUTS, PART]`. A word of 32 bits has those of two neighbours, which become a
    register of two numbers: the level is the last four bits of each, and the others are those of 128 in bfloat16, of
    1024 in float16."""
    bits = (words >> (4 * part)) & 0x000F000F
    if tl.bfloat16 == COMPUTE:
        return _pairs(bits | 0x43004300, COMPUTE) - tl.full([1, 1], 136.0, tl.float32).to(COMPUTE)
    else:
        return _pairs(bits | 0x64006400, COMPUTE) - tl.full([1, 1], 1032.0, tl.float32).to(COMPUTE)


@triton.jit
def _from_floats(words, part: tl.constexpr, COMPUTE: tl.constexpr):
    """The floats of a part, `[OUTPUTS, PART]`. The bits of a float of 4 bits, its sign moved to the front, are those of
    a number of 16 bits that is smaller by a power of two, the difference of the exponents' biases. This holds for its
    one subnormal number too."""
    signs = (words << (12 - 4 * part)) & -0x7FFF8000
    if tl.bfloat16 == COMPUTE:
        bits = words << (6 - 4 * part) if part < 2 else words >> (4 * part - 6)
        factor = tl.full([1, 1], 2.0**126, tl.float32).to(COMPUTE)
        return _pairs(signs | (bits & 0x01C001C0), COMPUTE) * factor
    else:
        bits = words << (9 - 4 * part) if part < 3 else words >> (4 * part - 9)
        factor = tl.full([1, 1], 2.0**14, tl.float32).to(COMPUTE)
        return _pairs(signs | (bits & 0x0E000E00), COMPUTE) * factor


@triton.jit
def _wide(scale):
    """Scales as float32, exactly; bytes are exponents. That of 0 is the largest subnormal power of two."""
    if scale.dtype == tl.uint8:
        bits = tl.where(scale == 0, 0x00400000, scale.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _ones(OUTPUTS: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr):
    """Ones `[OUTPUTS, PART]`; made like levels of 4 bits, so that the compiler gives both products the same layout of
    inputs, and can prefetch these."""
    if BITS == 8:
        return tl.full([OUTPUTS, PART], 1.0, tl.float32).to(COMPUTE)
    elif tl.bfloat16 == COMPUTE:
        return _pairs(tl.full([OUTPUTS, PART // 2], 0x3F803F80, tl.int32), COMPUTE)
    else:
        return _pairs(tl.full([OUTPUTS, PART // 2], 0x3C003C00, tl.int32), COMPUTE)


@triton.jit
def _pairs(bits, COMPUTE: tl.constexpr):
    """Words of 32 bits `[OUTPUTS, PART / 2]` as numbers of 16 bits `[OUTPUTS, PART]`."""
    both = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    return tl.reshape(both, [bits.shape[0], 2 * bits.shape[1]]).to(COMPUTE, bitcast=True)

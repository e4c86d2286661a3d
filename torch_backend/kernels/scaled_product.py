"""Products with 8-bit matrices that have a scale per row: values are widened in registers.

A program computes a tile of the product. Outputs are the rows of the matrix units' product, so that few tokens waste
none of these units, and widened values go there from registers.

If few programs would leave the chip idle, each sums a split of the inputs, and a second kernel adds the splits' sums in
order. In a step of up to 64 rows, splits depend only on the shape of the matrix. A row's result is then the same for
any other rows, provided that matrix units add in one order for any width of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.kernels.attention_tiles import TRITON_TYPES, has_float8, readable, widen
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous

_INPUTS = 128
"""Inputs of a tile: those of a row are a line of 128 bytes."""

_MIN_OUTPUTS = 64
"""Minimum outputs of a tile: the minimum of Hopper's matrix units."""

_FEW_ROWS = 64
"""Maximum rows of a tile for steps in which memory bandwidth sets the time."""

_PROGRAMS = 256
"""Approximate number of programs that fill a chip: two on each multiprocessor of an H100."""

_MIN_SPLIT = 512
"""Minimum inputs of a split: 32 KiB of values, enough to amortise the start of a program."""

_SUMMED = 1024
"""Outputs of a row that a program of the second kernel adds up."""

_MAX_ROWS, _MAX_ROWS_OF_BYTES = 1024, 256
"""Maximum rows for the kernel. With more, widening all values first, which moves five bytes for each, costs less than
the kernel's slower products. By arithmetic: for an H100 if the kernel reaches half of cuBLAS's rate; for float8 as
bytes, by its instructions for an A100."""

WIDE_SHARED = (80, 90, 100, 103)
"""Capabilities of chips whose programs may have over 160 KiB of shared memory; the others have 100."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The size of a program's work: `rows` of the input by `outputs`, and `inputs` at a time. `warps`, `stages`:
    Triton's."""

    rows: int
    outputs: int
    warps: int
    stages: int
    inputs: int = _INPUTS


def product_tile(rows: int, chip: Chip) -> ProductTile:
    """The tile for a number of rows. `stages - 1` tiles of 8 KiB of values are in flight: with two or three programs on
    a multiprocessor, about enough to keep an H100's memory busy."""
    if rows <= 16:
        return ProductTile(16, _MIN_OUTPUTS, 4, 4)
    if rows <= 32:
        return ProductTile(32, _MIN_OUTPUTS, 4, 4)
    if rows <= _FEW_ROWS:
        return ProductTile(_FEW_ROWS, _MIN_OUTPUTS, 4, 3)
    return ProductTile(128, 128, 8, 3 if chip.capability in WIDE_SHARED else 2)


def fixed_tile(dtype: torch.dtype) -> ProductTile:
    """The tile of `fixed_product`, for a dtype of inputs. With 16 bits, 32 KiB of values and inputs are in flight for
    each stage but one."""
    if dtype == torch.float32:
        return ProductTile(16, _MIN_OUTPUTS, 4, 2, 32)
    return ProductTile(_FEW_ROWS, _MIN_OUTPUTS, 4, 2)


def max_rows(values: torch.dtype, chip: Chip) -> int:
    """Maximum rows of a step for which the kernel should be faster than a product with values widened first."""
    as_bytes = values == torch.float8_e4m3fn and not has_float8(chip)
    return _MAX_ROWS_OF_BYTES if as_bytes else _MAX_ROWS


def few_rows(rows: int) -> bool:
    """Whether memory bandwidth sets the time of a step."""
    return rows <= _FEW_ROWS


def split_length(rows: int, outputs: int, inputs: int, tile: ProductTile) -> int:
    """Inputs of a split, a multiple of those of a tile; the last split may be shorter. Independent of the chip."""
    if few_rows(rows):
        programs, enough = triton.cdiv(outputs, tile.outputs), _PROGRAMS
    else:  # a multiprocessor holds one of these at a time
        programs, enough = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs), _PROGRAMS // 2
    wanted = triton.next_power_of_2(triton.cdiv(enough, programs))
    count = max(min(wanted, inputs // _MIN_SPLIT), 1)
    multiple = max(_INPUTS, tile.inputs)
    length: int = triton.cdiv(triton.cdiv(inputs, count), multiple) * multiple
    return length


def scaled_product(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    chip: Chip,
) -> torch.Tensor:
    """Multiplies `x [T, inputs]`, bfloat16 or float16, by `values [outputs, inputs]`, int8 or float8 (e4m3): `[T,
    outputs]`, in the dtype of x. Sums are float32, multiplied by `scales`, float32 `[outputs]`; `bias [outputs]` is
    added and the result rounded once. All are contiguous. float8 values must not be NaN. Raises `ValueError` for other
    shapes and dtypes."""
    _check(x, values, scales)
    if x.dtype == torch.float32:
        raise ValueError(f"there is no product of {x.dtype} and {values.dtype}")
    rows, outputs = len(x), len(values)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    multiply_and_scale(x, None, readable(values, chip), scales, bias, out, chip)
    return out


def fixed_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    """Multiplies `x [T, inputs]`, float32, bfloat16 or float16, by `values [outputs, inputs]`: int8 or float8 with
    `scales`, or of the dtype of x without. `[T, outputs]` in the dtype of x, rounded as by `scaled_product`. There is
    one tile and one partition of the inputs for any number of rows, so a row's result is the same for any others.
    Raises `ValueError` as `scaled_product`."""
    _check(x, values, scales)
    rows, outputs = len(x), len(values)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if scales is None:
        stored = values
    elif x.dtype == torch.float32:
        # Triton 3.7 multiplies values that a kernel widens to float32 as TensorFloat-32 on sm_100.
        stored = values.float()
    else:
        stored = readable(values, chip)
    for first in range(0, rows, _MAX_ROWS):
        part = slice(first, first + _MAX_ROWS)
        multiply_and_scale(x[part], None, stored, scales, bias, out[part], chip, tile=fixed_tile(x.dtype))
    return out


def _check(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Raises `ValueError` for tensors that the kernel would misread."""
    outputs, inputs = values.shape
    shaped = x.shape[1:] == (inputs,) and (scales is None or scales.shape == (outputs,))
    if not (shaped and x.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            f"x is {list(x.shape)} with strides {list(x.stride())}, values are {list(values.shape)} and scales "
            f"{None if scales is None else list(scales.shape)}; wanted are contiguous [T, inputs] and [outputs, "
            "inputs], and [outputs]"
        )
    stored = (x.dtype,) if scales is None else (torch.int8, torch.float8_e4m3fn)
    if x.dtype not in TRITON_TYPES or values.dtype not in stored:
        raise ValueError(f"there is no product of {x.dtype} and {values.dtype}")


def multiply_and_scale(
    x: torch.Tensor,
    of_tokens: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    chip: Chip,
    *,
    tile: ProductTile | None = None,
) -> None:
    """Writes the product of `x [T, inputs]`, T > 0, and `values [outputs, inputs]` into `out [T, outputs]`. With
    `of_tokens`, float32 `[T]`, x is int8 too: sums are int32, exact, and also multiplied by these scales. `tile`: also
    decides how inputs are split; by default the fastest one for the number of rows."""
    (rows, inputs), outputs = x.shape, len(values)
    partitioned = rows if tile is None else tile.rows
    tile = tile or product_tile(rows, chip)
    length = split_length(partitioned, outputs, inputs, tile)
    splits = triton.cdiv(inputs, length)
    kind = torch.float32 if of_tokens is None else torch.int32
    sums = torch.empty((splits, rows, outputs), dtype=kind, device=x.device) if splits > 1 else out
    dependent = chip.dependent_launches
    multiply_tiles[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), splits)](
        x,
        of_tokens,
        values,
        scales,
        bias,
        sums,
        rows,
        outputs,
        inputs,
        length,
        SPLIT=splits > 1,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        COMPUTE=None if of_tokens is not None else TRITON_TYPES[x.dtype],
        DEPENDENT=dependent,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=dependent,
    )
    if splits > 1:
        add_and_scale(sums, of_tokens, scales, bias, out, dependent)


def add_and_scale(
    sums: torch.Tensor,
    of_tokens: torch.Tensor | None,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    dependent: bool,
) -> None:
    """Writes the sum of `sums [splits, T, outputs]`, float32 or int32, times the scales, into `out [T, outputs]`."""
    splits, rows, outputs = sums.shape
    add_splits[(rows, triton.cdiv(outputs, _SUMMED))](
        sums,
        of_tokens,
        scales,
        bias,
        out,
        rows,
        outputs,
        SPLITS=splits,
        OUTPUTS=_SUMMED,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


@triton.jit(do_not_specialize=["rows"])
def multiply_tiles(
    x,
    of_tokens,
    values,
    scales,
    bias,
    target,
    rows,
    outputs,
    inputs,
    length,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Computes a tile of the product `[rows, outputs]`, or with `SPLIT` of a split's sums, `[splits, rows, outputs]`. x
    is of dtype `COMPUTE`, or int8 with `of_tokens`. Tiles of rows change fastest over programs: concurrent programs
    read the same values."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    row_starts, output_starts = row.to(tl.int64) * inputs, output.to(tl.int64) * inputs
    first = split * length
    after_previous(DEPENDENT)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32 if of_tokens is None else tl.int32)
    for start in range(first, tl.minimum(first + length, inputs), INPUTS):
        place = start + tl.arange(0, INPUTS)
        inside = place < inputs
        stored = tl.load(
            values + output_starts[:, None] + place[None, :],
            mask=(output < outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        tokens = tl.load(
            x + row_starts[None, :] + place[:, None], mask=(row < rows)[None, :] & inside[:, None], other=0.0
        )
        if of_tokens is None:
            sums = tl.dot(widen(stored, COMPUTE), tokens, sums, input_precision="ieee")
        else:
            sums = tl.dot(stored, tokens, sums, out_dtype=tl.int32)
    wanted = (output < outputs)[:, None] & (row < rows)[None, :]
    at = row.to(tl.int64)[None, :] * outputs + output[:, None]
    if SPLIT:
        tl.store(target + split.to(tl.int64) * rows * outputs + at, sums, mask=wanted)
    else:
        product = sums.to(tl.float32)
        if of_tokens is not None:
            product *= tl.load(of_tokens + row, mask=row < rows, other=0.0)[None, :]
        if scales is not None:
            product *= tl.load(scales + output, mask=output < outputs, other=0.0)[:, None]
        if bias is not None:
            product += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(target + at, product.to(target.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def add_splits(
    sums,
    of_tokens,
    scales,
    bias,
    out,
    rows,
    outputs,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Adds up the splits' sums in order, for some outputs of a row, and scales them."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    if scales is not None:
        scale = tl.load(scales + output, mask=inside, other=0.0)
    after_previous(DEPENDENT)
    total = tl.zeros([OUTPUTS], sums.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * rows + row) * outputs + output, mask=inside, other=0)
    product = total.to(tl.float32)
    if of_tokens is not None:
        product *= tl.load(of_tokens + row)
    if scales is not None:
        product *= scale
    if bias is not None:
        product += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, product.to(out.dtype.element_ty), mask=inside)

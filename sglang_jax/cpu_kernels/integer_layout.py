"""Memory layouts of matrices in blocks for integer products (`integer_product`); needs no compiler.

A tile is as many outputs as a vector of the processor has lanes. For each 32 inputs of a tile there are vectors of
levels, with four inputs of each output in a word, and scales in another array.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_jax.checkpoint.encoding import AnyValues, Encoding, Stored, ValueType
from sglang_jax.checkpoint.ggml_blocks import BLOCK, FLOAT4, FLOAT4_ZERO, BlockType, Unpacked
from sglang_jax.checkpoint.group_blocks import OF_NVFP4, SIZES, GroupType, Levels
from sglang_jax.checkpoint.reader import Array
from sglang_jax.cpu_kernels.block_layout import LARGEST, BlockForm, PackedBlocks, PackedShapes, blocks_of
from sglang_jax.cpu_kernels.huge_pages import huge_pages
from sglang_jax.runner.this_machine import cpu_cores

OF_BLOCK = 4
"""Words of a row of activations for each block: see `integer_tiles.round_row`."""

SMALLEST = 2.0**-120
"""Divided by smaller numbers, 127 is infinite in float32."""

OUTPUTS_OF_ITEM = 32
"""Rows of the matrix in a work item."""

SUPER_BLOCK = 8
"""Blocks of 32 that share factors."""

_WEIGHTS_AT_A_TIME = 2**18
"""Weights that are packed together: few enough for a core's cache."""


@dataclass(frozen=True, slots=True)
class LevelKind:
    """Levels and scales of a type of blocks, as the kernel reads them: see `Unpacked`.

    - `bits`: of a level: 4, 5, 6 or 8, which are signed.
    - `zero`: is subtracted from levels.
    - `group`: inputs that share a scale, 16, 32, 64 or 128; None if all of a row share one.
    - `offsets`: whether groups have offsets.
    - `factors`: whether scales and offsets are int8, multiplied by float16 factors of 256 inputs.
    - `wide`: whether scales and offsets are float32; they are float16 without this and `factors`.
    - `table`: what levels of 4 bits stand for, if not for themselves.
    """

    bits: int
    zero: int = 0
    group: int | None = BLOCK
    offsets: bool = False
    factors: bool = False
    wide: bool = False
    table: tuple[int, ...] = ()

    @property
    def bits_multiplied(self) -> int:
        """Bits of the largest number that a level stands for."""
        return max(self.table).bit_length() if self.table else self.bits

    @property
    def numbers(self) -> int:
        """Numbers per scale: it, and perhaps an offset."""
        return 2 if self.offsets else 1

    def level_bytes(self, outputs: int) -> int:
        """Bytes of the levels of 32 inputs of a tile."""
        return outputs * BLOCK * self.bits // 8

    @property
    def parts(self) -> int:
        """Parts of 32 inputs with a scale each."""
        return 2 if self.group == BLOCK // 2 else 1

    @property
    def blocks_with_scales(self) -> int:
        """Blocks of 32 whose scales are together; 0 for all of a row."""
        if self.group is None:
            return 0
        return SUPER_BLOCK if self.factors else max(self.group // BLOCK, 1)

    def scale_bytes(self, outputs: int) -> int:
        """Bytes of the scales of these blocks of a tile."""
        if self.factors:
            return outputs * self.numbers * (2 + SUPER_BLOCK * self.parts)
        return outputs * self.numbers * self.parts * (4 if self.wide else 2)


KINDS: dict[AnyValues, LevelKind] = {
    ValueType.INT8: LevelKind(8, group=None, wide=True),
    BlockType.Q4_0: LevelKind(4, zero=8),
    BlockType.Q4_1: LevelKind(4, offsets=True),
    BlockType.Q5_0: LevelKind(5, zero=16),
    BlockType.Q5_1: LevelKind(5, offsets=True),
    BlockType.Q8_0: LevelKind(8),
    BlockType.Q4_K: LevelKind(4, offsets=True, factors=True),
    BlockType.Q5_K: LevelKind(5, offsets=True, factors=True),
    BlockType.Q6_K: LevelKind(6, zero=32, group=16, factors=True),
    BlockType.MXFP4: LevelKind(4, zero=FLOAT4_ZERO, wide=True, table=FLOAT4),
}


def _of_groups(levels: Levels, group: int, zeros: bool) -> LevelKind:
    if levels is Levels.FLOAT4_E2M1:
        return LevelKind(4, FLOAT4_ZERO, group, wide=True, table=FLOAT4)
    return LevelKind(levels.bits, 0 if zeros else levels.zero, group, offsets=zeros, wide=True)


_INTEGERS = (Levels.INT4, Levels.INT8)

ALL_KINDS = (
    *KINDS.values(),
    *(_of_groups(levels, group, zeros) for levels in _INTEGERS for group in SIZES for zeros in (False, True)),
    *(_of_groups(Levels.FLOAT4_E2M1, group, False) for group in (OF_NVFP4, *SIZES) if group != BLOCK),
)
"""By the numbers that kernels have as constants."""


def has_kind(values: AnyValues) -> bool:
    """Whether integer products read matrices of a type."""
    return values.levels is not Levels.FLOAT8_E4M3 if isinstance(values, GroupType) else values in KINDS


def kind_of(values: AnyValues) -> LevelKind:
    if isinstance(values, GroupType):
        return _of_groups(values.levels, values.weights, values.zeros)
    return KINDS[values]


def pack_for_integers(stored: Stored, *, outputs: int, zero: int) -> PackedBlocks:
    """Converts blocks of a multiple of `outputs` rows.

    Levels: uint8 `[tiles, blocks of 32, bits, outputs, 4]`. For 8 bits, the third axis is groups of four inputs, and
    `zero` is added. Else its first four entries have the low four bits of two groups each, in both halves of a byte;
    the next one has the fifth bits, bit i that of group i, or the next two the upper two bits of four groups each.

    Scales: float16, or float32 if they are wide, `[tiles, groups, 1 or 2, outputs]`, offsets behind scales. If there
    are factors, uint8 `[tiles, blocks of 256, bytes]`: factors, float16 `[1 or 2, outputs]`, then int8 `[8 or 16, 1 or
    2, outputs]`.
    """
    kind, (rows, inputs) = kind_of(stored.encoding.values), stored.shape
    shapes = _shapes(stored.encoding, rows // outputs, inputs // BLOCK, outputs=outputs)
    levels, scales = (huge_pages.zeros(*each) for each in shapes)
    words = levels.view(np.uint32)[..., 0]
    together = max(_WEIGHTS_AT_A_TIME // (outputs * inputs), 1)

    def write(first: int) -> None:
        some = slice(first, first + together)
        blocks = blocks_of(stored.of_rows(partial(_rows, some.start * outputs, some.stop * outputs)))
        own = blocks.levels.view(np.uint8) + np.uint8(zero) if kind.bits == 8 else blocks.levels
        groups = own.view(np.uint32).reshape(-1, outputs, own.shape[1], BLOCK // 4).transpose(0, 2, 3, 1)
        _write_planes(groups, kind.bits, words[some])
        scales[some] = _packed_scales(blocks, outputs)

    # numpy computes without the interpreter's lock.
    with ThreadPoolExecutor(len(cpu_cores())) as pool:
        for _ in pool.map(write, range(0, rows // outputs, together)):
            pass
    return PackedBlocks(levels, scales)


def _rows(first: int, last: int, array: Array) -> Array:
    return array[first:last]


def _write_planes(groups: Array, bits: int, planes: Array) -> None:
    """Splits levels `[tiles, blocks, 8, outputs]`, four bytes of a group of inputs in each word, into `planes` of their
    low bits and of their upper ones."""
    if bits == 8:
        planes[...] = groups
        return
    groups = np.ascontiguousarray(groups)
    low = groups & np.uint32(0x0F0F0F0F)
    np.bitwise_or(low[:, :, ::2], low[:, :, 1::2] << 4, out=planes[:, :, :4])
    if bits == 4:
        return
    upper = groups >> 4 & np.uint32(((1 << (bits - 4)) - 1) * 0x01010101)
    in_byte = 8 // (bits - 4)
    for number in range(bits - 4):
        plane = planes[:, :, 4 + number]
        plane[...] = upper[:, :, number * in_byte]
        for place in range(1, in_byte):
            plane |= upper[:, :, number * in_byte + place] << place * (bits - 4)


def _packed_scales(blocks: Unpacked, outputs: int) -> Array:
    numbers = [blocks.scales] if blocks.offsets is None else [blocks.scales, blocks.offsets]
    of_tiles = np.stack(numbers).reshape(len(numbers), -1, outputs, blocks.scales.shape[1]).transpose(1, 3, 0, 2)
    in_order: Array = np.ascontiguousarray(of_tiles)
    if blocks.factors is None:
        return in_order
    tiles, count = len(in_order), blocks.factors.shape[1]
    factors = np.ascontiguousarray(blocks.factors.reshape(tiles, outputs, count, -1).transpose(0, 2, 3, 1))
    parts = [each.reshape(tiles, count, -1).view(np.uint8) for each in (factors, in_order)]
    return np.concatenate(parts, axis=2)


def rounded_rows(x: Array) -> Array:
    """Rows `[T, inputs]` as integer products round them, float32: the numbers nearest to them of 255 in each block of
    32; 0 in blocks of numbers up to `SMALLEST`."""
    parts = x.astype(np.float32).reshape(len(x), -1, BLOCK)
    largest = np.abs(parts).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > SMALLEST, np.float32(127) / largest, np.float32(0))
    found: Array = (np.rint(parts * inverse) * (largest / np.float32(127))).reshape(x.shape)
    return found


def scratch_floats(inputs: int, *, outputs: int) -> int:
    """float32 words of scratch of each thread: rounded rows, their scales, sums of two tiles."""
    return LARGEST * (inputs // 4 + OF_BLOCK * (inputs // BLOCK)) + 2 * LARGEST * outputs


def _shapes(encoding: Encoding, tiles: int, blocks: int, *, outputs: int) -> PackedShapes:
    kind = kind_of(encoding.values)
    levels = (tiles, blocks, kind.bits, outputs, 4), np.dtype(np.uint8)
    groups = blocks // kind.blocks_with_scales if kind.blocks_with_scales else 1
    if not kind.factors:
        groups *= kind.parts
    if kind.factors:
        return levels, ((tiles, groups, kind.scale_bytes(outputs)), np.dtype(np.uint8))
    return levels, ((tiles, groups, kind.numbers, outputs), np.dtype(np.float32 if kind.wide else np.float16))


def _form(name: str, outputs: int, zero: int) -> BlockForm:
    return BlockForm(
        name,
        outputs,
        OUTPUTS_OF_ITEM // outputs,
        has_kind,
        partial(pack_for_integers, outputs=outputs, zero=zero),
        partial(_shapes, outputs=outputs),
        partial(scratch_floats, outputs=outputs),
        rounded_rows,
        zero,
    )


SIXTEEN_OUTPUTS, EIGHT_OUTPUTS = _form("int8_16", 16, 128), _form("int8_8", 8, 128)
"""For instructions with one unsigned side: 8-bit values have 128 added."""

EIGHT_SIGNED_OUTPUTS = _form("int8_8_signed", 8, 0)

"""Matrices quantised in groups, in the order in which `kernels.group_product` reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

GROUPS = (32, 64, 128)
"""Numbers of weights in a group; groups of floats of 4 bits may have 16, too."""

IN_WORD = 4
"""Levels of 4 bits in a word of 16 bits."""

_MAX_PART = 64
"""Maximum words of a tile and a row: a line of 128 bytes."""

_WIDENED_AT_ONCE = 2**24
"""Weights to widen at a time, which takes up to 10 bytes for each."""

_LEVELS = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_SCALES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of 4 bits: E2M1 of the Open Compute Project's formats."""


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """A matrix `[outputs, inputs]` in groups of `group` weights of a row. A weight is `scale * (level - zero)`.

    - `levels`: of 8 bits int8 or float8 (e4m3) `[outputs, inputs]`. Of 4 bits int16 `[outputs, words]`: for each tile
      of `4 * part` inputs `part` words, word i with the levels of inputs i, part + i, 2 * part + i, 3 * part + i from
      its lowest bits on. The last tile of a row is filled up.
    - `scales`: `[groups, outputs]`, bfloat16, float16 or float32; or uint8 for the exponents of powers of two, 127 for
      1 (E8M0), which are not 255.
    - `zeros`: the same in uint8 for levels of 4 bits, in int8 for int8; None for 8 with integers of 4 bits, and for 0
      with others.
    - `floats`: levels of 4 bits stand for `FLOAT4`.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    floats: bool = False

    @property
    def outputs(self) -> int:
        return len(self.levels)

    @property
    def inputs(self) -> int:
        return len(self.scales) * self.group

    @property
    def bits(self) -> int:
        return 4 if self.levels.dtype == torch.int16 else 8

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def to(self, device: torch.device) -> GroupedWeights:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, levels=self.levels.to(device), scales=self.scales.to(device), zeros=zeros)

    def part(self, outputs: slice) -> GroupedWeights:
        """The matrix of some outputs, a view."""
        zeros = None if self.zeros is None else self.zeros[:, outputs]
        return replace(self, levels=self.levels[outputs], scales=self.scales[:, outputs], zeros=zeros)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[outputs, inputs]`, rounded to `dtype` once."""
        out = torch.empty((self.outputs, self.inputs), dtype=dtype, device=self.levels.device)
        rows = max(_WIDENED_AT_ONCE // self.inputs, 1)
        for first in range(0, self.outputs, rows):
            part = slice(first, first + rows)
            zeros = None if self.zeros is None else self.zeros[:, part].t()
            self._widen(self.levels[part], self.scales[:, part].t(), zeros, out[part])
        return out

    def rows(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `[T]` of the weights, `[T, inputs]`."""
        out = torch.empty((len(numbers), self.inputs), dtype=dtype, device=self.levels.device)
        zeros = None if self.zeros is None else self.zeros[:, numbers].t()
        self._widen(self.levels[numbers], self.scales[:, numbers].t(), zeros, out)
        return out

    def _widen(self, stored: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes some rows of the weights. Differences of levels and zeros are exact in every dtype."""
        rows = len(stored)
        if self.bits == 4:
            words = stored.view(rows, -1, 1, part_of(self.group))
            places = torch.arange(0, 4 * IN_WORD, 4, dtype=torch.int16, device=stored.device)
            stored = (words >> places[:, None] & 15).view(rows, -1)[:, : self.inputs]
        if self.floats:
            levels = torch.tensor(FLOAT4, dtype=out.dtype, device=out.device)[stored.int()]
        else:
            levels = stored.to(out.dtype)
        levels = levels.view(rows, -1, self.group)
        if zeros is not None:
            levels -= zeros.to(out.dtype)[..., None]
        elif self.bits == 4 and not self.floats:
            levels -= 8
        if scales.dtype == torch.uint8:
            scales = torch.exp2(scales.double() - 127).float()
        torch.mul(levels, scales[..., None], out=out.view(levels.shape))


def part_of(group: int) -> int:
    """Words of a tile and a row, for levels of 4 bits: each part of a tile lies within a group."""
    return min(group, _MAX_PART)


def pack_groups(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, *, floats: bool = False
) -> GroupedWeights:
    """Brings a matrix to the order of the kernel. `levels [outputs, inputs]`: int8 or float8, or uint8 from 0 to 15 for
    4 bits, with `floats` those of `FLOAT4`; `scales`, `zeros`: `[outputs, groups]`, see `GroupedWeights`. Raises
    `ValueError` for other shapes, dtypes and groups."""
    outputs, inputs = levels.shape
    groups = (16, *GROUPS) if floats else GROUPS
    if group not in groups or inputs % group:
        raise ValueError(f"groups have {group} of {inputs} inputs; wanted are groups of {groups} that divide inputs")
    wanted = (outputs, inputs // group)
    if scales.shape != wanted or (zeros is not None and (zeros.shape != wanted or zeros.dtype != levels.dtype)):
        found = None if zeros is None else f"{zeros.dtype} {list(zeros.shape)}"
        raise ValueError(
            f"scales are {list(scales.shape)} and zeros {found}; wanted are {list(wanted)}, zeros in the dtype "
            "of levels"
        )
    if scales.dtype not in _SCALES or levels.dtype not in _LEVELS:
        raise ValueError(f"there is no product of {levels.dtype} in groups with scales in {scales.dtype}")
    if floats and levels.dtype != torch.uint8:
        raise ValueError(f"floats of 4 bits are uint8, got {levels.dtype}")
    if zeros is not None and (floats or levels.dtype == torch.float8_e4m3fn):
        raise ValueError("levels of floats have no zeros")
    own = _words(levels, part_of(group)) if levels.dtype == torch.uint8 else levels.contiguous()
    of_groups = None if zeros is None else zeros.t().contiguous()
    return GroupedWeights(own, scales.t().contiguous(), of_groups, group, floats)


def _words(levels: torch.Tensor, part: int) -> torch.Tensor:
    """See `GroupedWeights.levels`."""
    outputs, inputs = levels.shape
    filled = functional.pad(levels, (0, -inputs % (IN_WORD * part))).view(outputs, -1, IN_WORD, part)
    words = filled[:, :, 0].to(torch.int16)
    for place in range(1, IN_WORD):
        words |= filled[:, :, place].to(torch.int16) << 4 * place
    return words.view(outputs, -1)

"""Matrices in groups for tests of Triton's kernels, and copies of a kernel's module with a planted fault."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import torch

from torch_backend.kernels.group_layout import GroupedWeights, pack_groups

NIBBLES, INT8, FLOAT8, FLOAT4 = torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
KINDS = [(NIBBLES, False), (NIBBLES, True), (INT8, False), (INT8, True), (FLOAT8, False), (FLOAT4, False)]


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(
    outputs: int, inputs: int, group: int, levels: torch.dtype, zeros: bool, scales: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, GroupedWeights]:
    """Float64 weights, and the same ones packed. Levels are all of a type; neighbouring scales are very different.
    Those of `FLOAT4` are powers of two, whatever `scales` says."""
    random, groups = torch.Generator().manual_seed(1), (outputs, inputs // group)
    if levels == FLOAT4:
        found = torch.randint(0, 16, (outputs, inputs), generator=random).to(NIBBLES)
        exponents = (124 + torch.randperm(groups[0] * groups[1], generator=random) % 7).view(groups).to(NIBBLES)
        return float4(found, exponents), pack_groups(found, exponents, None, group, floats=True)
    if levels == FLOAT8:
        found = (40 * torch.randn((outputs, inputs), generator=random)).clamp(-448, 448).to(levels)
    else:
        least, most = (0, 16) if levels == NIBBLES else (-128, 128)
        found = torch.randint(least, most, (outputs, inputs), generator=random).to(levels)
    sizes = 10.0 ** (torch.arange(groups[0] * groups[1]).view(groups) % 3 - 2)
    scale = (sizes * (1 + torch.rand(groups, generator=random))).to(scales)
    zero = torch.randint(0, 17, groups, generator=random).to(levels) if zeros else None
    subtracted = 8.0 if levels == NIBBLES and zero is None else 0.0 if zero is None else zero.double()[..., None]
    weights = (found.double().view(*groups, group) - subtracted) * scale.double()[..., None]
    return weights.view(outputs, inputs), pack_groups(found, scale, zero, group)


def float4(levels: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Float64 weights `[outputs, inputs]` of floats of 4 bits and exponents of powers of two `[outputs, groups]`."""
    numbers = levels.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = exponents.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return torch.from_numpy(numbers.reshape(*scales.shape, -1) * scales[..., None]).view(levels.shape)


def scales_of(packed: GroupedWeights) -> torch.Tensor:
    """The scale of each weight, float64 `[outputs, inputs]`."""
    scales = torch.exp2(packed.scales.double() - 127) if packed.scales.dtype == NIBBLES else packed.scales.double()
    return scales.t().repeat_interleave(packed.group, 1)


@contextmanager
def broken(module: ModuleType, folder: Path, right: str, wrong: str) -> Iterator[ModuleType]:
    """A copy of a module with a planted fault: `wrong` replaces `right` in its text."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert right in source
    file = folder / f"broken_{Path(module.__file__).name}"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    try:
        spec.loader.exec_module(found)
        yield found
    finally:
        del sys.modules[file.stem]

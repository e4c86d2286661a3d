"""Matrices quantised in groups on a GPU, and their products."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.reader import Role
from torch_backend.kernels.group_layout import GroupedWeights, pack_groups
from torch_backend.layers.parameter import Loadable, drop_value
from torch_backend.layers.scaled_products import ROWS_TRIED, runs_right

logger = logging.getLogger(__name__)

GroupedProduct = Callable[[torch.Tensor, GroupedWeights, torch.Tensor | None], torch.Tensor]
"""`x [T, inputs]`, weights and a bias `[outputs]` → `[T, outputs]`, in the dtype of x."""

_LEVELS = {
    Levels.INT4: torch.uint8,
    Levels.FLOAT4_E2M1: torch.uint8,
    Levels.INT8: torch.int8,
    Levels.FLOAT8_E4M3: torch.float8_e4m3fn,
}
_SCALES = {
    Scales.FLOAT16: torch.float16,
    Scales.BFLOAT16: torch.bfloat16,
    Scales.FLOAT32: torch.float32,
    Scales.POWER_OF_TWO: torch.uint8,
}


class GroupedMatrix(Loadable):
    """A matrix quantised in groups, and an optional bias of its product. Loaded as stored, then rearranged once."""

    def __init__(
        self, kind: GroupType, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.kind, self.shape, self.dtype = kind, (outputs, inputs), dtype
        blocks = (outputs, inputs // kind.weights, kind.nbytes)
        self.values = self.declare("values", blocks, torch.uint8, *parts, role=Role.VALUES)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self._weights: GroupedWeights | None = None
        self._product: GroupedProduct = multiply_widened

    def pack(self) -> None:
        """Rearranges the loaded blocks, and chooses the product on their device, before the first product."""
        self._weights = pack_blocks(self.kind, self.values)
        self._product = product_for(self.kind, self.values.device, self.dtype)
        self.values = drop_value(self.values)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `PlainMatrix.multiply`."""
        assert self._weights is not None
        return self._product(x, self._weights, self.bias)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `PlainMatrix.rows`."""
        assert self._weights is not None
        return self._weights.rows(numbers, self.dtype)


def pack_blocks(kind: GroupType, blocks: torch.Tensor) -> GroupedWeights:
    """Rearranges blocks, uint8 `[outputs, groups, bytes]` as `GroupType` has them, on their device."""
    outputs, groups, _ = blocks.shape
    levels = blocks[..., kind.level_places]
    if kind.levels.bits == 4:
        levels = torch.cat((levels & 15, levels >> 4), dim=-1)
    stored = _LEVELS[kind.levels]
    scales = blocks[..., kind.scale_places].contiguous().view(_SCALES[kind.scales]).view(outputs, groups)
    zeros = blocks[..., -1].contiguous().view(stored) if kind.zeros else None
    floats = kind.levels is Levels.FLOAT4_E2M1
    return pack_groups(levels.contiguous().view(stored).view(outputs, -1), scales, zeros, kind.weights, floats=floats)


def multiply_widened(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies after widening all weights to the dtype of x."""
    return functional.linear(x, weights.widened(x.dtype), bias)


def product_for(kind: GroupType, device: torch.device, dtype: torch.dtype) -> GroupedProduct:
    """Chooses the product of a type of matrices on a device, and logs it: a kernel on a GPU, where it works."""
    if device.type == "cuda" and dtype != torch.float32 and kernel_works(kind, device, dtype):
        _log_product(kind, "by a kernel that widens them in registers")
        return kernel_product_on(device)
    _log_product(kind, f"after they are widened to {str(dtype).removeprefix('torch.')}, in each product")
    return multiply_widened


@functools.cache
def _log_product(kind: GroupType, how: str) -> None:
    logger.info("Matrices of %s are multiplied %s", kind.value, how)


def kernel_product_on(device: torch.device) -> GroupedProduct:
    """The product by a Triton kernel; for many rows, by widened weights."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.group_product import MAX_ROWS, group_product

    chip = Chip.of(device)

    def multiply(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            return multiply_widened(x, weights, bias)
        return group_product(x.contiguous(), weights, bias, chip)

    return multiply


@functools.cache
def kernel_works(kind: GroupType, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel's results on a GPU are correct: tested on small products; a failure is logged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(ROWS_TRIED), 1280), generator=generator).to(dtype)
    weights = random_weights(kind, 72, 1280, generator)
    exact = functional.linear(x.double(), weights.widened(torch.float64))

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return kernel_product_on(device)(rows.to(device), weights.to(device), None).cpu()

    return runs_right(multiply, x, exact, f"Triton's kernel for matrices of {kind.value}")


def random_weights(kind: GroupType, outputs: int, inputs: int, generator: torch.Generator) -> GroupedWeights:
    """A matrix of a type on the CPU, to try kernels on."""
    stored, groups = _LEVELS[kind.levels], (outputs, inputs // kind.weights)
    if kind.levels.bits == 4:
        levels = torch.randint(16, (outputs, inputs), generator=generator).to(stored)
    else:
        levels = (30 * torch.randn((outputs, inputs), generator=generator)).clamp(-127, 127).to(stored)
    zeros = torch.randint(16, groups, generator=generator).to(stored) if kind.zeros else None
    if kind.scales is Scales.POWER_OF_TWO:
        scales = torch.randint(120, 128, groups, generator=generator).to(torch.uint8)
    else:
        scales = torch.rand(groups, generator=generator).to(_SCALES[kind.scales])
    return pack_groups(levels, scales, zeros, kind.weights, floats=kind.levels is Levels.FLOAT4_E2M1)

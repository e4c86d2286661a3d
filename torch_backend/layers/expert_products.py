"""Products of rows sorted by expert on a GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from sglang_jax.checkpoint.group_blocks import GroupType
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.layers.grouped import pack_blocks, random_weights
from torch_backend.layers.scaled_products import ROWS_TRIED, runs_right

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SortedRows:
    """Which rows of a step belong to which expert: the experts of rows, int64 `[M]`, in ascending order; and how many
    rows each has, int32 `[experts]`. The last rows may be padding, of the nonexistent expert `experts`."""

    experts: torch.Tensor
    sizes: torch.Tensor

    @cached_property
    def ends(self) -> torch.Tensor:
        """The row past the last one of each expert: int32 `[experts]`."""
        return self.sizes.cumsum(0, dtype=torch.int32)

    @cached_property
    def existing(self) -> torch.Tensor:
        """The experts of rows; that of padding is any."""
        return self.experts.clamp(max=len(self.sizes) - 1)

    @cached_property
    def tables(self) -> dict[int, torch.Tensor]:
        """The kernel's tables of tiles, by the rows of a tile, which the products of a layer share."""
        return {}


ExpertProduct = Callable[[torch.Tensor, GroupedWeights, torch.Tensor | None, SortedRows], torch.Tensor]
"""`x [M, inputs]`, the matrices of all experts, one above the other, biases `[experts, outputs]` and the experts of
rows → `[M, outputs]`, in the dtype of x. Outputs of padding are undefined."""


def pack_experts(kind: GroupType, blocks: torch.Tensor) -> GroupedWeights:
    """Rearranges blocks, uint8 `[experts, outputs, groups, bytes]`, to one matrix of all experts, one above the other.
    One expert at a time, so that little more than the matrices is in memory."""
    experts, outputs = blocks.shape[:2]
    first = pack_blocks(kind, blocks[0])
    levels = first.levels.new_empty((experts * outputs, first.levels.shape[1]))
    scales = first.scales.new_empty((len(first.scales), experts * outputs))
    zeros = None if first.zeros is None else first.zeros.new_empty(scales.shape)
    whole = GroupedWeights(levels, scales, zeros, first.group, first.floats)
    for expert in range(experts):
        own = pack_blocks(kind, blocks[expert])
        place = whole.part(slice(expert * outputs, (expert + 1) * outputs))
        place.levels.copy_(own.levels)
        place.scales.copy_(own.scales)
        if place.zeros is not None and own.zeros is not None:
            place.zeros.copy_(own.zeros)
    return whole


def product_for(kind: GroupType, device: torch.device, dtype: torch.dtype) -> ExpertProduct | None:
    """The product of experts of a type on a device, which it logs: a kernel on a GPU, where it works. None if their
    matrices must be widened."""
    if device.type == "cuda" and dtype != torch.float32 and kernel_works(kind, device, dtype):
        _log_product(kind, "by a kernel that widens them in registers")
        return kernel_product_on(device)
    _log_product(kind, f"after all are widened to {str(dtype).removeprefix('torch.')}, in each product")
    return None


@functools.cache
def _log_product(kind: GroupType, how: str) -> None:
    logger.info("Experts of %s are multiplied %s", kind.value, how)


def kernel_product_on(device: torch.device) -> ExpertProduct:
    """The product by a Triton kernel."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.expert_product import expert_product, expert_tile, tile_table

    chip = Chip.of(device)

    def multiply(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None, rows: SortedRows) -> torch.Tensor:
        experts = len(rows.sizes)
        size = expert_tile(len(x), experts, weights, chip).rows
        if size not in rows.tables:
            rows.tables[size] = tile_table(rows.sizes, len(x), size, chip)
        return expert_product(x.contiguous(), weights, bias, rows.tables[size], experts, chip)

    return multiply


@functools.cache
def kernel_works(kind: GroupType, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel's results on a GPU are correct: tested on small products of two experts, of which one has two
    rows; a failure is logged."""
    generator = torch.Generator().manual_seed(0)
    experts, outputs, inputs = 2, 72, 1280
    x = torch.randn((max(ROWS_TRIED), inputs), generator=generator).to(dtype)
    weights = random_weights(kind, experts * outputs, inputs, generator)
    chosen = (torch.arange(len(x)) >= 2).long()
    matrices = weights.widened(torch.float64).view(experts, outputs, inputs)
    exact = torch.stack([functional.linear(row, matrices[own]) for row, own in zip(x.double(), chosen, strict=True)])

    def multiply(some: torch.Tensor) -> torch.Tensor:
        own = chosen[: len(some)]
        rows = SortedRows(own.to(device), own.bincount(minlength=experts).to(device, torch.int32))
        return kernel_product_on(device)(some.to(device), weights.to(device), None, rows).cpu()

    return runs_right(multiply, x, exact, f"Triton's kernel for experts of {kind.value}")

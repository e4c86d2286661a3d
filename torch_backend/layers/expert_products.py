"""Products of rows sorted by expert on a GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.group_blocks import GroupType
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.layers.grouped import pack_blocks, random_weights
from torch_backend.layers.scaled_products import ROWS_TRIED, float8_rounding_on, runs_right
from torch_backend.rounded_rows import RoundedRows, Rounding, Rows

logger = logging.getLogger(__name__)

_FLOAT8_CAPABILITY = 9
"""Major capability of GPUs that multiply experts of float8: Hopper. torch 2.13 accepts Blackwell's, too, but its kernel
for scales of rows is written for Hopper's instructions."""

_MULTIPLE = 16
"""Divisor of both sides of an expert for torch's product of float8."""


@dataclass(frozen=True)
class SortedRows:
    """Which rows of a step belong to which expert: the experts of rows, int64 `[M]`, in ascending order; and how many
    rows each has, int32 `[experts]`. The last rows may be padding, of the nonexistent expert `experts`: with experts
    divided into `parts` among ranks, those of the others."""

    experts: torch.Tensor
    sizes: torch.Tensor
    parts: int = 1

    @property
    def expected(self) -> int:
        """Rows of these experts, if all ranks have as many."""
        return -(-len(self.experts) // self.parts)

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
        """The kernels' tables of tiles, by the rows of a tile, which the products of a layer share."""
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
        log_product(kind.value, "by a kernel that widens them in registers")
        return kernel_product_on(device)
    log_product(kind.value, _widened_to(dtype))
    return None


@functools.cache
def log_product(values: str, how: str) -> None:
    """Logs once how experts of some values are multiplied."""
    logger.info("Experts of %s are multiplied %s", values, how)


def _widened_to(dtype: torch.dtype) -> str:
    return f"after all are widened to {str(dtype).removeprefix('torch.')}, in each product"


def kernel_product_on(device: torch.device) -> ExpertProduct:
    """The product by a Triton kernel."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.expert_product import expert_product, expert_tile, tile_table

    chip = Chip.of(device)

    def multiply(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None, rows: SortedRows) -> torch.Tensor:
        experts = len(rows.sizes)
        size = expert_tile(rows.expected, experts, weights, chip).rows
        if size not in rows.tables:
            rows.tables[size] = tile_table(rows.sizes, len(x), size, chip)
        return expert_product(x.contiguous(), weights, bias, rows.tables[size], experts, chip, rows.expected)

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


@dataclass(frozen=True, slots=True)
class RoundedExpertProduct:
    """The product of rows that are rounded by `rounding`, with experts of 8 bits; plain numbers are rounded first."""

    rounding: Rounding
    multiply: Callable[[RoundedRows, torch.Tensor, torch.Tensor, SortedRows], torch.Tensor]

    def __call__(self, x: Rows, values: torch.Tensor, scales: torch.Tensor, rows: SortedRows) -> torch.Tensor:
        """`x [M, inputs]`, values `[experts, outputs, inputs]`, float32 scales `[experts, outputs]` → `[M, outputs]`,
        in the dtype of x. Outputs of padding are undefined."""
        rounded = x if isinstance(x, RoundedRows) else self.rounding.round(x)
        return self.multiply(rounded, values, scales, rows)


def scaled_product_for(
    encoding: Encoding, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> RoundedExpertProduct | None:
    """The product of experts `shape` with a scale per row on a device, which it logs: torch's, of float8 with float8,
    where it works. None if they must be widened."""
    rounds = encoding.values is ValueType.FLOAT8_E4M3 and encoding.activations is not ActivationScales.NONE
    fits = dtype == torch.bfloat16 and all(side % _MULTIPLE == 0 for side in shape[1:])
    if device.type == "cuda" and rounds and fits and float8_works(device):
        log_product(encoding.values.value, "as float8, by torch's scaled_grouped_mm; inputs are rounded to float8")
        return float8_product_on(device)
    log_product(encoding.values.value, _widened_to(dtype))
    return None


def float8_product_on(device: torch.device) -> RoundedExpertProduct:
    """The product of float8 with inputs rounded to float8, with a scale per row."""
    return RoundedExpertProduct(float8_rounding_on(device), multiply_float8)


def multiply_float8(x: RoundedRows, values: torch.Tensor, scales: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """Multiplies bfloat16 rows that were rounded to float8."""
    # torch's stubs do not have it.
    product: torch.Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        x.values,
        values.transpose(1, 2),
        scale_a=x.scales,
        scale_recipe_a=ScalingType.RowWise,
        scale_b=scales,
        scale_recipe_b=ScalingType.RowWise,
        offs=rows.ends,
        output_dtype=x.dtype,
    )
    return product


@functools.cache
def float8_works(device: torch.device) -> bool:
    """Whether a GPU's products of float8 with experts of float8 are correct: tested on small products of three experts,
    of which one has no rows and one has two; a failure is logged."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != _FLOAT8_CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(ROWS_TRIED), 1200), generator=generator).to(torch.bfloat16)
    values = (30 * torch.randn((3, 80, 1200), generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand((3, 80), generator=generator)
    chosen = 2 * (torch.arange(len(x)) >= 2).long()
    matrices = values.double() * scales[..., None].double()
    of_rows = x.float().abs().amax(-1, keepdim=True) / torch.finfo(values.dtype).max
    meant = (x.float() / of_rows).to(values.dtype).double() * of_rows.double()
    exact = torch.stack([functional.linear(row, matrices[own]) for row, own in zip(meant, chosen, strict=True)])

    def multiply(some: torch.Tensor) -> torch.Tensor:
        own = chosen[: len(some)]
        rows = SortedRows(own.to(device), own.bincount(minlength=len(values)).to(device, torch.int32))
        return float8_product_on(device)(some.to(device), values.to(device), scales.to(device), rows).cpu()

    return runs_right(multiply, x, exact, "The product of float8 with experts of float8")

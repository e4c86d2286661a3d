"""Products of rows sorted by expert and the experts' matrices in groups, which `kernels.group_product` multiplies.

The rows of each expert are cut into tiles. A table on the device says which expert and which rows a program has, as in
other engines' kernels for experts; the host knows only the maximum number of tiles, so that CUDA graphs can capture a
step. Programs without rows end at once: experts that no token chose are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.kernels.group_product import check_inputs, group_tile, launch
from torch_backend.kernels.scaled_product import ProductTile

SKEW = 2
"""The rows of a tile are chosen for this many times the average of an expert: most rows belong to popular experts."""


def expert_tile(rows: int, experts: int, weights: GroupedWeights, chip: Chip) -> ProductTile:
    """The tile for a number of rows of all experts. A row's sums do not depend on it."""
    return group_tile(SKEW * triton.cdiv(rows, experts), weights, chip)


def tile_table(sizes: torch.Tensor, rows: int, tile_rows: int, chip: Chip) -> torch.Tensor:
    """The tiles of rows sorted by expert, of which each has int32 `sizes [experts]`: int32 `[tiles, 3]`, for each tile
    its expert, its first row and the one past its last row. `rows`: at least the sum of sizes. The last tiles may have
    no rows."""
    experts = len(sizes)
    # Each expert with rows has at least one tile, and one more for each `tile_rows` beyond its first row.
    with_rows = min(experts, rows)
    count = with_rows + (rows - with_rows) // tile_rows
    table = torch.empty((count, 3), dtype=torch.int32, device=sizes.device)
    dependent = chip.dependent_launches
    plan_tiles[(1,)](
        sizes,
        table,
        experts,
        count,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=tile_rows,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return table


def expert_product(
    x: torch.Tensor,
    weights: GroupedWeights,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    experts: int,
    chip: Chip,
    expected: int | None = None,
) -> torch.Tensor:
    """Multiplies a contiguous `x [M, inputs]`, bfloat16 or float16, sorted by expert, by the matrices of their
    `experts`, one above the other in `weights`: `[M, outputs]` in the dtype of x. `table`: see `tile_table`, for the
    rows of `expert_tile` of as many rows as are `expected`, by default all. Rows behind those of the last expert are
    not written. Sums are float32; `bias [experts, outputs]` is added and the result rounded once. Raises `ValueError`
    for other shapes and dtypes."""
    check_inputs(x, weights)
    outputs, rest = divmod(weights.outputs, experts)
    if rest or (bias is not None and bias.shape != (experts, outputs)):
        found = None if bias is None else list(bias.shape)
        raise ValueError(f"there are {weights.outputs} outputs of {experts} experts, and biases {found}")
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    if len(x):
        tile = expert_tile(len(x) if expected is None else expected, experts, weights, chip)
        launch(x, weights, bias, table, out, outputs, weights.inputs, 1, tile, chip)
    return out


@triton.jit(do_not_specialize=["count"])
def plan_tiles(sizes, table, experts, count, EXPERTS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Writes the table: the tiles of the first expert, then those of the next; the remaining ones have no rows."""
    expert = tl.arange(0, EXPERTS)
    after_previous(DEPENDENT)
    size = tl.load(sizes + expert, mask=expert < experts, other=0)
    own = tl.cdiv(size, ROWS)
    first, end = tl.cumsum(own, 0) - own, tl.cumsum(size, 0)
    for number in range(0, tl.max(own, 0)):
        has = number < own
        entry = table + 3 * (first + number)
        start = end - size + number * ROWS
        tl.store(entry, expert, mask=has)
        tl.store(entry + 1, start, mask=has)
        tl.store(entry + 2, tl.minimum(start + ROWS, end), mask=has)
    for number in range(tl.sum(own, 0), count, EXPERTS):
        entry = table + 3 * (number + expert)
        for place in tl.static_range(3):
            tl.store(entry + place, expert * 0, mask=number + expert < count)

"""Attention of prefill chunks: each query over the cached prefix and its chunk, both read through the page table.

The tokens of a sequence are cut into blocks; one program attends with one block and all query heads of one kv head, as
rows of a matrix product (tokens times heads). Compared to one head at a time, this reads as much, but a block has fewer
tokens: short chunks fill it, and less is computed above the diagonal only to be masked.

The keys of a sequence are cut into splits, which are attended separately and merged in order. Two ways to do so give
the same bits:

- `extend_blocks`: one program processes all splits of a block. Within a split it first takes the keys that all queries
  of the block see, without a mask, then the rest with one. Keys before the window are skipped.
- `extend_splits` and `merge_extended`, if there are too few blocks for the chip, as in a short chunk after a long
  prefix: each split of a block is one work item, and the results are merged.

Launch sizes depend on the number of tokens, and no length is read on the host. Tiles and splits of keys are at fixed
positions of a sequence, and a tile or split of which a query sees no key leaves its sums unchanged, bit for bit. So a
query's result does not depend on how its sequence is cut into chunks, or on other sequences in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.attention_tiles import TRITON_TYPES, check_options, compute_type, readable
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.extend_kernels import extend_blocks, extend_splits, merge_extended
from torch_backend.kernels.extend_plan import ExtendForm, ExtendPlan, extend_tile
from torch_backend.kv_pages import KVPages

_MERGED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sums:
    """Softmaxes in progress, which the layers of a step use one after the other: `weighted` float32 `[n, width]`, the
    weighted sum of values, with the head size rounded up to a power of two; `others` float32 `[2, n]`, the largest
    score in units of log2(e), and the sum of exponentials.

    n is the rows of all blocks, whose programs keep their sums here between two splits; or the rows of every split, at
    most 256 MiB, if splits are separate work items.
    """

    weighted: torch.Tensor
    others: torch.Tensor

    @classmethod
    def allocate(cls, plan: ExtendPlan, device: torch.device) -> Sums:
        """Empty if no sequence has a second split."""
        shape = cls._shape(plan)
        weighted = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(weighted, torch.empty(2, shape[0], dtype=torch.float32, device=device))

    def fits(self, plan: ExtendPlan) -> bool:
        """Whether `allocate` would return the same shape."""
        return self.weighted.shape == self._shape(plan)

    @staticmethod
    def _shape(plan: ExtendPlan) -> tuple[int, int]:
        items = 0 if plan.split is None else (plan.splits or plan.blocks).owners.shape[0]
        return items * plan.form.kv_heads * plan.form.tile.rows, triton.next_power_of_2(plan.form.head_dim)


def form_of(queries: torch.Tensor, kv: KVPages, options: AttentionOptions, chip: Chip) -> ExtendForm:
    """The form of a layer with `queries` `[T, heads, head_dim]`."""
    _, heads, head_dim = queries.shape
    kv_heads = kv.keys.shape[1]
    tile = extend_tile(head_dim, kv.keys.dtype, chip, kv.values.dtype)
    return ExtendForm(kv_heads, heads // kv_heads, head_dim, options.window, tile)


def extend_attention(
    queries: torch.Tensor,
    kv: KVPages,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
    options: AttentionOptions,
    plan: ExtendPlan,
    sums: Sums,
    output: torch.Tensor,
    chip: Chip,
) -> None:
    """Computes attention of the tokens of all sequences from `num_decode` on; writes those tokens of `output`. Raises
    `ValueError` for options or shapes that the kernels do not support, or that differ from those of `plan`.

    `queries`, `output` `[T, heads, head_dim]`, contiguous; `page_table` int32 `[R, P]`; `kv_lens` int32 `[R]`;
    `query_starts` int32 `[R + 1]`: the tokens of a sequence are the last ones of its keys. Tokens of a sequence of
    length 0 are padding, with output 0.
    """
    check_options(queries, kv.keys, options)
    form, tile = form_of(queries, kv, options, chip), plan.form.tile
    if form != plan.form:
        raise ValueError(f"the plan is of layers of {plan.form}, not of {form}")
    page_size = kv.keys.shape[2]
    compute = compute_type(queries.dtype, kv.keys.dtype)
    rows = plan.blocks.starts.shape[0] - 1
    heads_of_layer = {
        "KV_HEADS": form.kv_heads,
        "GROUP": form.group,
        "HEAD_DIM": form.head_dim,
        "WIDTH": triton.next_power_of_2(form.head_dim),
        "TOKENS": form.tokens,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": plan.split,
    }
    items = plan.blocks if plan.splits is None else plan.splits
    by_token = kv.token_scales
    attended = (
        # Converted here, because the kernel would keep converted queries in registers instead of shared memory.
        queries.to(compute),
        readable(kv.keys, chip),
        readable(kv.values, chip),
        kv.key_scale,
        kv.value_scale,
        None if by_token is None else by_token.keys,
        None if by_token is None else by_token.values,
        None if by_token is None else by_token.key_mean,
        page_table,
        kv_lens,
        query_starts,
        items.starts,
        items.owners,
        sums.weighted,
        sums.others,
        output,
        options.sinks,
        rows,
        num_decode,
        page_table.stride(0),
        sums.others.stride(0),
        options.scale,
        options.soft_cap,
        options.window,
    )
    compiled_for = {
        **heads_of_layer,
        "PAGE_SIZE": page_size,
        "COMPUTE": TRITON_TYPES[compute],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    bound = items.owners.shape[0]
    if plan.splits is None:
        extend_blocks[(bound, form.kv_heads)](*attended, **compiled_for)
        return
    extend_splits[(min(bound * form.kv_heads, chip.processors),)](*attended, **compiled_for)
    merge_extended[(plan.blocks.owners.shape[0], form.kv_heads, max(tile.rows // _MERGED_ROWS, 1))](
        sums.weighted,
        sums.others,
        kv_lens,
        query_starts,
        plan.blocks.starts,
        plan.blocks.owners,
        plan.splits.starts,
        kv.value_scale,
        options.sinks,
        output,
        rows,
        num_decode,
        sums.others.stride(0),
        options.window,
        **heads_of_layer,
        MERGED=_MERGED_ROWS,
        num_warps=4,
    )

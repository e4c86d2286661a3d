"""Attention over latent vectors in two equivalent forms: see `sglang_jax/layers/latent_attention.py`. Absorbed: queries
are multiplied by the key projection, and attend to latent vectors. Expanded: keys and values are computed from one tile
of latent vectors at a time, for a softmax in progress (FlashAttention, Dao et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_backend.attention.interface import AttentionOptions, LatentHeads
from torch_backend.attention.page_groups import SequenceGroup
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages
from torch_backend.layers.row_tiles import RowTiles

_KEYS_PER_TILE = 512
_QUERIES_PER_BLOCK = 256
"""Together they bound the scores in memory, `[heads, queries, keys]` in float32."""


def attend_absorbed(
    queries: torch.Tensor, heads: LatentHeads, attend: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`[T, heads, key_dim + rotary_dim]` → `[T, heads, value_dim]`, with an `attend` that uses latent vectors as keys
    and values of one kv head."""
    key_dim, latent = heads.key_up.shape[1:]
    plain, rotated = queries[..., :key_dim], queries[..., key_dim:]
    found = attend(torch.cat((_by_head(plain, heads.key_up, heads.tile), rotated), dim=-1))
    return _by_head(found[..., :latent], heads.value_up.transpose(1, 2), heads.tile)


class ExpandedPlan:
    """Sequences of a group in the expanded form, one after the other: a result depends only on its own sequence."""

    def __init__(self, group: SequenceGroup, batch: ForwardBatch) -> None:
        self.group = group
        self._pages = batch.page_table[group.sequences]

    def attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """Queries of the group `[tokens, heads, key_dim + rotary_dim]` → `[tokens, heads, value_dim]`."""
        each = zip(torch.split(queries, self.group.count), self._pages, self.group.lens, strict=True)
        return torch.cat([_attend_sequence(mine, kv, pages, length, options) for mine, pages, length in each])


def _attend_sequence(
    queries: torch.Tensor, kv: KVPages, pages: torch.Tensor, length: int, options: AttentionOptions
) -> torch.Tensor:
    assert options.latents is not None
    before = length - len(queries)
    # Only CUDA has products of 16-bit numbers with float32 results.
    by_head = queries.transpose(0, 1).to(queries.dtype if queries.is_cuda else torch.float32)
    softmax = _Softmax(by_head, options.latents.value_up.shape[1])
    columns = max(_KEYS_PER_TILE // kv.page_size, 1)
    for column in range(0, -(-length // kv.page_size), columns):
        first = column * kv.page_size
        # Slots after the sequence's end may be NaN.
        cached = _gather(kv, pages[column : column + columns].long(), queries.dtype)[: length - first]
        keys, values = (part.to(by_head.dtype) for part in _expand(cached, options.latents))
        places = torch.arange(first, first + len(cached), device=queries.device)
        for start in range(max(first - before, 0), len(queries), _QUERIES_PER_BLOCK):
            block = slice(start, min(start + _QUERIES_PER_BLOCK, len(queries)))
            scores = _product(by_head[:, block], keys.transpose(1, 2)).mul_(options.scale)
            if first + len(cached) > before + start + 1:
                positions = torch.arange(before + block.start, before + block.stop, device=queries.device)
                scores.masked_fill_(places > positions[:, None], -torch.inf)
            softmax.add(block, scores, values)
    return softmax.result().transpose(0, 1).to(queries.dtype)


def _gather(kv: KVPages, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Vectors of `pages` `[P]` in order: `[P * page_size, width]`, in `dtype` if they are stored in 8 bits."""
    if kv.latent_scales is None:
        return kv.keys[pages, 0].flatten(0, 1)
    return kv.latent_scales.gather(kv.keys, pages).to(dtype)


def _expand(cached: torch.Tensor, heads: LatentHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[heads, n, key_dim + rotary_dim]` and values `[heads, n, value_dim]` of cached vectors `[n, ...]`."""
    count, latent = heads.key_up.shape[0], heads.key_up.shape[2]
    vectors, rotated = cached[:, :latent], cached[:, latent:]
    keys, values = (
        (vectors @ up.flatten(0, 1).T).view(len(cached), count, -1).transpose(0, 1)
        for up in (heads.key_up, heads.value_up)
    )
    return torch.cat((keys, rotated.expand(count, -1, -1)), dim=-1), values


class _Softmax:
    """A softmax in progress over keys, of queries `[heads, T, ...]`: the largest score, the sum of exponentials, and
    the weighted sum of values, in float32. Each query sees a key of the first tile."""

    def __init__(self, queries: torch.Tensor, value_dim: int) -> None:
        rows = queries.shape[:2]
        self._largest = queries.new_full((*rows, 1), -torch.inf, dtype=torch.float32)
        self._total = queries.new_zeros((*rows, 1), dtype=torch.float32)
        self._weighted = queries.new_zeros((*rows, value_dim), dtype=torch.float32)

    def add(self, block: slice, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Adds scores `[heads, block, n]`, which are overwritten, and values `[heads, n, value_dim]`."""
        before, total, weighted = (each[:, block] for each in (self._largest, self._total, self._weighted))
        largest = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        shrink = before.sub(largest).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(shrink).add_(_product(weights.to(values.dtype), values))
        before.copy_(largest)

    def result(self) -> torch.Tensor:
        """`[heads, T, value_dim]`."""
        return self._weighted / self._total


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, y) if x.dtype == torch.float32 else torch.bmm(x, y, out_dtype=torch.float32)


def _by_head(x: torch.Tensor, matrices: torch.Tensor, tile: int | None) -> torch.Tensor:
    """`x [T, heads, n]` by `[heads, n, m]` → `[T, heads, m]`."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)

    return multiply(x) if tile is None else RowTiles(multiply, (tile,))(x)

"""Attention in which a token's result depends on its own sequence up to that token: not on other sequences, nor on
whether the token is decoded, drafted, or computed in a chunk of whatever length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional

from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, StepAttention
from torch_backend.attention.latent import attend_absorbed
from torch_backend.batch import ForwardBatch
from torch_backend.elementwise import evenly
from torch_backend.kv_pages import KVPages

_KEYS = 128
"""Keys of a block, or a page if that has more."""

_QUERIES = 8
"""Queries of an item: neighbouring tokens of a sequence, from a multiple of this number on. So a query's place in its
item depends on its position only: products of few columns are rounded by the place of a row."""

_ITEMS = 8
"""Items that are computed at once."""

_MASKED = -1e30
"""Score of a key that a query must not see: finite, since infinities subtracted from each other are NaN."""


@dataclass(frozen=True, slots=True)
class ChunksOnly:
    """An implementation whose results do not depend on chunks, given every sequence as a chunk: its kernel for decode
    rows sums in another order."""

    chunks: AttentionImplementation

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        return self.chunks.prepare(replace(batch.as_causal(), num_decode=0))


@dataclass(frozen=True, slots=True)
class DecodeRowsOnly:
    """An implementation whose decode rows do not depend on each other, given every token as a decode row. For steps
    without padding."""

    decode: AttentionImplementation

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        batch = batch.as_causal()
        if batch.decode_only:
            return self.decode.prepare(batch)
        tokens = len(batch.tokens)
        sequences = torch.repeat_interleave(batch.query_starts.diff(), output_size=tokens)
        return self.decode.prepare(
            replace(
                batch,
                page_table=batch.page_table[sequences],
                kv_lens=batch.positions + 1,
                query_starts=torch.arange(tokens + 1, dtype=torch.int32, device=batch.tokens.device),
                num_decode=tokens,
            )
        )


class BlockAttention:
    """`AttentionImplementation` in torch operations: an online softmax (FlashAttention, Dao et al. 2022) over blocks of
    keys at fixed positions of a sequence. All products have one shape, and a block of which a query sees nothing leaves
    its sums as they are, bit for bit. Reads lengths on the host."""

    def prepare(self, batch: ForwardBatch) -> BlockStep:
        return BlockStep(batch.as_causal())


@dataclass(frozen=True, slots=True)
class _Items:
    """Some items of one step: their `sequences`, int64 `[n]`; `tokens`, the index of each query in the step, int64 `[n,
    queries]`, repeated in places without a query; `positions` of the same in their sequences, or -1; `firsts`: each
    item's first position, int64 `[n]`; `keys`: the number of keys that each item sees, int64 `[n]`, and the `longest`
    of these."""

    sequences: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    keys: torch.Tensor
    longest: int


class BlockStep:
    """Attention of one step."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        self._items = list(_items_of(batch))

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        if options.latents is None:
            return self._attend(queries, kv, options)
        return attend_absorbed(queries, options.latents, partial(self._attend, kv=kv, options=options)).contiguous()

    def _attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        output = torch.zeros_like(queries)
        for items in self._items:
            found = self._attend_items(queries[items.tokens].float(), kv, options, items)
            seen = items.positions >= 0
            output[items.tokens[seen]] = found[seen].to(queries.dtype)
        return output

    def _attend_items(
        self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, items: _Items
    ) -> torch.Tensor:
        """Queries float32 `[n, queries, heads, head_dim]` → the same shape."""
        count, _, heads, head_dim = queries.shape
        kv_heads = kv.keys.shape[1]
        group = heads // kv_heads
        # [n * kv_heads, group * queries, head_dim]
        packed = queries.view(count, _QUERIES, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        packed = packed.reshape(count * kv_heads, group * _QUERIES, head_dim)
        softmax = _Softmax(packed, options.sinks, count)
        pages = max(_KEYS // kv.page_size, 1)
        table = self._batch.page_table[items.sequences]
        table = functional.pad(table, (0, -table.shape[1] % pages))
        for first in range(0, items.longest, pages * kv.page_size):
            column = first // kv.page_size
            keys, values = _gather(kv, table[:, column : column + pages].long())
            places = torch.arange(first, first + keys.shape[2], device=queries.device)
            visible = places <= items.positions[..., None]
            stored = places < items.keys[:, None]
            if options.window is not None:
                visible &= items.positions[..., None] - places < options.window
                oldest = items.firsts[:, None] - places < options.window
                stored &= oldest
            # Slots that hold no key may be NaN, and NaN times a weight of 0 is NaN.
            keys, values = (part.where(stored[:, None, :, None], 0.0).flatten(0, 1) for part in (keys, values))
            scores = torch.bmm(packed, keys.transpose(1, 2)) * options.scale
            if options.soft_cap is not None:
                scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
            softmax.add(scores, values, visible)
        found = softmax.result().view(count, kv_heads, group, _QUERIES, head_dim)
        return found.permute(0, 3, 1, 2, 4).reshape(queries.shape)


class _Softmax:
    """A softmax in progress of `packed` queries `[n * kv_heads, rows, head_dim]`, in float32."""

    def __init__(self, packed: torch.Tensor, sinks: torch.Tensor | None, items: int) -> None:
        shape = (*packed.shape[:2], 1)
        self._items = items
        self._weighted = torch.zeros_like(packed)
        if sinks is None:
            self._largest, self._total = packed.new_full(shape, _MASKED), packed.new_zeros(shape)
        else:
            rows = sinks.float().view(-1, packed.shape[1] // _QUERIES).repeat_interleave(_QUERIES, 1)
            self._largest = rows.repeat(items, 1)[..., None].contiguous()
            self._total = packed.new_ones(shape)

    def add(self, scores: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> None:
        """Scores `[n * kv_heads, rows, keys]`, values `[n * kv_heads, keys, head_dim]`, `visible` bool `[n, queries,
        keys]`."""
        split = scores.view(self._items, -1, _QUERIES, scores.shape[-1])
        shown = visible[:, None]
        scores = split.where(shown, _MASKED).view(scores.shape)
        largest = torch.maximum(self._largest, scores.amax(-1, keepdim=True))
        weights = evenly(torch.exp, scores - largest)
        weights = weights.view(split.shape).where(shown, 0.0).view(scores.shape)
        shrink = evenly(torch.exp, self._largest - largest)
        self._total = self._total * shrink + weights.sum(-1, keepdim=True)
        self._weighted = self._weighted * shrink + torch.bmm(weights, values)
        self._largest = largest

    def result(self) -> torch.Tensor:
        return self._weighted / self._total.where(self._total > 0, 1.0)


def _items_of(batch: ForwardBatch) -> Iterator[_Items]:
    """The items of a step, those with the most keys first, so that items computed together have about as many."""
    lens: list[int] = batch.kv_lens.tolist()
    starts: list[int] = batch.query_starts.tolist()
    found: list[tuple[int, int, int, int]] = []
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if lens[sequence] == 0:
            continue
        token, offset = start, lens[sequence] - end  # of positions from places in the step
        while token < end:
            last = min(token + _QUERIES - (token + offset) % _QUERIES, end)
            found.append((last + offset, sequence, token, last - token))
            token = last
    found.sort(reverse=True)
    for first in range(0, len(found), _ITEMS):
        yield _together(found[first : first + _ITEMS], batch.tokens.device)


def _together(items: list[tuple[int, int, int, int]], device: torch.device) -> _Items:
    """Items of (keys seen, sequence, first token, number of tokens), filled up with items that see nothing."""
    filled = items + [(0, items[0][1], items[0][2], 0)] * (_ITEMS - len(items))
    keys, sequences, tokens, counts = torch.tensor(filled, device=device).unbind(1)
    firsts = keys - counts
    offsets = torch.arange(_QUERIES, device=device) - firsts[:, None] % _QUERIES
    inside = (offsets >= 0) & (offsets < counts[:, None])
    last = (counts - 1).clamp(min=0)[:, None]
    return _Items(
        sequences,
        tokens[:, None] + torch.minimum(offsets.clamp(min=0), last),
        (firsts[:, None] + offsets).where(inside, -1),
        firsts,
        keys,
        items[0][0],
    )


def _gather(kv: KVPages, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `pages` `[n, p]`: float32 `[n, kv_heads, p * page_size, head_dim]`, scales and means
    applied."""
    if kv.latent_scales is not None:
        found = kv.latent_scales.gather(kv.keys, pages)[:, None]
        return found, found
    keys = _of_pages(kv.keys, pages, kv.key_scale)
    values = keys if kv.shared else _of_pages(kv.values, pages, kv.value_scale)
    if kv.token_scales is None:
        return keys, values
    keys = keys * _by_token(kv.token_scales.keys, pages) + kv.token_scales.key_mean[:, None]
    if kv.token_scales.values is not None:
        values = values * _by_token(kv.token_scales.values, pages)
    return keys, values


def _of_pages(stored: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is not None:  # indexed as bytes, because few devices index float8
        found = stored.view(torch.uint8)[pages].view(stored.dtype).float() * scale[:, None, None]
    else:
        found = stored[pages].float()
    return found.transpose(1, 2).flatten(2, 3)


def _by_token(scales: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return scales[pages].transpose(1, 2).flatten(2, 3)[..., None]

"""Copies keys and values of a group of sequences from their pages into contiguous buffers."""

from __future__ import annotations

import torch

from torch_backend.attention.page_groups import SequenceGroup
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages, LatentScales, TokenScales


class PageGather:
    """Indices of a group's keys and buffers for them, shared by all layers with the same shape of pages and `window`.
    So a result is valid until the next call."""

    def __init__(self, group: SequenceGroup, batch: ForwardBatch, kv: KVPages, window: int | None) -> None:
        kv_heads, page_size, head_dim = kv.keys.shape[1:]
        columns = -(-group.longest // page_size)
        device = kv.keys.device
        table = batch.page_table[group.sequences, None, :columns]
        heads = torch.arange(kv_heads, device=device)[:, None]
        self._index = (table * kv_heads + heads).flatten()
        self._unused = _unused_rows(group, kv_heads, columns * page_size, window, device)
        self._row = page_size * head_dim
        self._sequences = len(group.lens)
        shape = (len(group.lens) * kv_heads, 1, columns * page_size, head_dim)
        self._keys = _Buffer(shape, self._row, group.longest, kv.keys)
        self._values = self._keys if kv.shared else _Buffer(shape, self._row, group.longest, kv.values)
        self._longest = group.longest

    def __call__(self, kv: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
        """`[sequences * kv_heads, 1, longest, head_dim]` each, 0 after a sequence's end and before the window of its
        first query. float8 and int8 are converted to float32; int8 keys are not scaled, see `key_scales`."""
        keys = self._gather(kv.keys, kv.key_scale, self._keys)
        if kv.latent_scales is not None:
            keys = kv.latent_scales.widen(keys, self._latent_scales(kv.latent_scales))
            return keys, keys
        values = keys if kv.shared else self._gather(kv.values, kv.value_scale, self._values)
        if kv.token_scales is None:
            return keys, values
        if kv.token_scales.values is None:
            return keys.float(), values.float()
        return keys.float(), values.float() * self._scales(kv.token_scales.values)[..., None]

    def key_scales(self, scales: TokenScales) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of gathered int8 keys: float32 `[sequences * kv_heads, 1, longest]`, 0 where keys are 0; and the mean
        that was subtracted from stored keys, `[sequences * kv_heads, head_dim]`."""
        return self._scales(scales.keys), scales.key_mean.repeat(self._sequences, 1)

    def _scales(self, pages: torch.Tensor) -> torch.Tensor:
        gathered = pages.view(-1, pages.shape[-1])[self._index]
        if self._unused is not None:
            gathered.view(-1).index_fill_(0, self._unused, 0.0)
        return gathered.view(self._sequences * pages.shape[1], 1, -1)[:, :, : self._longest]

    def _latent_scales(self, scales: LatentScales) -> torch.Tensor:
        """`[sequences, 1, longest, 2]`, 0 where keys are 0."""
        gathered = scales.values[self._index].transpose(1, 2).flatten(0, 1)
        if self._unused is not None:
            gathered.index_fill_(0, self._unused, 0.0)
        return gathered.view(self._sequences, 1, -1, 2)[:, :, : self._longest]

    def _gather(self, pages: torch.Tensor, scale: torch.Tensor | None, buffer: _Buffer) -> torch.Tensor:
        stored = pages.view(-1, self._row)
        if pages.dtype == torch.float8_e4m3fn:  # copied as bytes, because few devices index float8
            stored = stored.view(torch.uint8)
        torch.index_select(stored, 0, self._index, out=buffer.rows)
        if self._unused is not None:
            buffer.slots.index_fill_(0, self._unused, 0)
        if scale is None:
            return buffer.seen.view(pages.dtype)
        scales = scale.repeat(self._sequences)[:, None, None, None]
        return buffer.seen.view(pages.dtype).float() * scales


class _Buffer:
    """One buffer in three shapes: `rows`, a head's page each; `slots`, a head's token each; `seen`, the used tokens."""

    def __init__(self, shape: tuple[int, int, int, int], row: int, longest: int, pages: torch.Tensor) -> None:
        dtype = torch.uint8 if pages.dtype == torch.float8_e4m3fn else pages.dtype
        whole = pages.new_empty(shape, dtype=dtype)
        self.rows = whole.view(-1, row)
        self.slots = whole.view(-1, shape[-1])
        self.seen = whole[:, :, :longest]


def _unused_rows(
    group: SequenceGroup, kv_heads: int, slots: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Gathered slots within the longest sequence after the end of their own sequence, or before all keys that its
    queries see. They are cleared, because they may hold NaN, which a mask would not remove from a sum."""
    windowed = window is not None and group.longest - group.count >= window
    if group.shortest == group.longest and not windowed:
        return None
    places = torch.arange(slots, device=device)
    lens = torch.tensor(group.lens, device=device)[:, None]
    unused = (places >= lens) & (places < group.longest)
    if window is not None:
        unused |= places <= lens - group.count - window
    return unused.repeat_interleave(kv_heads, dim=0).flatten().nonzero().flatten()

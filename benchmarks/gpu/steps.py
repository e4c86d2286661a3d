"""Steps over pages in random order, created on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gpu.bench import Bench
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LARGEST_INT8, KVForm, KVPages


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a step: the last `query_lens[s]` of `kv_lens[s]` tokens are computed; the first `num_decode`
    sequences are decode rows. `padding` adds sequences of one token and no key."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_decode: int
    padding: int = 0

    @classmethod
    def decode(cls, kv_lens: Sequence[int], padding: int = 0) -> Shape:
        """A step of only decode rows."""
        return cls((1,) * len(kv_lens), tuple(kv_lens), len(kv_lens), padding)

    @property
    def rows(self) -> int:
        """Sequences, padding included."""
        return len(self.kv_lens) + self.padding

    @property
    def tokens(self) -> int:
        """Computed tokens, padding included."""
        return sum(self.query_lens) + self.padding

    def pages(self, page_size: int) -> int:
        """Pages of the sequences, and page 0."""
        return 1 + sum(-(-length // page_size) for length in self.kv_lens)

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, without a window."""
        pairs = zip(self.query_lens, self.kv_lens, strict=True)
        return sum(count * length - count * (count - 1) // 2 for count, length in pairs)


def make_batch(bench: Bench, shape: Shape, page_size: int) -> ForwardBatch:
    """The step of `shape` with its pages in random order. Tokens, positions and slots, which attention does not
    read, are 0."""
    columns = max(-(-length // page_size) for length in shape.kv_lens)
    order = 1 + torch.randperm(shape.pages(page_size) - 1, dtype=torch.int32, generator=torch.Generator())
    table = torch.zeros((shape.rows, columns), dtype=torch.int32)
    taken = 0
    for row, length in enumerate(shape.kv_lens):
        used = -(-length // page_size)
        table[row, :used] = order[taken : taken + used]
        taken += used
    starts = torch.tensor([0, *accumulate((*shape.query_lens, *(1,) * shape.padding))], dtype=torch.int32)
    lens = torch.tensor((*shape.kv_lens, *(0,) * shape.padding), dtype=torch.int32)
    nothing = torch.zeros(shape.tokens, dtype=torch.int32, device=bench.device)
    return ForwardBatch(
        tokens=nothing,
        positions=nothing,
        write_slots=nothing.long(),
        page_table=table.to(bench.device),
        kv_lens=lens.to(bench.device),
        query_starts=starts.to(bench.device),
        num_decode=shape.num_decode + shape.padding,
    )


def random_pages(
    bench: Bench, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype | KVForm
) -> KVPages:
    """Normal keys and values in every slot; float8 ones with a scale of 0.05, within which all values fit, int8 ones
    with their own scales and, for keys, a normal mean."""
    kv = KVPages.allocate(num_pages, kv_heads, page_size, head_dim, dtype, bench.device)
    if kv.token_scales is not None:
        kv.token_scales.key_mean.normal_(generator=bench.generator)
        _fill_integers(bench, kv.keys, kv.token_scales.keys)
        _fill_integers(bench, kv.values, kv.token_scales.values)
        return kv
    for stored, scale in ((kv.keys, kv.key_scale), (kv.values, kv.value_scale)):
        if scale is None:
            stored.normal_(generator=bench.generator)
            continue
        scale.fill_(0.05)
        for some in stored.view(torch.uint8).split(4096):  # types of float8's width support few operations
            values = bench.normal(*some.shape, dtype=torch.float32) / 0.05
            some.copy_(values.to(stored.dtype).view(torch.uint8))
    return kv


def _fill_integers(bench: Bench, stored: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        stored.normal_(generator=bench.generator)
        return
    for some, own in zip(stored.split(1024), scales.split(1024), strict=True):
        values = bench.normal(*some.shape, dtype=torch.float32)
        own.copy_(values.abs().amax(-1) / LARGEST_INT8)
        some.copy_((values / own[..., None]).round().to(torch.int8))


def poison_unused(kv: KVPages, batch: ForwardBatch) -> None:
    """Writes NaN into every slot that no sequence holds, page 0 included."""
    page_size = kv.page_size
    used = torch.zeros((kv.keys.shape[0], page_size), dtype=torch.bool, device=kv.keys.device)
    offsets = torch.arange(page_size, device=kv.keys.device)
    for column in range(batch.page_table.shape[1]):
        held = offsets < (batch.kv_lens[:, None] - column * page_size)
        used[batch.page_table[:, column].long()] |= held
    for stored in (kv.keys, kv.values):
        nan = torch.full((), torch.nan).to(torch.float8_e4m3fn)
        if stored.dtype.itemsize == 1:  # any int8 value will do: the scales are NaN
            bits = stored.view(torch.uint8)
            bits.masked_fill_(~used[:, None, :, None], int(nan.view(torch.uint8)))
        else:
            stored.masked_fill_(~used[:, None, :, None], torch.nan)
    if kv.token_scales is not None:
        for scales in (kv.token_scales.keys, kv.token_scales.values):
            if scales is not None:
                scales.masked_fill_(~used[:, None, :], torch.nan)

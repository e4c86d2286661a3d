"""Paged attention in plain torch: for CPUs, and for whatever device has no kernels of its own.

Decode sequences of similar length go through `scaled_dot_product_attention` together, as do prefill sequences of equal
length. torch's own grouped attention (`enable_gqa`) is not used: on a CPU it takes many times as long as what is done
here, which is to let the queries of one kv head share its keys as a matter of shapes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.page_groups import SequenceGroup, group_sequences
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages

_QUERIES_PER_BLOCK = 512
"""Of a prefill chunk: a mask is `[block, keys]`, and the keys after a block's last query are left out."""

_EXPLICIT_QUERIES_PER_BLOCK = 64
"""The same where scores are written out, `[heads, block, keys]`."""


class NativeAttention:
    """`AttentionImplementation` without kernels. Reads the batch's lengths on the host."""

    def prepare(self, batch: ForwardBatch) -> NativeStep:
        """Finds the sequences to compute together."""
        return NativeStep(batch)


@dataclass(frozen=True, slots=True)
class _Form:
    """What layers must have in common to share indices and masks."""

    kv_heads: int
    page_size: int
    dtype: torch.dtype
    window: int | None
    explicit: bool


class NativeStep:
    """Attention of one step."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._groups = group_sequences(batch)
        self._complete = sum(group.tokens_count for group in self._groups) == batch.tokens.shape[0]
        self._batch = batch
        self._plans: dict[_Form, list[_Plan]] = {}

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """See `StepAttention`."""
        plans = self._plans_of(queries, kv, options)
        if len(plans) == 1 and self._complete:
            return plans[0].attend(queries, kv, options)
        output = torch.empty_like(queries) if self._complete else torch.zeros_like(queries)
        for plan in plans:
            tokens = plan.group.tokens
            output[tokens] = plan.attend(queries[tokens], kv, options)
        return output

    def _plans_of(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> list[_Plan]:
        # What is stored in float8 is widened to float32, in which a product with its scale is exact enough to ignore.
        dtype = queries.dtype if kv.key_scale is None else torch.float32
        explicit = options.soft_cap is not None or options.sinks is not None
        form = _Form(kv.keys.shape[1], kv.page_size, dtype, options.window, explicit)
        if form not in self._plans:
            self._plans[form] = [_Plan(group, self._batch, form) for group in self._groups]
        return self._plans[form]


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries of each sequence of a group, the keys they may see, and which of these each does.

    `mask`: added to scores, `[sequences * kv_heads or 1, 1, queries or 1, keys]`; None if all keys are seen, or all up
    to the query's own where `causal`.
    """

    queries: slice
    keys: int
    mask: torch.Tensor | None
    causal: bool


class _Plan:
    """Indices, masks and buffers of one group of sequences, made once for all layers of a form."""

    def __init__(self, group: SequenceGroup, batch: ForwardBatch, form: _Form) -> None:
        self.group = group
        self._form = form
        columns = -(-group.longest // form.page_size)
        table = batch.page_table[group.sequences, None, :columns]
        heads = torch.arange(form.kv_heads, device=table.device)[:, None]
        self._index = (table * form.kv_heads + heads).flatten()
        self._unused = self._find_unused(columns * form.page_size, table.device)
        self._blocks = list(self._make_blocks(table.device))
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """Queries of the group `[tokens, heads, head_dim]` → the same shape, contiguous."""
        keys, values = self._gather(kv)
        shaped = self._shape_queries(queries.to(self._form.dtype))
        if len(self._blocks) == 1:
            output = self._attend_block(self._blocks[0], shaped, keys, values, options)
        else:
            parts = [self._attend_block(block, shaped, keys, values, options) for block in self._blocks]
            output = torch.cat(parts, dim=2)
        return self._unshape(output, queries)

    def _attend_block(
        self, block: _Block, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if len(self._blocks) > 1:
            queries = queries[:, :, block.queries]
        keys, values = (part[:, None, : block.keys].expand(-1, queries.shape[1], -1, -1) for part in (keys, values))
        if not self._form.explicit:
            return functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=block.mask, is_causal=block.causal, scale=options.scale
            )
        return _explicit_attention(queries, keys, values, block.mask, self._shape_sinks(options), options)

    def _shape_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """`[sequences * kv_heads, 1, group, head_dim]` of single tokens, whose heads are more queries over the same
        keys; else `[sequences * kv_heads, group, count, head_dim]`."""
        sequences, count, kv_heads = len(self.group.lens), self.group.count, self._form.kv_heads
        if count == 1:
            return queries.reshape(sequences * kv_heads, 1, -1, queries.shape[-1])
        split = queries.reshape(sequences, count, kv_heads, -1, queries.shape[-1])
        return split.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def _unshape(self, output: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if self.group.count > 1:
            split = output.view(-1, self._form.kv_heads, *output.shape[1:])
            output = split.permute(0, 3, 1, 2, 4)
        return output.to(queries.dtype).reshape(queries.shape)

    def _shape_sinks(self, options: AttentionOptions) -> torch.Tensor | None:
        if options.sinks is None:
            return None
        sinks = options.sinks.view(self._form.kv_heads, -1).repeat(len(self.group.lens), 1)
        return sinks[:, None, :, None] if self.group.count == 1 else sinks[:, :, None, None]

    def _gather(self, kv: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the group's sequences, `[sequences * kv_heads, slots, head_dim]`, 0 after their ends."""
        if self._buffers is None:
            shape = (len(self._index), kv.keys.shape[2] * kv.keys.shape[3])
            self._buffers = (kv.keys.new_empty(shape), kv.values.new_empty(shape))
        stored = ((kv.keys, kv.key_scale), (kv.values, kv.value_scale))
        keys, values = (
            self._gather_one(pages, scale, out) for (pages, scale), out in zip(stored, self._buffers, strict=True)
        )
        return keys, values

    def _gather_one(self, pages: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        kv_heads, page_size, head_dim = pages.shape[1:]
        rows = pages.view(-1, page_size * head_dim)
        if scale is not None:  # moved as bytes: few devices index float8
            rows, as_bytes = rows.view(torch.uint8), out.view(torch.uint8)
            torch.index_select(rows, 0, self._index, out=as_bytes)
            scales = scale.repeat(len(self.group.lens))[:, None, None]
            out = out.view(len(scales), -1, head_dim).float() * scales
        else:
            torch.index_select(rows, 0, self._index, out=out)
        if self._unused is not None:
            out.view(-1, head_dim).index_fill_(0, self._unused, 0)
        return out.view(len(self.group.lens) * kv_heads, -1, head_dim)

    def _find_unused(self, slots: int, device: torch.device) -> torch.Tensor | None:
        """Rows of all gathered slots that are seen by the longest sequence and lie after the end of their own.

        They are cleared, for they may hold NaN, which no mask takes out of a sum."""
        group = self.group
        if group.shortest == group.longest:
            return None
        places = torch.arange(slots, device=device)
        unused = (places >= self._lens(device)[:, None]) & (places < group.longest)
        return unused.repeat_interleave(self._form.kv_heads, dim=0).flatten().nonzero().flatten()

    def _make_blocks(self, device: torch.device) -> list[_Block]:
        group, window = self.group, self._form.window
        windowed = window is not None and window < group.longest
        if group.count == group.longest and not windowed and not self._form.explicit and group.count > 1:
            return [_Block(slice(None), group.longest, None, causal=True)]
        size = _EXPLICIT_QUERIES_PER_BLOCK if self._form.explicit else _QUERIES_PER_BLOCK
        blocks = []
        for first in range(0, group.count, size):
            last = min(first + size, group.count)
            keys = group.longest - group.count + last
            blocks.append(_Block(slice(first, last), keys, self._mask(first, last, keys, device), causal=False))
        return blocks

    def _mask(self, first: int, last: int, keys: int, device: torch.device) -> torch.Tensor | None:
        group, window = self.group, self._form.window
        places = torch.arange(keys, device=device)
        offsets = torch.arange(first - group.count, last - group.count, device=device)
        # Sequences of several tokens are all as long: one mask will do.
        lens = self._lens(device) if group.count == 1 else self._lens(device)[:1]
        positions = lens[:, None, None] + offsets[:, None]
        hidden = places > positions
        if window is not None:
            hidden |= positions - places >= window
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(hidden.shape, dtype=self._form.dtype, device=device).masked_fill_(hidden, -torch.inf)
        if group.count == 1:
            mask = mask.repeat_interleave(self._form.kv_heads, dim=0)
        return mask[:, None]

    def _lens(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.group.lens, device=device)


def _explicit_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Scores written out in float32, for what `scaled_dot_product_attention` does not know."""
    scores = queries.float() @ keys.float().transpose(-1, -2) * options.scale
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return (weights @ values.float()).to(queries.dtype)

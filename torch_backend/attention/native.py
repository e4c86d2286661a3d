"""Paged attention in plain torch, for CPUs and devices without kernels. Decode sequences of similar length are computed
together by `scaled_dot_product_attention`, and so are prefill sequences of equal length. torch's own grouped attention
(`enable_gqa`) is not used: on a CPU it takes many times as long as this code, in which the queries of one kv head share
its keys by shapes and strides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.latent import ExpandedPlan, attend_absorbed
from torch_backend.attention.page_gather import PageGather
from torch_backend.attention.page_groups import SequenceGroup, group_sequences
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LARGEST_INT8, KVPages

_QUERIES_PER_BLOCK = 512
"""Queries of a prefill chunk per block: a mask is `[block, keys]`, without the keys after a block's last query."""

_EXPLICIT_QUERIES_PER_BLOCK = 64
"""The same if scores are materialised, `[heads, block, keys]`."""


class NativeAttention:
    """`AttentionImplementation` without kernels. Reads lengths on the host, so it cannot be captured."""

    def prepare(self, batch: ForwardBatch) -> NativeStep:
        return NativeStep(batch)


class _Form(NamedTuple):
    """Properties of layers that share indices, masks and buffers."""

    pages: torch.Size
    dtype: torch.dtype
    window: int | None
    explicit: bool
    expands_from: int | None


class NativeStep:
    """Attention of one step, or of its sequences from index `first` on."""

    def __init__(self, batch: ForwardBatch, first: int = 0) -> None:
        self._batch = batch
        self._groups = group_sequences(batch, first)
        self._complete = sum(group.num_tokens for group in self._groups) == batch.tokens.shape[0]
        self._plans: dict[_Form, list[_Plan | ExpandedPlan]] = {}

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        plans = self._plans_of(queries, kv, options)
        if len(plans) == 1 and self._complete:
            return plans[0].attend(queries, kv, options)
        width = queries.shape[2] if options.latents is None else options.latents.value_up.shape[1]
        output = queries.new_empty((*queries.shape[:2], width))
        if not self._complete:
            output.zero_()
        self.attend_into(output, queries, kv, options)
        return output

    def attend_into(self, output: torch.Tensor, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> None:
        """Writes the tokens of its sequences, except padding, and no others."""
        for plan in self._plans_of(queries, kv, options):
            tokens = plan.group.tokens
            output[tokens] = plan.attend(queries[tokens], kv, options)

    def _plans_of(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> list[_Plan | ExpandedPlan]:
        # 8-bit keys and values are widened to float32, to avoid another rounding.
        dtype = queries.dtype if kv.keys.dtype.itemsize > 1 else torch.float32
        explicit = options.soft_cap is not None or options.sinks is not None or kv.token_scales is not None
        expands_from = None if options.latents is None else options.latents.expands_from
        form = _Form(kv.keys.shape, dtype, options.window, explicit, expands_from)
        plans = self._plans.get(form)
        if plans is None:
            plans = self._plans[form] = [self._plan(group, kv, form) for group in self._groups]
        return plans

    def _plan(self, group: SequenceGroup, kv: KVPages, form: _Form) -> _Plan | ExpandedPlan:
        if form.expands_from is not None and group.count >= form.expands_from:
            return ExpandedPlan(group, self._batch)
        return _Plan(group, self._batch, kv, form)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of queries of each sequence of a group, and the number of keys that they may see. `mask`: added to
    scores, `[sequences * kv_heads or 1, 1, queries or 1, keys]`; None if all keys are seen, or all up to the query's
    own if `causal`."""

    queries: slice
    keys: int
    mask: torch.Tensor | None
    causal: bool


class _Plan:
    """The computation of a group of sequences, for layers of one form."""

    def __init__(self, group: SequenceGroup, batch: ForwardBatch, kv: KVPages, form: _Form) -> None:
        self.group = group
        self._form = form
        self._kv_heads = kv.keys.shape[1]
        self._gather = PageGather(group, batch, kv, form.window)
        self._blocks = self._make_blocks(kv.keys.device) if batch.causal else self._whole_blocks()

    def attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """Queries of the group `[tokens, heads, head_dim]` → outputs, contiguous."""
        attend = partial(self._attend, kv=kv, options=options)
        return (
            attend(queries)
            if options.latents is None
            else attend_absorbed(queries, options.latents, attend).contiguous()
        )

    def _attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        keys, values = self._gather(kv)
        integers = None if kv.token_scales is None else self._gather.key_scales(kv.token_scales)
        wide = queries if queries.dtype == self._form.dtype else queries.to(self._form.dtype)
        shaped = self._shape_queries(wide)
        if shaped.shape[1] > 1:
            keys, values = (part.expand(-1, shaped.shape[1], -1, -1) for part in (keys, values))
        if len(self._blocks) == 1:
            output = self._attend_block(self._blocks[0], shaped, keys, values, integers, options)
        else:
            parts = []
            for block in self._blocks:
                seen = (keys[:, :, : block.keys], values[:, :, : block.keys])
                parts.append(self._attend_block(block, shaped[:, :, block.queries], *seen, integers, options))
            output = torch.cat(parts, dim=2)
        return self._unshape(output, queries)

    def _attend_block(
        self,
        block: _Block,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        integers: tuple[torch.Tensor, torch.Tensor] | None,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if not self._form.explicit:
            return functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=block.mask, is_causal=block.causal, scale=options.scale
            )
        if integers is None:
            scores = queries.float() @ keys.float().transpose(-1, -2) * options.scale
        else:
            scales, key_mean = integers
            scores = integer_scores(queries, keys, scales[:, :, : block.keys], key_mean, options)
        return _explicit_attention(scores, values, block.mask, self._shape_sinks(options), options).to(queries.dtype)

    def _shape_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """For single tokens `[sequences * kv_heads, 1, group, head_dim]`: heads are more queries over the same keys;
        else `[sequences * kv_heads, group, count, head_dim]`."""
        sequences, count = len(self.group.lens), self.group.count
        if count == 1:
            return queries.reshape(sequences * self._kv_heads, 1, -1, queries.shape[-1])
        split = queries.reshape(sequences, count, self._kv_heads, -1, queries.shape[-1])
        return split.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def _unshape(self, output: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if self.group.count > 1:
            split = output.view(-1, self._kv_heads, *output.shape[1:])
            output = split.permute(0, 3, 1, 2, 4)
        if output.dtype != queries.dtype:
            output = output.to(queries.dtype)
        return output.reshape(queries.shape).contiguous()

    def _shape_sinks(self, options: AttentionOptions) -> torch.Tensor | None:
        if options.sinks is None:
            return None
        sinks = options.sinks.view(self._kv_heads, -1).repeat(len(self.group.lens), 1)
        return sinks[:, None, :, None] if self.group.count == 1 else sinks[:, :, None, None]

    def _whole_blocks(self) -> list[_Block]:
        """Blocks whose queries see all keys: sequences are whole, and those of one token see only that."""
        group = self.group
        size = _EXPLICIT_QUERIES_PER_BLOCK if self._form.explicit else _QUERIES_PER_BLOCK
        firsts = range(0, group.count, size)
        return [
            _Block(slice(first, min(first + size, group.count)), group.longest, None, causal=False) for first in firsts
        ]

    def _make_blocks(self, device: torch.device) -> list[_Block]:
        group, window = self.group, self._form.window
        windowed = window is not None and window < group.longest
        if group.count == group.longest and group.count > 1 and not windowed and not self._form.explicit:
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
        # Sequences of several tokens have the same length, and share one mask.
        lens = torch.tensor(group.lens if group.count == 1 else group.lens[:1], device=device)
        offsets = torch.arange(first - group.count, last - group.count, device=device)
        positions = lens[:, None, None] + offsets[:, None]
        places = torch.arange(keys, device=device)
        hidden = places > positions
        if window is not None:
            hidden |= positions - places >= window
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(hidden.shape, dtype=self._form.dtype, device=device).masked_fill_(hidden, -torch.inf)
        if group.count == 1:
            mask = mask.repeat_interleave(self._kv_heads, dim=0)
        return mask[:, None]


def _explicit_attention(
    scores: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention from float32 scores, for options that `scaled_dot_product_attention` does not support."""
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return weights @ values.float()


def integer_scores(
    queries: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, key_mean: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Scores of int8 keys: queries are int8 too, with a scale each, and products are integers. This is SageAttention
    (Zhang et al. 2025) over pages, with two differences: the mean subtracted from keys is fixed, and each key has its
    own scale, so that a page's content depends on neither the other keys nor the chunks of its prompt.

    Scaled scores of stored keys, float32 `[n, ..., q, k]`, before any cap and mask: `q @ key_mean + (q @ (key -
    key_mean))`, up to the rounding to 8 bits. `queries` `[n, ..., q, d]`; `levels` float32 `[n, 1 or more, k, d]`,
    integers up to 127; `scales` float32 `[n, 1, k]`; `key_mean` float32 `[n, d]`."""
    wide = queries.float()
    largest = wide.abs().amax(-1, keepdim=True)
    steps = torch.where(largest == 0.0, 1.0, largest / LARGEST_INT8)
    # Sums of at most 1,040 products of integers up to 127 are exact in float32, in any order.
    products = torch.round(wide / steps) @ levels.transpose(-1, -2)
    of_mean = wide @ key_mean[:, None, :, None]
    return (products * steps * scales[:, :, None] + of_mean) * options.scale

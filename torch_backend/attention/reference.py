"""The reference for tests: every query against every slot that its sequence could have, in float32 and plain torch."""

from __future__ import annotations

from functools import partial

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.latent import attend_absorbed
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages, TokenScales


class ReferenceAttention:
    """`AttentionImplementation` that computes all columns of the page table, for any lengths; for tests."""

    def prepare(self, batch: ForwardBatch) -> ReferenceStep:
        return ReferenceStep(batch)


class ReferenceStep:
    """Attention of one step, one sequence after the other. Reads lengths on the host."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        if options.latents is None:
            return self._attend(queries, kv, options)
        return attend_absorbed(queries, options.latents, partial(self._attend, kv=kv, options=options)).contiguous()

    def _attend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        batch = self._batch
        output = torch.zeros_like(queries)
        starts = batch.query_starts.tolist()
        for sequence, kv_len in enumerate(batch.kv_lens.tolist()):
            mine = slice(starts[sequence], starts[sequence + 1])
            keys, values = gather_pages(kv, batch.page_table[sequence])
            found = attend(queries[mine].float(), keys, values, kv_len, options, causal=batch.causal)
            output[mine] = found.to(queries.dtype)
        return output


def gather_pages(kv: KVPages, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `pages` `[P]` in order: float32 `[kv_heads, P * page_size, head_dim]`, scales applied."""
    if kv.latent_scales is not None:
        found = kv.latent_scales.gather(kv.keys, pages.long())[None]
        return found, found
    if kv.token_scales is not None:
        return _gather_integers(kv, kv.token_scales, pages.long())
    gathered = []
    for stored, scale in ((kv.keys, kv.key_scale), (kv.values, kv.value_scale)):
        # Indexed as bytes before widening, because few devices index float8.
        pages_of = stored.view(torch.uint8)[pages.long()].view(stored.dtype).float()
        by_head = pages_of.transpose(0, 1).flatten(1, 2)
        gathered.append(by_head if scale is None else by_head * scale[:, None, None])
    return gathered[0], gathered[1]


def _gather_integers(kv: KVPages, scales: TokenScales, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (stored[pages].float().transpose(0, 1).flatten(1, 2) for stored in (kv.keys, kv.values))
    by_token = [
        None if side is None else side[pages].transpose(0, 1).flatten(1, 2) for side in (scales.keys, scales.values)
    ]
    assert by_token[0] is not None
    keys = keys * by_token[0][..., None] + scales.key_mean[:, None]
    return keys, values if by_token[1] is None else values * by_token[1][..., None]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_len: int,
    options: AttentionOptions,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention of the last queries `[q, heads, head_dim]` of a sequence whose first `kv_len` slots are keys; 0 for a
    query that sees no key. Keys and values are `[kv_heads, slots, head_dim]`, all float32."""
    heads, kv_heads, slots = queries.shape[1], keys.shape[0], keys.shape[1]
    positions = kv_len - queries.shape[0] + torch.arange(queries.shape[0], device=queries.device)[:, None]
    places = torch.arange(slots, device=queries.device)
    visible = ((places <= positions) | (not causal)) & (places < kv_len)
    if options.window is not None:
        visible &= positions - places < options.window

    # Slots that no query sees may be NaN, and NaN times a weight of 0 is NaN.
    seen = visible.any(0)[None, :, None]
    keys = keys.where(seen, 0.0).repeat_interleave(heads // kv_heads, dim=0)
    values = values.where(seen, 0.0).repeat_interleave(heads // kv_heads, dim=0)
    scores = torch.einsum("qhd,hsd->hqs", queries, keys) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(heads, queries.shape[0], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :slots]
    weights = weights.where(visible.any(-1, keepdim=True), 0.0)  # without any key the softmax is 0 / 0
    return torch.einsum("hqs,hsd->qhd", weights, values)

"""Attention by Triton kernels: decode rows by splits of their keys, prefill chunks by blocks of their tokens."""

from __future__ import annotations

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.batch import ForwardBatch
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import DecodePlan, Partials, decode_attention, plan_decode
from torch_backend.kernels.extend_attention import ExtendPlan, extend_attention, extend_tile, plan_extend
from torch_backend.kv_pages import KVPages


class TritonAttention:
    """`AttentionImplementation` for CUDA. Nothing is read on the host, so that a decode step can be captured."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def prepare(self, batch: ForwardBatch) -> TritonStep:
        """Work is shared out at the first layer of each kind, since windows differ between layers."""
        return TritonStep(batch, self._chip)


class TritonStep:
    """Attention of one step. Plans are made once for all layers of one window and number of kv heads."""

    def __init__(self, batch: ForwardBatch, chip: Chip) -> None:
        self._batch = batch
        self._chip = chip
        self._decode_plans: dict[tuple[int, int | None], DecodePlan] = {}
        self._extend_plans: dict[int, ExtendPlan] = {}
        self._partials: Partials | None = None

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """See `StepAttention`."""
        output = torch.empty_like(queries)
        if self._batch.num_decode:
            self._decode(queries, kv, options, output)
        if not self._batch.decode_only:
            self._extend(queries, kv, options, output)
        return output

    def _decode(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, output: torch.Tensor) -> None:
        batch = self._batch
        kind = kv.keys.shape[1], options.window
        if kind not in self._decode_plans:
            longest = batch.page_table.shape[1] * kv.page_size
            self._decode_plans[kind] = plan_decode(batch.kv_lens, batch.num_decode, longest, *kind)
        plan = self._decode_plans[kind]
        # Layers run one after the other and may share what they hand from kernel to kernel.
        if self._partials is None or not self._partials.fits(plan, queries):
            self._partials = Partials.allocate(plan, queries)
        decode_attention(
            queries, kv, batch.page_table, batch.kv_lens, options, plan, self._partials, output, self._chip
        )

    def _extend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, output: torch.Tensor) -> None:
        batch = self._batch
        tile = extend_tile(queries.shape[2], kv.keys.dtype, self._chip)
        tokens = tile.tokens(queries.shape[1] // kv.keys.shape[1])
        if tokens not in self._extend_plans:
            self._extend_plans[tokens] = plan_extend(batch.query_starts, batch.num_decode, len(queries), tokens)
        plan = self._extend_plans[tokens]
        extend_attention(
            queries,
            kv,
            batch.page_table,
            batch.kv_lens,
            batch.query_starts,
            batch.num_decode,
            options,
            plan,
            output,
            self._chip,
        )

"""Attention with Triton kernels: decode rows by splits of their keys, prefill chunks by blocks of their tokens."""

from __future__ import annotations

import torch

from torch_backend.attention.interface import AttentionOptions, LatentHeads
from torch_backend.attention.latent import attend_absorbed
from torch_backend.batch import ForwardBatch
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import DecodePlan, Partials, decode_attention, plan_decode
from torch_backend.kernels.extend_attention import Sums, extend_attention, form_of
from torch_backend.kernels.extend_plan import ExtendForm, ExtendPlan, plan_extend
from torch_backend.kernels.latent_attention import latent_attention
from torch_backend.kernels.latent_plan import LatentPlan, plan_latent_chunks, plan_latent_decode
from torch_backend.kv_pages import KVPages


class TritonAttention:
    """`AttentionImplementation` for CUDA. Nothing is read on the host, so that steps can be captured."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def prepare(self, batch: ForwardBatch) -> TritonStep:
        """Plans at the first layer of each kind, because windows differ between layers."""
        return TritonStep(batch.as_causal(), self._chip)


class TritonStep:
    """Attention of one step. Plans are made once for all layers of one window and number of kv heads."""

    def __init__(self, batch: ForwardBatch, chip: Chip) -> None:
        self._batch = batch
        self._chip = chip
        self._decode_plans: dict[tuple[int, int | None], DecodePlan] = {}
        self._extend_plans: dict[ExtendForm, ExtendPlan] = {}
        self._partials: Partials | None = None
        self._sums: Sums | None = None
        self._latent_plans: dict[tuple[int, int], list[LatentPlan]] = {}

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        latents = options.latents
        if latents is not None:
            return attend_absorbed(
                queries, latents, lambda each: self._over_latents(each, kv, options, latents)
            ).contiguous()
        output = torch.empty_like(queries)
        if self._batch.num_decode:
            self._decode(queries, kv, options, output)
        if not self._batch.decode_only:
            self._extend(queries, kv, options, output)
        return output

    def _over_latents(
        self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, latents: LatentHeads
    ) -> torch.Tensor:
        """Absorbed queries `[T, heads, latent + rotary]` → `[T, heads, latent]`."""
        batch, heads, latent = self._batch, queries.shape[1], latents.value_up.shape[2]
        if (heads, latent) not in self._latent_plans:
            self._latent_plans[heads, latent] = self._plan_latents(len(queries), heads, latent, kv)
        output = queries.new_empty(len(queries), heads, latent)
        for plan in self._latent_plans[heads, latent]:
            latent_attention(queries, kv, batch.page_table, batch.kv_lens, options, plan, output, self._chip)
        return output

    def _plan_latents(self, num_tokens: int, heads: int, latent: int, kv: KVPages) -> list[LatentPlan]:
        """Plans of the decode rows and of the chunks."""
        batch, longest = self._batch, self._batch.page_table.shape[1] * kv.page_size
        sizes = (longest, heads, latent, kv.keys.dtype, self._chip)
        plans = []
        if batch.num_decode:
            plans.append(plan_latent_decode(batch.kv_lens, batch.num_decode, *sizes))
        if not batch.decode_only:
            plans.append(plan_latent_chunks(batch.query_starts, batch.kv_lens, batch.num_decode, num_tokens, *sizes))
        return plans

    def _decode(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, output: torch.Tensor) -> None:
        batch = self._batch
        kind = kv.keys.shape[1], options.window
        if kind not in self._decode_plans:
            longest = batch.page_table.shape[1] * kv.page_size
            self._decode_plans[kind] = plan_decode(batch.kv_lens, batch.num_decode, longest, *kind)
        plan = self._decode_plans[kind]
        # Layers run one after the other and share these buffers.
        if self._partials is None or not self._partials.fits(plan, queries):
            self._partials = Partials.allocate(plan, queries)
        decode_attention(
            queries, kv, batch.page_table, batch.kv_lens, options, plan, self._partials, output, self._chip
        )

    def _extend(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, output: torch.Tensor) -> None:
        batch = self._batch
        form = form_of(queries, kv, options, self._chip)
        if form not in self._extend_plans:
            longest = batch.page_table.shape[1] * kv.page_size
            self._extend_plans[form] = plan_extend(
                batch.query_starts, batch.kv_lens, batch.num_decode, len(queries), longest, form, self._chip
            )
        plan = self._extend_plans[form]
        if self._sums is None or not self._sums.fits(plan):
            self._sums = Sums.allocate(plan, queries.device)
        extend_attention(
            queries,
            kv,
            batch.page_table,
            batch.kv_lens,
            batch.query_starts,
            batch.num_decode,
            options,
            plan,
            self._sums,
            output,
            self._chip,
        )

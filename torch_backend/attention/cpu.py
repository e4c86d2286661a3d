"""Attention with CPU kernels that read the pages; of prompts with torch operations if no kernel supports them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_jax.cpu_kernels.compiling import KernelCompiler
from sglang_jax.cpu_kernels.decode_attention import FIELDS, build_decode_attention, scratch_floats
from torch_backend.attention.cpu_latents import CpuLatents
from torch_backend.attention.cpu_prompts import CpuPrompts, items_of, scales_of
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.attention.native import NativeStep
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads
from torch_backend.kv_pages import KVPages


class CpuAttention:
    """`AttentionImplementation` for a CPU, for use by one thread at a time. A decode row's result is batch-invariant.
    `dtype`, bfloat16 or float32, of queries and pages, which may also be int8 (`kv_dtype`); `forms` of all layers'
    heads; `prompts`, with kernels for these, computes sequences of several tokens instead of torch operations;
    `latents`: kernels of layers with latent attention."""

    def __init__(
        self,
        compiler: KernelCompiler,
        dtype: torch.dtype,
        forms: Iterable[HeadForm],
        prompts: CpuPrompts | None = None,
        threads: OwnThreads | None = None,
        kv_dtype: torch.dtype | None = None,
        latents: CpuLatents | None = None,
    ) -> None:
        self._dtype, self._kv_dtype = dtype, kv_dtype or dtype
        self.prompts, self.latents = prompts, latents
        width = self._kv_dtype.itemsize
        self._decode = {
            form: Launcher(
                build_decode_attention(compiler, width, form.head_dim, form.group, dtype.itemsize), FIELDS, threads
            )
            for form in forms
        }
        floats = (launcher.slots * scratch_floats(form.head_dim, form.group) for form, launcher in self._decode.items())
        self._scratch = torch.empty(max(floats, default=0), dtype=torch.float32)

    def prepare(self, batch: ForwardBatch) -> CpuStep:
        return CpuStep(self, batch)

    @property
    def widens(self) -> bool:
        """Whether pages have another dtype than queries."""
        return self._kv_dtype is not self._dtype

    def check(self, queries: torch.Tensor, kv: KVPages) -> HeadForm:
        """The form of heads. Raises `TypeError` for dtypes or a form without kernels, and `ValueError` for pages that
        are not contiguous."""
        _, kv_heads, _, head_dim = kv.keys.shape
        form = HeadForm(head_dim, queries.shape[1] // kv_heads)
        right = queries.dtype is self._dtype and kv.keys.dtype is kv.values.dtype is self._kv_dtype
        if form not in self._decode or not right:
            raise TypeError(
                f"CPU attention made for {self._dtype}, {', '.join(map(str, self._decode))} and pages of "
                f"{self._kv_dtype} was given {queries.dtype}, {form} and pages of {kv.keys.dtype} and {kv.values.dtype}"
            )
        if not (kv.keys.is_contiguous() and kv.values.is_contiguous()):
            raise ValueError("pages must be contiguous: CPU attention reads them by address")
        return form

    def attend(
        self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, batch: ForwardBatch, num_keys: int
    ) -> torch.Tensor:
        """Computes attention of the decode rows, which have `num_keys` keys in total; other tokens are left unset."""
        _, kv_heads, page_size, head_dim = kv.keys.shape
        decode = self._decode[self.check(queries, kv)]
        queries = queries.contiguous()
        output = torch.empty_like(queries)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        decode(
            num_keys * kv_heads * head_dim,
            batch.num_decode * kv_heads,
            queries.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            output.data_ptr(),
            batch.page_table.data_ptr(),
            batch.kv_lens.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            self._scratch.data_ptr(),
            decode.slots,
            batch.page_table.shape[1],
            kv_heads,
            page_size,
            page_size,
            options.window or 0,
            options.scale,
            options.soft_cap or 0.0,
            *scales_of(kv),
        )
        return output


class CpuStep:
    def __init__(self, attention: CpuAttention, batch: ForwardBatch) -> None:
        self._attention = attention
        self._batch = batch
        self._num_keys = int(batch.kv_lens[: batch.num_decode].sum())
        native = not batch.decode_only and attention.prompts is None
        self._prompts = NativeStep(batch, first=batch.num_decode) if native else None
        self._items: dict[tuple[int, int], torch.Tensor] = {}
        self._latents = None if attention.latents is None else attention.latents.prepare(batch)

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        if options.latents is not None:
            if self._latents is None:
                raise TypeError("CPU attention made for heads was given latent vectors")
            return self._latents(queries, kv, options)
        if self._attention.widens and kv.keys.dtype is queries.dtype:
            # The step that measures the mean of keys, before any are stored in int8.
            return NativeStep(self._batch)(queries, kv, options)
        if self._attention.prompts is not None and not self._batch.decode_only:
            return self._by_kernels(self._attention.prompts, queries, kv, options)
        if self._prompts is not None and not self._batch.num_decode:
            return self._prompts(queries, kv, options)
        output = self._attention.attend(queries, kv, options, self._batch, self._num_keys)
        if self._prompts is not None:
            self._prompts.attend_into(output, queries, kv, options)
        return output

    def _by_kernels(
        self, prompts: CpuPrompts, queries: torch.Tensor, kv: KVPages, options: AttentionOptions
    ) -> torch.Tensor:
        batch = self._batch
        self._attention.check(queries, kv)
        queries = queries.contiguous()
        if batch.num_decode:
            output = self._attention.attend(queries, kv, options, batch, self._num_keys)
        else:
            output = torch.empty_like(queries)
        kv_heads = kv.keys.shape[1]
        key = kv_heads, queries.shape[1] // kv_heads
        if key not in self._items:
            self._items[key] = items_of(batch, batch.num_decode, *key)
        prompts.attend_into(output, queries, kv, options, batch, self._items[key])
        return output

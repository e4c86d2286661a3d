"""Attention over latent vectors with CPU kernels that read the pages, in the absorbed form; chunks that take fewer
products in the expanded form are computed with torch operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from sglang_jax.cpu_kernels.compiling import KernelCompiler
from sglang_jax.cpu_kernels.prompt_attention import (
    FIELDS,
    build_prompt_attention,
    heads_of_item,
    scratch_bytes,
    supported_head_dim,
    tokens_of_item,
)
from sglang_jax.cpu_kernels.prompt_tiles import Products
from torch_backend.attention.cpu_prompts import items_of
from torch_backend.attention.interface import AttentionOptions, LatentForm, LatentHeads
from torch_backend.attention.latent import ExpandedPlan, attend_absorbed
from torch_backend.attention.page_groups import group_sequences
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads
from torch_backend.kv_pages import KVPages


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel for items of `group` heads, `parts` of which are all heads."""

    parts: int
    group: int
    launcher: Launcher


class CpuLatents:
    """Attention over latent vectors, for use by one thread at a time. A token's result does not depend on the chunk
    that it is in, or on other sequences. `dtype`, bfloat16 or float32, of queries and pages; `forms` of all layers,
    supported by `take`; `products`: see `CpuPrompts`."""

    def __init__(
        self,
        compiler: KernelCompiler,
        dtype: torch.dtype,
        forms: Iterable[LatentForm],
        products: Products | None = None,
        threads: OwnThreads | None = None,
    ) -> None:
        self._dtype = dtype
        own = products or Products.of(dtype.itemsize)
        self._kernels: dict[LatentForm, list[_Kernel]] = {}
        scratch = 0
        for form in forms:
            self._kernels[form] = kernels = []
            for group in heads_of_item(form.heads):
                built = build_prompt_attention(
                    compiler, own, dtype.itemsize, form.width, group, dtype.itemsize, form.latent
                )
                launcher = Launcher(built, FIELDS, threads)
                kernels.append(_Kernel(form.heads // group, group, launcher))
                scratch = max(scratch, launcher.slots * scratch_bytes(own, form.width, group, form.latent))
        self._scratch = torch.empty(scratch, dtype=torch.uint8)

    @staticmethod
    def take(forms: Iterable[LatentForm]) -> bool:
        """Whether the kernels support vectors of these sizes."""
        return all(supported_head_dim(form.width) and supported_head_dim(form.latent) for form in forms)

    def prepare(self, batch: ForwardBatch) -> CpuLatentStep:
        return CpuLatentStep(self, batch)

    def kernel_for(self, form: LatentForm, counts: Iterable[int]) -> _Kernel:
        """The kernel for sequences with `counts` queries: items of fewer heads if there are not enough for all threads.
        Both give the same bits. Raises `TypeError` for a form without kernels."""
        kernels = self._kernels.get(form)
        if kernels is None:
            raise TypeError(f"CPU attention made for {', '.join(map(str, self._kernels))} was given {form}")
        first = kernels[0]
        blocks = sum(-(-count // tokens_of_item(first.group)) for count in counts)
        return first if blocks * first.parts >= first.launcher.slots else kernels[-1]

    def attend(
        self,
        kernel: _Kernel,
        queries: torch.Tensor,
        kv: KVPages,
        options: AttentionOptions,
        batch: ForwardBatch,
        items: torch.Tensor,
        latent: int,
    ) -> torch.Tensor:
        """Absorbed queries `[T, heads, latent + rotary]` → `[T, heads, latent]`, 0 for tokens without an item. Raises
        `TypeError` for other dtypes, and `ValueError` for pages that are not contiguous."""
        if not (queries.dtype is kv.keys.dtype is self._dtype):
            raise TypeError(f"CPU attention made for {self._dtype} was given {queries.dtype} and {kv.keys.dtype}")
        if not kv.keys.is_contiguous():
            raise ValueError("pages must be contiguous: CPU attention reads them by address")
        queries = queries.contiguous()
        output = queries.new_zeros(*queries.shape[:2], latent)
        kernel.launcher(
            queries.numel() * 64,  # a lower bound of the cost of a token
            len(items),
            queries.data_ptr(),
            kv.keys.data_ptr(),
            kv.keys.data_ptr(),
            output.data_ptr(),
            batch.page_table.data_ptr(),
            batch.kv_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            0,
            items.data_ptr(),
            self._scratch.data_ptr(),
            kernel.launcher.slots,
            batch.page_table.shape[1],
            kernel.parts,
            kv.page_size,
            kv.page_size,
            0,
            options.scale,
            0.0,
            0,
            0,
            0,
            False,
        )
        return output


class CpuLatentStep:
    """Attention of one step."""

    def __init__(self, attention: CpuLatents, batch: ForwardBatch) -> None:
        self._attention = attention
        self._batch = batch
        self._counts: list[int] = batch.query_starts.diff().tolist()
        self._parts: dict[int | None, tuple[_Absorbed, list[ExpandedPlan]]] = {}

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        latents = options.latents
        assert latents is not None
        absorbed, expanded = self._divide(latents.expands_from)
        if not expanded:
            return absorbed.attend(queries, kv, options, latents)
        output = queries.new_zeros(*queries.shape[:2], latents.value_up.shape[1])
        if absorbed.counts:
            output[absorbed.tokens] = absorbed.attend(queries[absorbed.tokens], kv, options, latents)
        for plan in expanded:
            output[plan.group.tokens] = plan.attend(queries[plan.group.tokens], kv, options)
        return output

    def _divide(self, expands_from: int | None) -> tuple[_Absorbed, list[ExpandedPlan]]:
        """The sequences with fewer tokens than `expands_from`, and the others."""
        if expands_from not in self._parts:
            batch, counts = self._batch, self._counts
            short = [number for number, count in enumerate(counts) if expands_from is None or count < expands_from]
            expanded = []
            if len(short) < len(counts):
                groups = [group for group in group_sequences(batch) if group.count >= (expands_from or 0)]
                expanded = [ExpandedPlan(group, batch) for group in groups]
            self._parts[expands_from] = _Absorbed.of(self._attention, batch, counts, short), expanded
        return self._parts[expands_from]


class _Absorbed:
    """Some sequences of a step: `tokens`, indices of their queries among all, and `counts` of each."""

    def __init__(
        self, attention: CpuLatents, batch: ForwardBatch, tokens: slice | torch.Tensor, counts: list[int]
    ) -> None:
        self._attention, self._batch = attention, batch
        self.tokens, self.counts = tokens, counts
        self._items: dict[_Kernel, torch.Tensor] = {}

    @classmethod
    def of(cls, attention: CpuLatents, batch: ForwardBatch, counts: list[int], chosen: list[int]) -> _Absorbed:
        if len(chosen) == len(counts):
            return cls(attention, batch, slice(None), counts)
        rows, own = torch.tensor(chosen, dtype=torch.int64), [counts[number] for number in chosen]
        starts = batch.query_starts[rows].tolist()
        tokens = [start + number for start, count in zip(starts, own, strict=True) for number in range(count)]
        part = replace(
            batch,
            page_table=batch.page_table[rows].contiguous(),
            kv_lens=batch.kv_lens[rows],
            query_starts=torch.tensor([0, *own]).cumsum(0).int(),
        )
        return cls(attention, part, torch.tensor(tokens, dtype=torch.int64), own)

    def attend(
        self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions, latents: LatentHeads
    ) -> torch.Tensor:
        """Queries of its tokens → `[tokens, heads, value_dim]`."""
        latent = latents.value_up.shape[2]
        form = LatentForm(queries.shape[1], latent, kv.keys.shape[3] - latent)
        kernel = self._attention.kernel_for(form, self.counts)
        if kernel not in self._items:
            self._items[kernel] = items_of(self._batch, 0, kernel.parts, kernel.group)
        items = self._items[kernel]

        def over_vectors(absorbed: torch.Tensor) -> torch.Tensor:
            return self._attention.attend(kernel, absorbed, kv, options, self._batch, items, latent)

        return attend_absorbed(queries, latents, over_vectors).contiguous()

"""Attention of prompts with CPU kernels that read the pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from sglang_jax.cpu_kernels.compiling import KernelCompiler
from sglang_jax.cpu_kernels.prompt_attention import (
    FIELDS,
    build_prompt_attention,
    scratch_bytes,
    supported_head_dim,
    tokens_of_item,
)
from sglang_jax.cpu_kernels.prompt_tiles import Products
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads
from torch_backend.kv_pages import KVPages


class CpuPrompts:
    """Attention of sequences of several tokens, to be used by one thread at a time. A token's result does not depend on
    the chunk that it is in, or on other sequences. `dtype`, bfloat16 or float32, of queries, keys and values; `forms`:
    of all layers' heads, supported by `take`; `products`: how blocks are multiplied, by default as this processor does
    it best."""

    def __init__(
        self,
        compiler: KernelCompiler,
        dtype: torch.dtype,
        forms: Iterable[HeadForm],
        products: Products | None = None,
        threads: OwnThreads | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        own, width = products or Products.of(dtype.itemsize), (kv_dtype or dtype).itemsize
        self._launchers = {
            form: Launcher(
                build_prompt_attention(compiler, own, width, form.head_dim, form.group, dtype.itemsize), FIELDS, threads
            )
            for form in forms
        }
        sizes = (each.slots * scratch_bytes(own, form.head_dim, form.group) for form, each in self._launchers.items())
        self.scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8)

    @staticmethod
    def take(forms: Iterable[HeadForm]) -> bool:
        """Whether the kernels support heads of these sizes."""
        return all(supported_head_dim(form.head_dim) for form in forms)

    def attend_into(
        self,
        output: torch.Tensor,
        queries: torch.Tensor,
        kv: KVPages,
        options: AttentionOptions,
        batch: ForwardBatch,
        items: torch.Tensor,
    ) -> None:
        """Writes the tokens of the sequences in `items` (see `items_of`), and no others. All are contiguous."""
        _, kv_heads, page_size, head_dim = kv.keys.shape
        launcher = self._launchers[HeadForm(head_dim, queries.shape[1] // kv_heads)]
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        launcher(
            queries.numel() * 64,  # a lower bound of the cost of a token
            len(items),
            queries.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            output.data_ptr(),
            batch.page_table.data_ptr(),
            batch.kv_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            items.data_ptr(),
            self.scratch.data_ptr(),
            launcher.slots,
            batch.page_table.shape[1],
            kv_heads,
            page_size,
            page_size,
            options.window or 0,
            options.scale,
            options.soft_cap or 0.0,
            *scales_of(kv),
            not batch.causal,
        )


def scales_of(kv: KVPages) -> tuple[int, int, int]:
    """The addresses of scales of int8 keys and values, and of the mean of keys; 0 without them."""
    scales = kv.token_scales
    if scales is None:
        return 0, 0, 0
    assert scales.values is not None, "values of pages for CPU kernels are int8 if keys are"
    return scales.keys.data_ptr(), scales.values.data_ptr(), scales.key_mean.data_ptr()


def items_of(batch: ForwardBatch, first: int, kv_heads: int, group: int) -> torch.Tensor:
    """The work items of the sequences from index `first` on, int32 `[items, 4]` as the kernel reads them; items that
    see the most keys first, so that threads end at about the same time."""
    lens: list[int] = batch.kv_lens.tolist()
    starts: list[int] = batch.query_starts.tolist()
    size = tokens_of_item(group)
    found: list[tuple[int, int, int, int, int]] = []
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if sequence < first or lens[sequence] == 0:
            continue
        for token in range(0, end - start, size):
            last = min(token + size, end - start)
            keys = (last - token) * (lens[sequence] - (end - start) + last)
            found += [(keys, sequence, kv_head, token, last) for kv_head in range(kv_heads)]
    found.sort(key=lambda item: -item[0])
    return torch.tensor([item[1:] for item in found], dtype=torch.int32).reshape(-1, 4)

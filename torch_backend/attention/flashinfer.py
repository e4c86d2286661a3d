"""Attention with FlashInfer's kernels (Ye et al. 2025), for comparison: `--attention-backend flashinfer`. Its paged
layout HND, `[pages, kv_heads, page_size, head_dim]` with separate keys and values, is that of `KVPages`. Each step
plans on the host, from lengths that it reads there, so steps are not captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_jax.errors import ConfigError
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages

_WORKSPACE_BYTES = 128 * 2**20
"""As its documentation recommends. Layers run one after the other and share it."""

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)


def check_form(dtype: torch.dtype, kv_dtype: torch.dtype, heads: Sequence[HeadForm]) -> None:
    """Raises `ConfigError` for a model that FlashInfer's kernels do not support."""
    if dtype not in _DTYPES:
        raise ConfigError(f"attention_backend flashinfer needs dtype bfloat16 or float16, got {_name(dtype)}")
    if kv_dtype != dtype:
        raise ConfigError(
            "attention_backend flashinfer needs keys and values in the dtype of activations, without scales: "
            f"kv_cache_dtype must be auto, got keys in {_name(kv_dtype)}"
        )
    for head_dim in sorted({form.head_dim for form in heads} - set(_HEAD_DIMS)):
        raise ConfigError(
            f"attention_backend flashinfer has no kernels for heads of {head_dim} numbers, only of "
            f"{', '.join(map(str, _HEAD_DIMS))}: choose triton"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Form(NamedTuple):
    """Properties of layers that share a plan."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    options: AttentionOptions


class FlashInferAttention:
    """`AttentionImplementation` with FlashInfer. `library`: the module `flashinfer`."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # One for each form of layer: a plan is stored in the wrapper that made it.
        self._decode: dict[_Form, Any] = {}
        self._prefill: dict[_Form, Any] = {}

    def prepare(self, batch: ForwardBatch) -> FlashInferStep:
        """Reads the lengths; plans at the first layer of each form."""
        return FlashInferStep(self, batch.as_causal())

    def decode_wrapper(self, form: _Form) -> Any:
        """The wrapper for rows of one query. It uses tensor cores, whose kernels support groups of every size."""
        if form not in self._decode:
            make = self._library.BatchDecodeWithPagedKVCacheWrapper
            self._decode[form] = make(self._workspace, kv_layout="HND", use_tensor_cores=True)
        return self._decode[form]

    def prefill_wrapper(self, form: _Form) -> Any:
        if form not in self._prefill:
            self._prefill[form] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        return self._prefill[form]


@dataclass(frozen=True, slots=True)
class _Part:
    """The decode rows of a step, or its chunks: tokens `first : last`, and a wrapper with their plan."""

    first: int
    last: int
    wrapper: Any


class FlashInferStep:
    def __init__(self, attention: FlashInferAttention, batch: ForwardBatch) -> None:
        self._attention = attention
        self._batch = batch
        self._kv_lens: list[int] = batch.kv_lens.tolist()
        self._starts: list[int] = batch.query_starts.tolist()
        self._parts: dict[_Form, list[_Part]] = {}

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """See `StepAttention`. Raises `ValueError` for sinks, which FlashInfer does not support on every chip."""
        if options.sinks is not None:
            raise ValueError("attention_backend flashinfer does not support attention sinks: choose triton")
        _, heads, head_dim = queries.shape
        _, kv_heads, page_size, _ = kv.keys.shape
        form = _Form(heads, kv_heads, head_dim, page_size, queries.dtype, options)
        if form not in self._parts:
            self._parts[form] = self._plan(form)
        output = torch.zeros_like(queries)
        for part in self._parts[form]:
            own = slice(part.first, part.last)
            output[own] = part.wrapper.run(queries[own].contiguous(), (kv.keys, kv.values))
        return output

    def _plan(self, form: _Form) -> list[_Part]:
        """Plans the decode rows and the chunks. Padding, which has no keys, is at the end of both and left out."""
        decode = [row for row in range(self._batch.num_decode) if self._kv_lens[row]]
        prefill = [row for row in range(self._batch.num_decode, len(self._kv_lens)) if self._kv_lens[row]]
        parts = []
        if decode:
            wrapper = self._attention.decode_wrapper(form)
            wrapper.plan(*self._pages(decode, form), *self._sizes(form), **self._softmax(form))
            parts.append(_Part(0, len(decode), wrapper))
        if prefill:
            wrapper = self._attention.prefill_wrapper(form)
            first, last = self._starts[prefill[0]], self._starts[prefill[-1] + 1]
            starts = self._on_device([start - first for start in (*(self._starts[row] for row in prefill), last)])
            wrapper.plan(starts, *self._pages(prefill, form), *self._sizes(form), causal=True, **self._softmax(form))
            parts.append(_Part(first, last, wrapper))
        return parts

    def _pages(self, rows: Sequence[int], form: _Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The start of each row in the list of all pages, this list, and the number of keys in each row's last page.
        Pages before all keys that a row's queries see may belong to other rows, and are left out. Queries are the last
        tokens, so this does not change their distances to their keys."""
        size, window = form.page_size, form.options.window
        begins, pages, last_keys = [0], [], []
        for row in rows:
            length, count = self._kv_lens[row], self._starts[row + 1] - self._starts[row]
            hidden = 0 if window is None else max(length - count - window + 1, 0) // size
            end = -(-length // size)
            pages.append(self._batch.page_table[row, hidden:end])
            begins.append(begins[-1] + end - hidden)
            last_keys.append((length - 1) % size + 1)
        return self._on_device(begins), torch.cat(pages), self._on_device(last_keys)

    def _sizes(self, form: _Form) -> tuple[int, int, int, int]:
        return form.heads, form.kv_heads, form.head_dim, form.page_size

    def _softmax(self, form: _Form) -> dict[str, Any]:
        """Options of the softmax. `window_left` does not count the query's own key."""
        options = form.options
        return {
            "sm_scale": options.scale,
            "window_left": -1 if options.window is None else options.window - 1,
            "logits_soft_cap": options.soft_cap,
            "q_data_type": form.dtype,
            "kv_data_type": form.dtype,
        }

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._batch.kv_lens.device)

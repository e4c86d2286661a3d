"""Steps over shuffled pages full of NaN, with attention computed by plain numpy in float64 before any paging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torch_backend.attention.interface import AttentionImplementation, AttentionOptions
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: the last `query_lens` tokens of `kv_lens`, the first `num_decode` of them decode rows.

    `padding` adds sequences of one token and no key, which only decode steps may have.
    """

    kv_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_decode: int
    padding: int = 0
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 4
    columns: int = 0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True

    @property
    def rows(self) -> int:
        return len(self.kv_lens) + self.padding


@dataclass(frozen=True)
class Step:
    queries: torch.Tensor
    kv: KVPages
    batch: ForwardBatch
    options: AttentionOptions
    expected: NDArray[np.float64]


def softmax_attention(
    queries: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    options: AttentionOptions,
    common: NDArray[np.float64] | float = 0.0,
    *,
    causal: bool = True,
) -> NDArray[np.float64]:
    """Queries `[q, kv_heads, group, d]` at the last positions of keys and values `[k, kv_heads, d]`; `common`
    `[kv_heads, group, q, 1]` is added to their products."""
    positions = np.arange(len(keys) - len(queries), len(keys))[:, None]
    distances = positions - np.arange(len(keys))
    hidden = (distances < 0) & causal
    if options.window is not None:
        hidden |= distances >= options.window
    scores = (np.einsum("qhgd,khd->hgqk", queries, keys) + common) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * np.tanh(scores / options.soft_cap)
    scores[:, :, hidden] = -np.inf
    if options.sinks is not None:
        sinks = options.sinks.double().numpy().reshape(*scores.shape[:2], 1, 1)
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., : len(keys)]
    return np.einsum("hgqk,khd->qhgd", weights, values)


def make_step(case: Case, seed: int = 0) -> Step:
    """Every slot starts as NaN. The keys and values of each sequence are then written to pages in random order, except
    for pages that lie before every query's window: these may belong to other sequences."""
    rng = np.random.default_rng(seed)
    columns = case.columns or max(-(-length // case.page_size) for length in case.kv_lens) + 1
    num_pages = 1 + case.rows * columns
    unused = list(1 + rng.permutation(num_pages - 1))
    page_table = np.zeros((case.rows, columns), np.int32)
    options = _options(case, rng)
    kv = _poisoned(case, num_pages, rng)
    queries, expected = [], []
    for row, (length, count) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
        asked = torch.from_numpy(rng.standard_normal((count, case.kv_heads, case.group, case.head_dim))).to(case.dtype)
        used = -(-length // case.page_size)
        pages = [unused.pop() for _ in range(used)]
        page_table[row, :used] = pages
        keys, values = (
            _write(stored, scale, pages, rng.standard_normal((length, case.kv_heads, case.head_dim)))
            for stored, scale in ((kv.keys, kv.key_scale), (kv.values, kv.value_scale))
        )
        before = max(length - count - (options.window or length) + 1, 0) // case.page_size
        for stored in (kv.keys, kv.values):
            stored[pages[:before]] = torch.nan
        queries.append(asked)
        expected.append(softmax_attention(asked.double().numpy(), keys, values, options, causal=case.causal))
    padded = (case.padding, case.kv_heads, case.group, case.head_dim)
    queries.append(torch.ones(padded, dtype=case.dtype))
    expected.append(np.zeros(padded))
    starts = np.cumsum([0, *case.query_lens, *[1] * case.padding]).astype(np.int32)
    tokens = int(starts[-1])
    batch = ForwardBatch(
        tokens=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int32),
        write_slots=torch.zeros(tokens, dtype=torch.int64),
        page_table=torch.from_numpy(page_table),
        kv_lens=torch.tensor([*case.kv_lens, *[0] * case.padding], dtype=torch.int32),
        query_starts=torch.from_numpy(starts),
        num_decode=case.num_decode + case.padding,
        causal=case.causal,
    )
    flat = (tokens, case.kv_heads * case.group, case.head_dim)
    return Step(torch.cat(queries).reshape(flat), kv, batch, options, np.concatenate(expected).reshape(flat))


def error(implementation: AttentionImplementation, step: Step) -> float:
    """The largest difference from the expected output; also checks shape, type, layout and zeros of padding."""
    with torch.inference_mode():
        output = implementation.prepare(step.batch)(step.queries, step.kv, step.options)
    assert output.shape == step.queries.shape
    assert output.dtype == step.queries.dtype
    assert output.is_contiguous()
    assert bool((output[step.batch.kv_lens.repeat_interleave(step.batch.query_starts.diff()) == 0] == 0).all())
    difference = np.abs(output.double().numpy() - step.expected)
    assert not np.isnan(difference).any()
    return float(difference.max())


def _options(case: Case, rng: np.random.Generator) -> AttentionOptions:
    heads = case.kv_heads * case.group
    sinks = torch.from_numpy(rng.standard_normal(heads).astype(np.float32)) if case.sinks else None
    return AttentionOptions(case.head_dim**-0.5, case.window, case.soft_cap, sinks)


def _poisoned(case: Case, num_pages: int, rng: np.random.Generator) -> KVPages:
    dtype = case.kv_dtype or case.dtype
    shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    keys, values = (torch.full(shape, torch.nan).to(dtype) for _ in range(2))
    if dtype != torch.float8_e4m3fn:
        return KVPages(keys, values)
    scales = (torch.from_numpy(rng.uniform(0.01, 0.1, case.kv_heads).astype(np.float32)) for _ in range(2))
    return KVPages(keys, values, *scales)


def _write(
    stored: torch.Tensor, scale: torch.Tensor | None, pages: list[int], data: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Stores `data` `[length, kv_heads, d]` in `pages`; returns it as it is read back."""
    scales = torch.ones(data.shape[1]) if scale is None else scale
    rounded = (torch.from_numpy(data) / scales[:, None]).to(stored.dtype)
    page_size = stored.shape[2]
    for position in range(len(data)):
        column, offset = divmod(position, page_size)
        stored[pages[column], :, offset] = rounded[position]
    return (rounded.double() * scales[:, None]).numpy()

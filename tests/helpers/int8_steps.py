"""Steps over int8 pages, and numpy's results in float64: from the stored values, and from the values before
rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers.torch_attention_steps import Case, Step, make_step, softmax_attention
from numpy.typing import NDArray

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kv_pages import KVPages, TokenScales

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Int8Step:
    """`step.expected` is computed from int8 queries and keys without any other rounding; `exact` from the original
    values."""

    step: Step
    exact: Array


def int8_step(
    case: Case, *, values: torch.dtype | None = None, bias: float = 0.0, mean_error: float = 0.1, seed: int = 0
) -> Int8Step:
    """`make_step` in int8; `values` that are not int8 have the queries' type. Keys have channels of up to `bias`
    everywhere, which the stored mean knows up to `mean_error`. Unused slots are NaN by their scale."""
    base = make_step(case, seed)
    rng = np.random.default_rng(seed + 1)
    heads, _, head_dim = base.kv.keys.shape[1:]
    offset = bias * rng.uniform(-1, 1, (heads, head_dim))
    mean = (offset + mean_error * rng.standard_normal((heads, head_dim))).astype(np.float32)
    keys = base.kv.keys.double().numpy() + offset[:, None]
    levels, scales = quantised(keys - mean[:, None], rng)
    stored_values, value_scales, read_values = base.kv.values, None, base.kv.values.double().numpy()
    exact_values = read_values
    if values == torch.int8:
        stored, numbers = quantised(read_values, rng)
        stored_values, value_scales = torch.from_numpy(stored), torch.from_numpy(numbers)
        read_values = stored.astype(np.float64) * numbers[..., None]
    token_scales = TokenScales(torch.from_numpy(scales), value_scales, torch.from_numpy(mean))
    kv = KVPages(torch.from_numpy(levels), stored_values, token_scales=token_scales)
    read_keys = levels.astype(np.float64) * scales[..., None]
    queries = base.queries.double().numpy().reshape(len(base.queries), heads, -1, head_dim)
    # In float32, as all implementations round them: in float64 one in some hundred thousand would round the other way.
    narrow = queries.astype(np.float32)
    steps = np.abs(narrow).max(-1, keepdims=True) / np.float32(127)
    rounded = np.round(narrow / np.where(steps == 0, np.float32(1), steps)).astype(np.float64) * steps
    wide = mean.astype(np.float64)
    common = np.einsum("thgd,hd->thg", queries, wide)
    expected, exact = np.zeros_like(queries), np.zeros_like(queries)
    starts = base.batch.query_starts.tolist()
    for row, length in enumerate(base.batch.kv_lens.tolist()):
        mine, table = slice(starts[row], starts[row + 1]), base.batch.page_table[row].numpy()
        if length:
            expected[mine] = _attend(
                rounded[mine],
                common[mine],
                _gather(read_keys, table),
                _gather(read_values, table),
                length,
                base.options,
            )
            own, nothing = queries[mine], np.zeros_like(common[mine])
            exact[mine] = _attend(
                own, nothing, _gather(keys, table), _gather(exact_values, table), length, base.options
            )
    shape = base.expected.shape
    return Int8Step(replace(base, kv=kv, expected=expected.reshape(shape)), exact.reshape(shape))


def quantised(data: Array, rng: np.random.Generator) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantised values `[..., d]` and a scale for each vector `[...]`; a vector with NaN gets any values, and the scale
    NaN."""
    scales = (np.abs(data).max(-1) / 127).astype(np.float32)
    anything = rng.integers(-127, 128, data.shape)
    with np.errstate(invalid="ignore"):
        whole = np.round(data / np.where(scales == 0, 1, scales)[..., None])
    return np.where(np.isnan(whole), anything, np.nan_to_num(whole)).astype(np.int8), scales


def _gather(pages: Array, table: NDArray[np.int32]) -> Array:
    """`[slots, kv_heads, d]`."""
    return pages[table].transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], pages.shape[3])


def _attend(queries: Array, common: Array, keys: Array, values: Array, length: int, options: AttentionOptions) -> Array:
    """For one sequence: `common` `[q, kv_heads, group]` is added to the products of its queries. Keys before all that
    these see may be NaN."""
    oldest = 0 if options.window is None else max(length - len(queries) - options.window + 1, 0)
    seen = (np.arange(length) >= oldest)[:, None, None]
    keys, values = (np.where(seen, part[:length], 0.0) for part in (keys, values))
    return softmax_attention(queries, keys, values, options, common.transpose(1, 2, 0)[..., None])

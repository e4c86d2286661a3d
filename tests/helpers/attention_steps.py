"""Steps of paged attention with answers from plain numpy: ragged lengths, shuffled pages, NaN in every unused slot."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.kernels.kv_storage import from_storage, page_shape, to_storage
from sglang_jax.kernels.ragged_paged_attention import AttentionOptions
from sglang_jax.layers.batch import ForwardBatch


@dataclass(frozen=True)
class Case:
    """A step: `query_lens` of `kv_lens`, the first `num_decode` of them decode rows, padded to (tokens, rows).

    Cases that differ only in lengths run in one compiled program.
    """

    kv_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_decode: int
    tokens: int
    rows: int
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 4
    storage: str = "float32"
    columns: int = 40
    tiled: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    query_type: str = "float32"
    value_dim: int | None = None
    """If set, values are the first numbers of the keys."""
    causal: bool = True

    @property
    def shared(self) -> bool:
        return self.value_dim is not None


@dataclass(frozen=True)
class Step:
    queries: jax.Array
    kv_pages: jax.Array
    batch: ForwardBatch
    options: AttentionOptions
    scale: float
    expected: np.ndarray


def softmax_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    causal: bool = True,
) -> np.ndarray:
    """Queries `[q, kv_heads, group, d]` at the last positions of keys and values `[k, kv_heads, d]`; sinks
    `[kv_heads, group]`."""
    if not len(keys):
        return np.zeros((*queries.shape[:3], values.shape[2]), queries.dtype)
    distance = np.arange(len(keys) - len(queries), len(keys))[:, None] - np.arange(len(keys))
    hidden = ((distance < 0) & causal) | (distance >= (window or len(keys)))
    scores = np.einsum("qhgd,khd->hgqk", queries, keys, dtype=np.float64) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores[:, :, hidden] = -np.inf
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, :, None, None] - largest)
    return np.einsum("hgqk,khd->qhgd", weights / total, values)


def make_step(case: Case, seed: int = 0) -> Step:
    """Every slot starts as NaN. The keys and values of each sequence are then written to pages in random order, except
    for pages that lie before every query's window: these may belong to other sequences."""
    rng = np.random.default_rng(seed)
    num_pages = 1 + case.rows * case.columns
    unused = list(1 + rng.permutation(num_pages - 1))
    page_table = np.zeros((case.rows, case.columns), np.int32)
    storage = jnp.dtype(case.storage)
    sides = 1 if case.shared else 2
    shape = (num_pages, case.kv_heads, sides, case.page_size, case.head_dim)
    kv_pages = np.full(shape, np.nan, np.float32)
    queries = rng.standard_normal((case.tokens, case.kv_heads, case.group, case.head_dim)).astype(np.float32)
    queries = np.asarray(jnp.asarray(queries, case.query_type), np.float32)
    scales = rng.uniform(0.01, 0.03, (case.kv_heads, 2)).astype(np.float32) if storage.itemsize == 1 else None
    sinks = rng.standard_normal((case.kv_heads, case.group)).astype(np.float32) if case.sinks else None
    scale = case.head_dim**-0.5
    expected = np.zeros((*queries.shape[:3], case.value_dim or case.head_dim), np.float32)
    place = 0
    for row, (length, count) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
        stored = rng.standard_normal((length, case.kv_heads, sides, case.head_dim)).astype(np.float32)
        if scales is not None:
            stored = stored / scales[:, :, None]
        stored = np.asarray(from_storage(to_storage(jnp.asarray(stored), storage)))
        for position in range(length):
            column, offset = divmod(position, case.page_size)
            page_table[row, column] = page_table[row, column] or unused.pop()
            if (column + 1) * case.page_size > length - count - (case.window or length) + 1:
                kv_pages[page_table[row, column], :, :, offset] = stored[position]
        mine = slice(place, place + count)
        keys_values = stored if scales is None else stored * scales[:, :, None]
        expected[mine] = softmax_attention(
            queries[mine],
            keys_values[:, :, 0],
            keys_values[:, :, sides - 1, : case.value_dim],
            scale,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=sinks,
            causal=case.causal,
        )
        place += count
    padding = case.rows - len(case.kv_lens)
    batch = ForwardBatch(
        tokens=jnp.zeros(case.tokens, jnp.int32),
        positions=jnp.zeros(case.tokens, jnp.int32),
        write_slots=jnp.zeros(case.tokens, jnp.int32),
        page_table=jnp.asarray(page_table),
        kv_lens=jnp.asarray([*case.kv_lens, *[0] * padding], jnp.int32),
        query_starts=jnp.asarray([0, *np.cumsum([*case.query_lens, *[0] * padding])], jnp.int32),
        num_decode=jnp.int32(case.num_decode),
    )
    options = AttentionOptions(
        causal=case.causal,
        window=case.window,
        soft_cap=case.soft_cap,
        value_dim=case.value_dim,
        sinks=None if sinks is None else jnp.asarray(sinks.reshape(-1)),
        kv_scales=None if scales is None else jnp.asarray(scales),
    )
    flat = (case.tokens, case.kv_heads * case.group)
    pages = to_storage(jnp.asarray(_tile(kv_pages) if case.tiled else kv_pages), storage)
    asked = jnp.asarray(queries.reshape(*flat, -1), case.query_type)
    return Step(asked, pages, batch, options, scale, expected.reshape(*flat, -1))


def _tile(plain: np.ndarray) -> np.ndarray:
    """Plain pages in the tiled form: the padding of a written slot is 0, that of another NaN."""
    num_pages, kv_heads, sides, page_size, head_dim = plain.shape
    shape = page_shape(num_pages, kv_heads, page_size, head_dim, tiled=True, shared=sides == 1)
    each = shape[2] * shape[4] // sides
    wide = np.where(np.isnan(plain[..., :1]), np.nan, np.zeros(each)).astype(np.float32)
    wide[..., :head_dim] = plain
    if shape[2] < sides:
        wide = np.concatenate([wide[:, :, :1], wide[:, :, 1:]], axis=-1)
    return wide.reshape(shape)

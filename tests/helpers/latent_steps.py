"""Steps over shuffled pages of latent vectors, NaN in every unused slot, with attention computed by plain numpy in
float64 from the keys and values of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig

Numbers = NDArray[np.float64]

LATENTS = LatentAttentionConfig(
    num_heads=4,
    latent=32,
    query_latent=None,
    key_dim=8,
    rotary_dim=8,
    value_dim=4,
    scale=0.3,
    rope=None,
    norm=NormConfig(eps=1e-6),
)
"""Rows of 8 tokens and more are expanded."""


@dataclass(frozen=True, kw_only=True)
class LatentStep:
    """A step: the last `query_lens` tokens of `kv_lens`. Its inputs, rounded by `rounded`:

    - `plain` `[T, heads, key_dim]`, `rotated` `[T, heads, rotary_dim]`: queries.
    - `pages` `[num_pages, page_size, latent + rotary_dim]`, with the step's own vectors; `cached`: these `[T, ...]`.
    - `key_up` `[heads, key_dim, latent]`, `value_up` `[heads, value_dim, latent]`.
    - `expected` `[T, heads, value_dim]`.
    """

    plain: Numbers
    rotated: Numbers
    pages: Numbers
    cached: Numbers
    key_up: Numbers
    value_up: Numbers
    page_table: NDArray[np.int32]
    write_slots: NDArray[np.int64]
    kv_lens: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    num_decode: int
    expected: Numbers


def make_latent_step(
    config: LatentAttentionConfig,
    kv_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    *,
    page_size: int = 16,
    rounded: Callable[[Numbers], Numbers] = lambda numbers: numbers.astype(np.float32).astype(np.float64),
) -> LatentStep:
    """The numbers of a row depend on its length, its queries, and how many equal rows come before it."""
    width, columns = config.latent + config.rotary_dim, -(-max(kv_lens) // page_size) + 1
    heads = config.num_heads
    order = np.random.default_rng(1)
    unused = list(1 + order.permutation(len(kv_lens) * columns))
    pages = np.full((1 + len(unused), page_size, width), np.nan)
    page_table = np.zeros((len(kv_lens), columns), np.int32)
    make = np.random.default_rng(2)
    key_up, value_up = (
        rounded(make.standard_normal((heads, size, config.latent)) / np.sqrt(config.latent))
        for size in (config.key_dim, config.value_dim)
    )
    parts: list[tuple[Numbers, Numbers, Numbers, NDArray[np.int64], Numbers]] = []
    for row, (length, count) in enumerate(zip(kv_lens, query_lens, strict=True)):
        alike = sum(each == (length, count) for each in list(zip(kv_lens, query_lens, strict=True))[:row])
        rng = np.random.default_rng((length, count, alike))
        plain, rotated = (
            rounded(rng.standard_normal((count, heads, size))) for size in (config.key_dim, config.rotary_dim)
        )
        cached = rounded(rng.standard_normal((length, width)))
        used = -(-length // page_size)
        page_table[row, :used] = [unused.pop() for _ in range(used)]
        places = np.arange(length)
        slots = page_table[row, places // page_size].astype(np.int64) * page_size + places % page_size
        pages.reshape(-1, width)[slots] = cached
        own = slice(length - count, length)
        expected = expanded_in_float64(config, plain, rotated, cached, key_up, value_up)
        parts.append((plain, rotated, cached[own], slots[own], expected))
    plains, rotateds, owns, slot_parts, expecteds = (np.concatenate(part) for part in zip(*parts, strict=True))
    return LatentStep(
        plain=plains,
        rotated=rotateds,
        pages=pages,
        cached=owns,
        key_up=key_up,
        value_up=value_up,
        page_table=page_table,
        write_slots=slot_parts,
        kv_lens=np.array(kv_lens, np.int32),
        query_starts=np.cumsum([0, *query_lens]).astype(np.int32),
        num_decode=int(np.cumprod(np.array(query_lens) == 1).sum()),
        expected=expecteds,
    )


def expanded_in_float64(
    config: LatentAttentionConfig,
    plain: Numbers,
    rotated: Numbers,
    cached: Numbers,
    key_up: Numbers,
    value_up: Numbers,
) -> Numbers:
    """Queries at the last positions of `cached` → `[count, heads, value_dim]`."""
    latent, turned = cached[:, : config.latent], cached[:, config.latent :]
    scores = np.einsum("qhd,hdl,kl->hqk", plain, key_up, latent) + np.einsum("qhr,kr->hqk", rotated, turned)
    positions = np.arange(len(cached) - len(plain), len(cached))
    scores = np.where(np.arange(len(cached)) > positions[:, None], -np.inf, scores * config.scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,hvl,kl->qhv", weights, value_up, latent)

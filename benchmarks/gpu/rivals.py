"""torch's attention on contiguous keys and values, without pages, for comparison with the paged kernels.

Each function returns work to be timed. Unsupported work raises, and the table says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from gpu.bench import Bench, Row, Work

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama 3 8B."""


def sdpa(bench: Bench, rows: int, queries: int, keys: int) -> Work:
    """`scaled_dot_product_attention` of the last `queries` of `keys` positions, causal, grouped."""
    asked, stored, values = _dense(bench, rows, queries, keys)
    if queries == 1:
        return lambda: functional.scaled_dot_product_attention(asked, stored, values, enable_gqa=True)
    if queries == keys:
        return lambda: functional.scaled_dot_product_attention(asked, stored, values, is_causal=True, enable_gqa=True)
    if not bench.on_gpu:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return lambda: functional.scaled_dot_product_attention(asked, stored, values, attn_mask=mask, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(queries, keys)
    return lambda: functional.scaled_dot_product_attention(asked, stored, values, attn_mask=bias, enable_gqa=True)


def flex(bench: Bench, rows: int, queries: int, keys: int) -> Work:
    """`flex_attention`, compiled (on a GPU) only for this shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    asked, stored, values = _dense(bench, rows, queries, keys)
    prefix = keys - queries

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + prefix

    mask = None if queries == 1 else create_block_mask(visible, None, None, queries, keys, device=bench.device)
    attend: Callable[..., object] = flex_attention
    if bench.on_gpu:
        logging.getLogger("torch._inductor").setLevel(logging.ERROR)
        attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(asked, stored, values, block_mask=mask, enable_gqa=True)


def rival_seconds(bench: Bench, make: Callable[[Bench, int, int, int], Work], shape: tuple[int, int, int]) -> Row:
    """Seconds under the rival's name, or the reason why there are none. `shape`: rows, queries, keys."""
    name = make.__name__
    rows, queries, keys = shape
    bytes_needed = 2 * rows * keys * KV_HEADS * HEAD_DIM * bench.dtype.itemsize
    if bytes_needed > 0.8 * bench.free_bytes():
        return {f"{name} note": "no memory"}
    try:
        return {f"{name} seconds": bench.stopwatch.seconds(make(bench, rows, queries, keys), repeats=10)}
    except Exception as error:  # any failure of a rival is not a failure of this suite
        return {f"{name} note": f"{type(error).__name__}: {error}".splitlines()[0][:60]}


def _dense(bench: Bench, rows: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stored, values = (bench.normal(rows, KV_HEADS, keys, HEAD_DIM) for _ in range(2))
    return bench.normal(rows, HEADS, queries, HEAD_DIM), stored, values

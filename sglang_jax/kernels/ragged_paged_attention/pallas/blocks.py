"""Block sizes of the kernels: from the tuned table if it has the shape, else from a cost model and with one warning."""

from __future__ import annotations

import logging
from functools import cache

from sglang_jax.errors import ConfigError
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Chip, Shape
from sglang_jax.kernels.ragged_paged_attention.pallas.table import Phase, tuned

logger = logging.getLogger(__name__)

ROWS = 16
"""Rows per program of decode without a table entry: their queries and outputs are small compared to the keys."""

_SMALLEST_QUERIES = 16


def decode_blocks(shape: Shape, rows: int, columns: int) -> DecodeBlocks:
    """Blocks for up to `rows` rows and `columns` columns of the page table."""
    entry = tuned().get((shape, Phase.DECODE))
    found = _decode_by_costs(shape) if entry is None else DecodeBlocks(entry.queries, entry.pages)
    return DecodeBlocks(min(found.rows, rows), _no_wider(found.pages, shape.page_size, columns))


def prefill_blocks(shape: Shape, tokens: int, columns: int) -> PrefillBlocks:
    """Blocks for up to `tokens` tokens and `columns` columns of the page table."""
    entry = tuned().get((shape, Phase.PREFILL))
    found = _prefill_by_costs(shape) if entry is None else PrefillBlocks(entry.queries, entry.pages)
    queries = max(min(found.queries, 1 << (tokens - 1).bit_length()), _SMALLEST_QUERIES)
    return PrefillBlocks(queries, _no_wider(found.pages, shape.page_size, columns))


def _no_wider(pages: int, page_size: int, columns: int) -> int:
    """Pages per block, limited to those of the page table and rounded up to whole registers of keys."""
    return max(min(pages, 1 << (columns - 1).bit_length()), 128 // page_size, 1)


@cache
def _decode_by_costs(shape: Shape) -> DecodeBlocks:
    """A number of keys whose scores take 16 registers, clipped to 512 to 2048, which latent vectors always have: a key
    has fewer bytes, and many heads; a buffer takes an eighth of the vector memory at most."""
    _warn(shape, Phase.DECODE)
    sublanes = -(-shape.heads // 8)
    wanted = 2048 if shape.shared else min(max(16 // sublanes * 128, 512), 2048)
    keys = min(wanted, VMEM_LIMITS[shape.chip] // 8 // shape.bytes_per_key)
    # Queries and outputs of two programs take a quarter of the memory at most.
    rows = VMEM_LIMITS[shape.chip] // 4 // (4 * shape.heads * shape.lanes * 2)
    return DecodeBlocks(rows=min(_power_of_two(rows), ROWS), pages=_pages(keys, shape.page_size))


@cache
def _prefill_by_costs(shape: Shape) -> PrefillBlocks:
    """512 keys, and as many queries as fit, with their sums, into half of the vector memory. Raises `ConfigError` if
    the smallest block does not fit."""
    _warn(shape, Phase.PREFILL)
    keys = min(512, VMEM_LIMITS[shape.chip] // 8 // shape.bytes_per_key)
    bytes_per_query = shape.heads * (4 * (2 * 128 + shape.lanes) + 8 * shape.lanes) + 8 * keys
    if _SMALLEST_QUERIES * bytes_per_query > VMEM_LIMITS[shape.chip]:
        raise ConfigError(
            f"the vector memory of a {shape.chip.value} has no room for attention of {shape.heads} heads of "
            f"{shape.head_dim} on one device: spread them over more devices (--tp-size), or choose "
            "--attention-backend xla"
        )
    queries = min(256, VMEM_LIMITS[shape.chip] // 2 // bytes_per_query)
    return PrefillBlocks(max(_power_of_two(queries), _SMALLEST_QUERIES), _pages(keys, shape.page_size))


def _pages(keys: int, page_size: int) -> int:
    return max(_power_of_two(keys) // page_size, 1)


def _power_of_two(number: int) -> int:
    """The largest power of two up to `number`, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def _warn(shape: Shape, phase: Phase) -> None:
    if shape.chip is not Chip.INTERPRETER:
        logger.warning(
            "No tuned blocks of %s on %s for %d heads, %s of %d, pages of %d, %s: using a cost model%s",
            phase.value,
            shape.chip.value,
            shape.heads,
            "latent vectors" if shape.shared else f"{shape.kv_heads} kv heads",
            shape.head_dim,
            shape.page_size,
            shape.storage,
            "" if shape.shared else ". To tune them: benchmarks/tpu_tune.py",
        )

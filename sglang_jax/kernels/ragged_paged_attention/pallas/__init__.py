"""Attention for TPU over pages in place: one kernel for decode rows, one for prefill chunks. A mixed step runs both; a
decode step, which has as many tokens as rows, runs only the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences
from sglang_jax.kernels.ragged_paged_attention.pallas.blocks import decode_blocks, prefill_blocks
from sglang_jax.kernels.ragged_paged_attention.pallas.decode import decode_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks, prefill_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import CORES, VMEM_LIMITS, Shape, current_chip

_LANES = 128

_FIXED_QUERIES = 128
"""Maximum queries of a block if blocks must have one size: a decode step wastes the rest of a block."""


def pallas_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    batch: Sequences,
    *,
    scale: float,
    options: AttentionOptions,
    checked: bool = False,
    fixed: bool = False,
) -> jax.Array:
    """`ragged_paged_attention` over tiled pages (`kernels.kv_storage`). `checked`: compile address checks in. `fixed`:
    compute every sequence as a chunk, in blocks of one size at fixed places of a sequence; then a token's result
    depends on no other sequence, nor on the chunk that it is in. Raises `ValueError` if a page's rows are not whole
    registers; `ConfigError` for an unknown chip."""
    tokens, heads, head_dim = queries.shape
    _, kv_heads, parts, page_size, lanes = kv_pages.shape
    rows, columns = batch.page_table.shape
    if lanes % _LANES:
        raise ValueError(
            f"pages for TPU must have heads of a multiple of {_LANES} lanes, got {lanes}: allocate them for TPU"
        )
    chip = current_chip()
    shape = Shape(chip, heads, kv_heads, parts, lanes, page_size, str(kv_pages.dtype))
    page_table = jnp.pad(batch.page_table, ((0, 0), (0, -columns % _LANES)))
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, lanes - head_dim)))
    num_decode = jnp.zeros(1, jnp.int32) if fixed else batch.num_decode.reshape(1)
    cores = CORES.get(chip, 1)

    def prefill(wide: PrefillBlocks) -> jax.Array:
        sharing = min(cores, -(-tokens // wide.queries))
        return prefill_attention(
            jnp.pad(padded.swapaxes(0, 1), ((0, 0), (0, -tokens % (wide.queries * sharing)), (0, 0))),
            kv_pages,
            page_table[:, None],
            batch.kv_lens,
            batch.query_starts,
            num_decode,
            scale=scale,
            options=options,
            blocks=wide,
            vmem_limit=VMEM_LIMITS[chip],
            cores=sharing,
            checked=checked,
            fixed=fixed,
        ).swapaxes(0, 1)[:tokens]

    # Keys and values of small heads share lanes, except in latent attention.
    first = lanes // 2 if parts == 1 and 2 * head_dim <= lanes else 0
    mine = slice(first, first + (options.value_dim or head_dim))
    if fixed:
        return prefill(prefill_blocks(shape, _FIXED_QUERIES, columns))[:, :, mine]
    blocks = decode_blocks(shape, -(-rows // cores), columns)
    sharing = min(cores, -(-rows // blocks.rows))
    further = -rows % (blocks.rows * sharing)
    output = decode_attention(
        jnp.pad(padded[:rows], ((0, further), (0, 0), (0, 0))),
        kv_pages,
        jnp.pad(page_table, ((0, further), (0, 0))),
        batch.kv_lens,
        num_decode,
        scale=scale,
        options=options,
        blocks=blocks,
        vmem_limit=VMEM_LIMITS[chip],
        cores=sharing,
        checked=checked,
    )[:rows]
    if tokens > rows:
        prefilled = prefill(prefill_blocks(shape, tokens, columns))
        decoded = jnp.pad(output, ((0, tokens - rows), (0, 0), (0, 0)))
        output = jnp.where((jnp.arange(tokens) < num_decode)[:, None, None], decoded, prefilled)
    return output[:, :, mine]

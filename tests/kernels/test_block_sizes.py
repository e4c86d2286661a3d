"""Block sizes: the table's entries, the cost model's choice for other shapes, and one warning."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sglang_jax.errors import ConfigError
from sglang_jax.kernels.ragged_paged_attention.pallas import blocks
from sglang_jax.kernels.ragged_paged_attention.pallas.blocks import decode_blocks, prefill_blocks
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks, Groups, Sizes, sizes_of
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Chip, Shape
from sglang_jax.kernels.ragged_paged_attention.pallas.table import (
    Entry,
    Phase,
    Source,
    Table,
    read_table,
    tuned,
    write_table,
)

SHAPE = Shape.of(Chip.V6E, 12, 4, 64, 32, "bfloat16")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table private to the test."""
    own: Table = {}
    monkeypatch.setattr(blocks, "tuned", lambda: own)
    blocks._decode_by_costs.cache_clear()
    blocks._prefill_by_costs.cache_clear()
    return own


def test_the_table_decides(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    for phase, queries, pages in ((Phase.DECODE, 8, 32), (Phase.PREFILL, 64, 16)):
        table[SHAPE, phase] = Entry(SHAPE, phase, queries, pages, Source.DEVICE)
    assert decode_blocks(SHAPE, 64, 128) == DecodeBlocks(8, 32)
    assert prefill_blocks(SHAPE, 512, 128) == PrefillBlocks(64, 16)
    # no larger than the step and the page table
    assert decode_blocks(SHAPE, 3, 10) == DecodeBlocks(3, 16)
    assert prefill_blocks(SHAPE, 20, 2) == PrefillBlocks(32, 4)
    assert not caplog.records


def test_a_shape_outside_the_table_is_logged_once(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = [decode_blocks(SHAPE, 64, 128) for _ in range(3)]
    assert found == [DecodeBlocks(16, 1024 // 32)] * 3
    (record,) = caplog.records
    assert "No tuned blocks of decode on v6e for 12 heads, 4 kv heads of 64, pages of 32, bfloat16" in record.message
    assert "benchmarks/tpu_tune.py" in record.message


LATENT = Shape(Chip.V4, 16, 1, 1, 640, 64, "bfloat16")


def test_wide_queries_of_many_heads(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    """Latent attention's vectors of 640 leave little room in a v4."""
    with caplog.at_level(logging.WARNING):
        assert decode_blocks(LATENT, 64, 512) == DecodeBlocks(16, 16)
    assert "for 16 heads, latent vectors of 640, pages of 64, bfloat16: using a cost model" in caplog.text
    assert "tpu_tune" not in caplog.text
    assert prefill_blocks(LATENT, 512, 512).queries >= 16
    whole = replace(LATENT, heads=128)
    assert decode_blocks(whole, 64, 512) == DecodeBlocks(4, 16)
    assert decode_blocks(replace(whole, chip=Chip.V6E), 64, 512) == DecodeBlocks(16, 32)
    with pytest.raises(ConfigError, match="no room for attention of 128 heads of 640 on one device: spread them"):
        prefill_blocks(whole, 512, 512)
    assert prefill_blocks(replace(whole, chip=Chip.V6E), 512, 512).queries >= 16


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("chip", [Chip.V4, Chip.V5P, Chip.TPU7X])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 128), (64, 8, 128), (16, 16, 256), (128, 8, 128)])
def test_the_cost_model_stays_within_the_memory(
    table: Table, chip: Chip, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    shape = Shape.of(chip, heads, kv_heads, head_dim, page_size, "bfloat16")
    # a block has at least 128 keys, or a page
    limit = max(blocks.VMEM_LIMITS[chip] // 4, 2 * max(128, page_size) * shape.bytes_per_key)
    for found in (decode_blocks(shape, 256, 4096), prefill_blocks(shape, 8192, 4096)):
        assert 2 * found.pages * page_size * shape.bytes_per_key <= limit
    page_bytes = page_size * shape.bytes_per_key
    sizes = sizes_of(decode_blocks(shape, 256, 4096), page_size, page_bytes, 4096, blocks.VMEM_LIMITS[chip])
    buffers = sizes.depth * sizes.pages_per_buffer * page_bytes
    assert buffers <= max(blocks.VMEM_LIMITS[chip] // 2, 2 * max(128, page_size) * shape.bytes_per_key)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        Entry(SHAPE, Phase.DECODE, 16, 8, Source.DEVICE),
        Entry(SHAPE, Phase.PREFILL, 128, 4, Source.SCHEDULE),
        Entry(Shape.of(Chip.V5E, 8, 1, 256, 128, "int8"), Phase.DECODE, 16, 4, Source.SCHEDULE),
    ]
    write_table(entries, tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == {(entry.shape, entry.phase): entry for entry in entries}


def test_the_packages_table_covers_well_known_models() -> None:
    """Well-known models whole and over eight devices, with pages of 64 and 128; over four, with pages of 64."""
    whole_or_over_eight = ((32, 8), (64, 8), (4, 1), (8, 1))
    over_four = ((8, 2), (16, 2))
    shapes = [*product(whole_or_over_eight, (64, 128)), *product(over_four, (64,))]
    for chip, ((heads, kv_heads), page_size) in product((Chip.V6E, Chip.TPU7X), shapes):
        shape = Shape.of(chip, heads, kv_heads, 128, page_size, "bfloat16")
        assert {(shape, Phase.DECODE), (shape, Phase.PREFILL)} <= tuned().keys()


@pytest.mark.parametrize(("head_dim", "stands_for"), [(64, 64), (80, 128), (96, 128), (128, 128), (256, 256)])
def test_heads_that_have_the_same_pages_share_an_entry(head_dim: int, stands_for: int) -> None:
    shape = Shape.of(Chip.V6E, 8, 2, head_dim, 64, "bfloat16")
    assert shape.head_dim == stands_for
    assert shape == Shape.of(Chip.V6E, 8, 2, stands_for, 64, "bfloat16")


def test_short_rows_are_grouped_where_keys_are_small() -> None:
    """Up to eight rows of 512 keys, at most 2 MiB; the computation of a block is the same in batches of one row and
    of many."""

    def sizes(rows: int, kv_heads: int, keys: int, columns: int = 128, chip: Chip = Chip.V6E) -> Sizes:
        page_bytes = 64 * kv_heads * 2 * 128 * 2
        return sizes_of(DecodeBlocks(rows, keys // 64), 64, page_bytes, columns, VMEM_LIMITS[chip])

    assert sizes(16, 1, 2048) == Sizes((32, 24, 16, 8), Groups(8, 8), 64, 8)
    assert sizes(16, 2, 1024) == Sizes((16, 12, 8), Groups(4, 8), 32, 8)
    assert sizes(16, 8, 1024) == Sizes((16, 12, 8, 4), Groups(1, 4), 16, 4)
    assert sizes(4, 1, 2048).groups == Groups(4, 8)
    for kv_heads, keys in ((1, 2048), (2, 1024), (8, 1024)):
        assert sizes(1, kv_heads, keys).computed == sizes(16, kv_heads, keys).computed
        assert sizes(1, kv_heads, keys).groups.rows == 1
    # Page numbers of groups take half of the scalar memory, buffers the vector memory.
    assert sizes(16, 1, 2048, columns=2048).groups.rows == 8
    assert sizes(16, 1, 2048, columns=2176).groups.rows == 1
    small = sizes(16, 1, 2048, chip=Chip.V4)
    assert small.depth * small.pages_per_buffer * 64 * 512 < VMEM_LIMITS[Chip.V4] * 2 / 3

"""The table of tuned block sizes, which `benchmarks/tpu_tune.py` fills."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, Shape

TABLE = Path(__file__).with_name("block_sizes.json")


class Phase(StrEnum):
    """Which of the two kernels."""

    DECODE = "decode"
    PREFILL = "prefill"


class Source(StrEnum):
    """How sizes were compared: by time on a device, or by the instruction bundles of the compiler's schedule."""

    DEVICE = "device"
    SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True)
class Entry:
    """Queries (for decode: rows) per program, and pages per block of keys."""

    shape: Shape
    phase: Phase
    queries: int
    pages: int
    source: Source


Table = dict[tuple[Shape, Phase], Entry]


def read_table(path: Path = TABLE) -> Table:
    entries = [_from_json(fields) for fields in json.loads(path.read_text())]
    return {(entry.shape, entry.phase): entry for entry in entries}


def write_table(entries: Iterable[Entry], path: Path = TABLE) -> None:
    lines = sorted(json.dumps(_as_json(entry)) for entry in entries)
    path.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n")


@cache
def tuned() -> Table:
    return read_table()


def _as_json(entry: Entry) -> dict[str, str | int]:
    shape = entry.shape
    return {
        "chip": shape.chip.value,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "dtype": shape.storage,
        "phase": entry.phase.value,
        "queries": entry.queries,
        "pages": entry.pages,
        "by": entry.source.value,
    }


def _from_json(fields: dict[str, str | int]) -> Entry:
    shape = Shape.of(
        Chip(fields["chip"]),
        int(fields["heads"]),
        int(fields["kv_heads"]),
        int(fields["head_dim"]),
        int(fields["page_size"]),
        str(fields["dtype"]),
    )
    return Entry(shape, Phase(fields["phase"]), int(fields["queries"]), int(fields["pages"]), Source(fields["by"]))

"""The engine with every kernel launched separately, for comparison with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.bench import Bench, Table
from gpu.dummy_engine import dummy_engine
from gpu.engine_speed import measure_batches


def run(bench: Bench) -> Iterator[Table]:
    """Some of the engine section's batches. Equal digests mean equal tokens."""
    with dummy_engine(bench, graphs=False) as dummy:
        yield from measure_batches(bench, dummy, (1, 4) if bench.small else (1, 32), "without graphs")

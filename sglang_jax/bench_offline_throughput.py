"""`python -m sglang_jax.bench_offline_throughput`: the name people know for `python -m sglang_jax bench offline`."""

from __future__ import annotations

import sys

from sglang_jax.cli.bench.commands import bench_offline
from sglang_jax.cli.main import run

if __name__ == "__main__":
    sys.exit(run(bench_offline, "python -m sglang_jax.bench_offline_throughput"))

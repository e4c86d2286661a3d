"""`python -m sglang_jax.bench_serving`: the name people know for `python -m sglang_jax bench serving`."""

from __future__ import annotations

import sys

from sglang_jax.cli.bench.commands import bench_serving
from sglang_jax.cli.main import run

if __name__ == "__main__":
    sys.exit(run(bench_serving, "python -m sglang_jax.bench_serving"))

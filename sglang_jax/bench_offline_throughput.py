"""`python -m sglang_jax.bench_offline_throughput`: SGLang's name of `python -m sglang_jax bench offline`."""

from __future__ import annotations

import sys

from sglang_jax.cli.program import ended_by_interrupts

if __name__ == "__main__":
    with ended_by_interrupts():
        from sglang_jax.cli.bench.commands import bench_offline
        from sglang_jax.cli.main import run
    sys.exit(run(bench_offline, "python -m sglang_jax.bench_offline_throughput"))

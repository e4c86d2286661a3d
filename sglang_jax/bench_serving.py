"""`python -m sglang_jax.bench_serving`: SGLang's name of `python -m sglang_jax bench serving`."""

from __future__ import annotations

import sys

from sglang_jax.cli.program import ended_by_interrupts

if __name__ == "__main__":
    with ended_by_interrupts():
        from sglang_jax.cli.bench.commands import bench_serving
        from sglang_jax.cli.main import run
    sys.exit(run(bench_serving, "python -m sglang_jax.bench_serving"))

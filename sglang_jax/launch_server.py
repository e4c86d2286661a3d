"""`python -m sglang_jax.launch_server`: SGLang's name of `python -m sglang_jax serve`."""

from __future__ import annotations

import sys

from sglang_jax.cli.program import ended_by_interrupts

if __name__ == "__main__":
    with ended_by_interrupts():
        from sglang_jax.cli.main import run
        from sglang_jax.cli.serve import serve
    sys.exit(run(serve, "python -m sglang_jax.launch_server"))

"""`python -m sglang_jax.launch_server`: the name people know for `python -m sglang_jax serve`."""

from __future__ import annotations

import sys

from sglang_jax.cli.main import run
from sglang_jax.cli.serve import serve

if __name__ == "__main__":
    sys.exit(run(serve, "python -m sglang_jax.launch_server"))

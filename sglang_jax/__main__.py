"""`python -m sglang_jax serve | chat | generate | batch | bench | check | convert`."""

from __future__ import annotations

import sys

from sglang_jax.cli.main import cli, run

if __name__ == "__main__":
    sys.exit(run(cli, "python -m sglang_jax"))

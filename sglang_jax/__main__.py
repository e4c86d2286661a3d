"""`python -m sglang_jax serve | chat | generate | batch | bench | check | convert | cache-report`."""

from __future__ import annotations

from sglang_jax.cli.program import main

if __name__ == "__main__":
    main("python -m sglang_jax")

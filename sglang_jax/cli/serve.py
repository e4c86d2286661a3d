"""`serve`: the HTTP server."""

from __future__ import annotations

import click

from sglang_jax.cli.options import options_of
from sglang_jax.config import ServerConfig


@click.command()
@options_of(config=ServerConfig)
def serve(config: ServerConfig) -> int:
    """Serve a model over HTTP: OpenAI's routes and SGLang's native ones."""
    from sglang_jax.server.serve import run  # here, so that --help and bad flags are answered at once

    return run(config)

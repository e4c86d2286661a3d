"""`serve`: the HTTP server."""

from __future__ import annotations

import click

from sglang_jax.cli.options import options_of, with_model
from sglang_jax.config import ServerConfig


@click.command(short_help="Serve a model over HTTP.")
@click.argument("model", required=False)
@options_of(config=ServerConfig)
def serve(config: ServerConfig, model: str | None) -> int:
    """Serve MODEL (as for --model-path) over HTTP: OpenAI's routes and SGLang's native ones."""
    config = with_model(config, model)
    from sglang_jax.server.serve import run  # imported late: --help must be fast

    return run(config)

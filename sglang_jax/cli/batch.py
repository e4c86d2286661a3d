"""`batch`: files of requests, answered without a server."""

from __future__ import annotations

import click

from sglang_jax.batch.options import BatchConfig
from sglang_jax.cli.options import options_of
from sglang_jax.config import EngineConfig


@click.command()
@options_of(batch=BatchConfig, engine=EngineConfig)
def batch(batch: BatchConfig, engine: EngineConfig) -> int:
    """Answer every line of a file of requests, and go on where an earlier run of the same command ended.

    A line is in OpenAI's batch format (custom_id, method, url, body) or plain: {"prompt": ...} or {"messages": ...}
    with further fields of the route beside it. The exit status is 0, or 1 if some lines are in the error file.
    """
    from sglang_jax.batch.run import run_batch  # here, so that --help and bad flags are answered at once

    return run_batch(batch, engine)

"""The command line's `batch`, with echo engines on Ray: FOLDER ARGUMENT ... Each start is recorded in the folder."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from helpers.ray_cluster import launcher

from sglang_jax.batch.ray import run as run_module
from sglang_jax.cli.main import cli, run

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    run_module.run_ray_batch = functools.partial(run_module.run_ray_batch, launch=launcher(Path(folder)))
    sys.exit(run(cli, "sglang-jax", arguments))

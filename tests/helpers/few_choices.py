"""`benchmarks/tpu_tune.py` with a few block sizes instead of all: `python -m helpers.few_choices`.

Everything else is the command: it starts the process that compiles, and reads the schedules that libtpu writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kernels import tuning_process
from tpu_tune import tune

import tpu.worker
from sglang_jax.cli.main import run
from tpu.topologies import Generation

if TYPE_CHECKING:
    from tpu_kernels.tuning import Comparison, Heads

_estimate, _prepare = tuning_process.estimate_kernels, tpu.worker.prepare_compiler


def _prepare_for_few(folder: Path) -> Path:
    dumps = _prepare(folder)
    from tpu_kernels import tuning

    from sglang_jax.kernels.ragged_paged_attention.pallas.table import Phase  # imports jax, which reads the environment

    tuning._KEYS = {Phase.DECODE: (256, 1024), Phase.PREFILL: (512,)}
    tuning._QUERIES[Phase.PREFILL] = (64, 256)
    return dumps


def estimate_few(
    folder: Path, send: Callable[[Comparison], None], generation: Generation, every: tuple[Heads, ...]
) -> None:
    """Replaces `tuning_process.estimate_kernels` in the process that compiles."""
    tpu.worker.prepare_compiler = _prepare_for_few
    _estimate(folder, send, generation, every)


if __name__ == "__main__":
    from helpers import few_choices  # the process that compiles finds the function by this name

    tuning_process.estimate_kernels = few_choices.estimate_few
    sys.exit(run(tune, "benchmarks/tpu_tune.py"))

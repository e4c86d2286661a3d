"""`tpu.tune` with a few block sizes instead of all: `python -m helpers.few_choices`, with the command's arguments.

Everything else is the command: it starts the process that compiles, and reads the schedules that libtpu writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import tpu.worker
from sglang_jax.cli.main import run
from tpu.topologies import Generation
from tpu.tune import tune

if TYPE_CHECKING:
    from tpu.tuning import Comparison, Heads

_estimate, _prepare = tpu.worker._estimate_kernels, tpu.worker.prepare_compiler


def _prepare_for_few(folder: Path) -> Path:
    dumps = _prepare(folder)
    from sglang_jax.kernels.ragged_paged_attention.pallas.table import Phase  # imports jax, which reads the environment
    from tpu import tuning

    tuning._KEYS = {Phase.DECODE: (256, 1024), Phase.PREFILL: (512,)}
    tuning._QUERIES[Phase.PREFILL] = (64, 256)
    return dumps


def estimate_few(
    folder: Path, send: Callable[[Comparison], None], generation: Generation, every: tuple[Heads, ...]
) -> None:
    """Replaces `tpu.worker._estimate_kernels` in the process that compiles."""
    tpu.worker.prepare_compiler = _prepare_for_few
    _estimate(folder, send, generation, every)


if __name__ == "__main__":
    from helpers import few_choices  # the process that compiles finds the function by this name

    tpu.worker._estimate_kernels = few_choices.estimate_few
    sys.exit(run(tune, "python -m tpu.tune"))

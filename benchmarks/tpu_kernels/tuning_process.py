"""The process that compares block sizes by the compiler's schedule, on a machine without a TPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_jax.errors import ConfigError
from tpu import worker
from tpu.figures import Refusal
from tpu.topologies import Generation
from tpu_kernels.schedule import DUMP_FLAGS

if TYPE_CHECKING:
    from tpu_kernels.tuning import Comparison, Heads


def estimate_in_child(generation: Generation, every: tuple[Heads, ...]) -> Iterator[Comparison]:
    """Yields the cost of block sizes by the compiler's schedule: see `tuning.compare_by_schedule`.

    **Raises:** `ConfigError` if libtpu or jax is missing, if the process died, or for a chip that libtpu does not
    support.
    """
    for message in worker.run_in_child(estimate_kernels, generation, every):
        if isinstance(message, Refusal):
            raise ConfigError(message.reason)
        yield message


def estimate_kernels(
    folder: Path, send: Callable[[Comparison], None], generation: Generation, every: tuple[Heads, ...]
) -> None:
    """The work of the child; see `tpu.worker.run_in_child`."""
    dumps = worker.prepare_compiler(folder)
    os.environ["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=dumps)
    from tpu_kernels.tuning import compare_by_schedule  # imports jax, which reads the environment

    for comparison in compare_by_schedule(generation, every, dumps):
        send(comparison)

"""JAX's interpreter of TPU kernels: simulated copies and semaphores, uninitialised memory, a race detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the race detector's result has no public name
from jax.experimental.pallas import tpu as pltpu


class CopyMode(StrEnum):
    """When the interpreter performs a copy: as late as possible, or at once.

    Late, a read without a wait gets the old contents, NaN at first; at once, it is a race.
    """

    ON_WAIT = "on_wait"
    EAGER = "eager"


@contextmanager
def interpreter(mode: CopyMode, cores: int = 1, *, detect_races: bool = True) -> Iterator[None]:
    """Kernels that are traced within run in the interpreter, on a device with `cores` cores."""
    params = pltpu.InterpretParams(
        detect_races=detect_races, dma_execution_mode=mode.value, uninitialized_memory="nan", num_cores_or_threads=cores
    )
    with pltpu.force_tpu_interpret_mode(params):
        yield


class Interpreted:
    """A function with its first and static arguments, in the interpreter: compiled once for each mode and shape.
    `cores`: of the device.

    The machine code is not optimised: such a program is some thousand callbacks, and takes longer to compile than to
    run.
    """

    def __init__(self, function: Callable[..., Any], *first: Any, cores: int = 1, **static: Any) -> None:
        self._cores = cores
        options = {"xla_backend_optimization_level": 0}
        self._compiled = {
            mode: jax.jit(partial(function, *first, **static), compiler_options=options) for mode in CopyMode
        }

    def run(self, mode: CopyMode, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """The result, and whether there was a race."""
        try:
            with interpreter(mode, self._cores):
                result = jax.block_until_ready(self._compiled[mode](*args, **kwargs))
        except Exception:
            pltpu.reset_tpu_interpret_mode_state()
            raise
        return result, interpret_pallas_call.races.races_found

"""Profiles of the runner, ended by a message or after some steps."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang_jax.errors import ParameterError
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.pulse import Pulse

logger = logging.getLogger(__name__)


class Profiling:
    """Records one profile at a time. `pulse` is notified while a profile is written, which may delay steps."""

    def __init__(self, runner: Runner, pulse: Pulse) -> None:
        self._runner = runner
        self._pulse = pulse
        self._folder: str | None = None
        self._last: int | None = None

    def start(self, folder: str, steps: int | None, steps_done: int) -> None:
        """Starts a profile of `steps` steps (None: until `stop`), after `steps_done` steps. Raises `ParameterError`
        while one is being recorded, for a folder that cannot be created, and for less than one step."""
        if steps is not None and steps < 1:
            raise ParameterError(f"num_steps must be at least 1, got {steps}", param="num_steps")
        if self._folder is not None:
            raise ParameterError(
                f"a profile is already being recorded, in {self._folder}: stop it first (/stop_profile)"
            )
        if "://" not in folder:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ParameterError(f"the profile's folder cannot be created: {error}") from error
        try:
            with self._pulse.building():
                self._runner.start_profile(folder)
        except (OSError, RuntimeError) as error:  # another profile of this process, a driver without counters
            raise ParameterError(f"the profile cannot be recorded: {error}") from error
        self._folder = folder
        self._last = None if steps is None else steps_done + steps
        logger.info("Profiling %s, for %s", "until it is stopped" if steps is None else f"{steps} steps", folder)

    def after_step(self, steps_done: int) -> None:
        """Ends a profile whose steps are complete. To be called after every step."""
        if self._last is not None and steps_done >= self._last:
            self.close()

    def stop(self) -> str:
        """Ends the profile, and returns its folder. Raises `ParameterError` if none is being recorded."""
        if self._folder is None:
            raise ParameterError("no profile is being recorded: start one first (/start_profile)")
        return self._end()

    def close(self) -> None:
        """Ends a profile that is still being recorded."""
        if self._folder is not None:
            try:
                self._end()
            except ParameterError as error:
                logger.error("%s", error.message)

    def _end(self) -> str:
        assert self._folder is not None
        folder, self._folder, self._last = self._folder, None, None
        try:
            with self._pulse.building():
                self._runner.stop_profile()
        except (OSError, RuntimeError) as error:
            raise ParameterError(f"the profile was not written to {folder}: {error}") from error
        logger.info("Wrote a profile to %s", folder)
        return folder

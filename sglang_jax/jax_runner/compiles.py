"""Counts the programs that XLA compiles, and stores them for later runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class _Planned(threading.local):
    here = False


class CompileCounter:
    """Counts the programs that this process has built, or loaded from the persistent cache, since the counter was
    created: all computations of the process, so stray operations outside the runner's programs show."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()  # several threads may build programs
        self._planned = _Planned()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **kwargs: str | int) -> None:
        if event == _BACKEND_COMPILE and not self._planned.here:
            with self._lock:
                self.count += 1

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Within the context, builds of this thread are not counted."""
        self._planned.here = True
        try:
            yield
        finally:
            self._planned.here = False

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


def use_compilation_cache(address: str) -> bool:
    """Stores every compiled program in a folder, however small or quick to compile. `address`: the folder, local or of
    a scheme that etils supports, such as `gs://bucket/folder`. Returns False, with a log line, if a local folder cannot
    be created."""
    if "://" not in address:
        try:
            Path(address).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "Compiled programs cannot be cached, so every start compiles them again: %s. Choose a writable folder "
                "with --compilation-cache-dir",
                error,
            )
            return False
    jax.config.update("jax_compilation_cache_dir", address)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return True

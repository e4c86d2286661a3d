"""Functions of C that XLA's CPU backend calls from its programs, by name."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

import jax

_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Function(Protocol):
    """Machine code that is valid as long as this object exists."""

    @property
    def address(self) -> int: ...


def register(name: str, build: Callable[[], Function]) -> None:
    """Registers a function with XLA, which accepts a name once, and keeps it as long as the process. Does nothing if
    the name is registered. Programs in JAX's compilation cache call it by its name, which must therefore name its
    version too."""
    with _lock:
        if name not in _registered:
            _registered[name] = function = build()
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_Handler(function.address)), platform="cpu")


_lock = threading.Lock()
_registered: dict[str, Function] = {}

"""The environment of every test, set before anything that reads it is imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["SGLANG_JAX_DEBUG_MEMORY"] = "1"
# Triton decides at import whether it interprets kernels or compiles them; helpers.triton_interpreter says more.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Parses test files with the garbage collector off.

    In CPython 3.11 a collection in the middle of building a syntax tree can end in `SystemError: AST constructor
    recursion depth mismatch`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()

"""The environment of every test, set before anything that reads it is imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from sglang_jax.runner import host_machine

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["SGLANG_JAX_DEBUG_MEMORY"] = "1"
# Triton decides at import whether it interprets kernels or compiles them; helpers.triton_interpreter says more.
os.environ["TRITON_INTERPRET"] = "1"
if "TESTS_CPU_INFO" in os.environ:  # tests/on_other_cpus.py hides features of this CPU
    host_machine._CPU_FEATURES = Path(os.environ["TESTS_CPU_INFO"])


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

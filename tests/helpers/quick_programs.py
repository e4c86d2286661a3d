"""XLA's programs for CPUs, built in a half to a third of the time: most tests run tiny models and spend most of their
time in the compiler.

The compiler's search for faster code is left out: LLVM's passes, and the emitter that compiles each fusion by itself.
XLA's own passes over HLO, fusions and buffers do not change. Processes that tests start compile as users' do, unless a
test asks for `xla_flags`; so do `make test-cpus` and models of many layers, whose programs the other emitter compiles
slower.
"""

from __future__ import annotations

import os

from jaxlib import xla_client

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
NAME = "XLA_FLAGS"
_given = os.environ.get(NAME, "")
_as_another_cpu = "TESTS_CPU_INFO" in os.environ


def xla_flags(*more: str) -> str:
    """The value of `XLA_FLAGS` with which a process started by a test compiles as tests do; `more`: further flags."""
    return " ".join(filter(None, (_given, "" if _as_another_cpu else QUICK, *more)))


def compile_quickly() -> None:
    """Makes this process compile so, but not those that it starts. Must be called before XLA is used."""
    os.environ[NAME] = xla_flags()
    xla_client.CompileOptions()  # reads the flags: once per process, whatever is set afterwards
    if _given:
        os.environ[NAME] = _given
    else:
        del os.environ[NAME]

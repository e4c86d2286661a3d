"""XLA's programs for CPUs, built in a half to a third of the time: what most tests run are tiny models, and most of
their time is the compiler's.

The compiler's search for faster code is left out: LLVM's passes, and the emitter of fusions that compiles each by
itself. What XLA makes of a program (its passes over HLO, what is fused, what is kept where) is as ever. Processes that
tests start compile as users' do, unless a test asks for `xla_flags`; so do `make test-cpus` and models of many layers,
whose programs the other emitter compiles slower.
"""

from __future__ import annotations

import os

from jaxlib import xla_client

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
NAME = "XLA_FLAGS"
_given = os.environ.get(NAME, "")
_as_another_cpu = "TESTS_CPU_INFO" in os.environ


def xla_flags(*more: str) -> str:
    """What a process that a test starts is to have as `XLA_FLAGS` to compile as tests do; `more`: further flags."""
    return " ".join(filter(None, (_given, "" if _as_another_cpu else QUICK, *more)))


def compile_quickly() -> None:
    """Lets this process compile so, and not those that it starts. Has to come before XLA is used."""
    os.environ[NAME] = xla_flags()
    xla_client.CompileOptions()  # reads the flags: once a process, whatever is set afterwards
    if _given:
        os.environ[NAME] = _given
    else:
        del os.environ[NAME]

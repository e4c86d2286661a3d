"""The environment of every test, set before it is read by an import."""

from __future__ import annotations

import fcntl
import gc
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from helpers.heap import keep_frozen
from helpers.quick_programs import compile_quickly
from hypothesis import HealthCheck, settings

from sglang_jax.runner import this_machine
from torch_backend.openmp import spin_shortly

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["SGLANG_JAX_DEBUG_MEMORY"] = "1"
# Triton decides at import whether it interprets kernels or compiles them; helpers.triton_interpreter says more.
os.environ["TRITON_INTERPRET"] = "1"
if "TESTS_CPU_INFO" in os.environ:  # tests/on_other_cpus.py hides features of this CPU
    this_machine._CPU_FEATURES = Path(os.environ["TESTS_CPU_INFO"])
compile_quickly()
spin_shortly()
# no test fails because the machine was busy while an example ran or was drawn
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["helpers.costs"]

WORKER = "PYTEST_XDIST_WORKER"
"""Set in the worker processes of `make test`."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Parses test files with the garbage collector off.

    In CPython 3.11 a collection while a syntax tree is built can end in `SystemError: AST constructor recursion
    depth mismatch`. Objects that exist afterwards, modules and tests, are frozen: later collections skip them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        keep_frozen()
        gc.enable()


# -- Parallel tests
# ----------------------------------------------------------------------------------------------------

# `make test` distributes whole files to workers. The longest files come first, so that none of them is left at the
# end.
LONGEST = [
    "runner/test_runner_simulation.py",
    "kernels/test_pallas_attention.py",
    "scheduler/test_planted_faults.py",
    "tpu/test_check.py",
    "end_to_end/test_real_model.py",
    "server/test_real_model_over_http.py",
    "kernels/test_pallas_ahead_of_time.py",
    "jax_runner/test_tensor_parallel_engine.py",
    "scheduler/test_simulator.py",
    "models/test_families.py",
    "torch_backend/test_tensor_parallel_engine.py",
    "models/test_tensor_parallel.py",
    "torch_backend/test_triton_extend.py",
    "runner/test_samplers.py",
    "jax_runner/test_nodes.py",
    "scheduler/test_sessions.py",
]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first, and last those with tests that run alone, which then delay few others."""
    if WORKER not in os.environ:
        return
    folder = Path(__file__).parent
    ranks = {folder / name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    ranks |= {item.path: 1 for item in items if item.get_closest_marker("alone") is not None}
    items.sort(key=lambda item: ranks.get(item.path, 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs a test marked `alone` while no other worker runs one.

    Every test holds a lock: exclusive for `alone`, shared for others. A worker that waits for it holds a second
    lock, so that later workers queue behind it.
    """
    if WORKER not in os.environ:
        return (yield)
    shared = Path(item.config.getoption("basetemp")).parent  # the workers' folders have one parent
    alone = item.get_closest_marker("alone") is not None
    with (shared / "turn").open("w") as turn, (shared / "quiet").open("w") as quiet:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(quiet, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(quiet, fcntl.LOCK_UN)  # a process that the test left behind must not inherit it


# -- Summary -----------------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of skipped tests, such as instructions that this machine lacks."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


# -- Threads -----------------------------------------------------------------------------------------------------------

# In these files torch runs whole models, tiny ones and the oracles of transformers: with more threads, two workers
# on two cores would spend most of their time waiting for each other. Other files test kernels that divide their
# work, or set the threads themselves.
ONE_THREAD = [
    "end_to_end",
    "jax_runner",
    "models",
    "runner",
    *(f"torch_backend/test_{name}.py" for name in ("families", "graphs", "state_graphs", "traced_models")),
]


@pytest.fixture(scope="module", autouse=True)
def threads_of_torch(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """One thread in the files of `ONE_THREAD`, in this process; processes that tests start have the default number."""
    tests = Path(__file__).parent
    if not any(request.path.is_relative_to(tests / name) for name in ONE_THREAD):
        yield
        return
    import torch  # reads the environment set above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""Which outcomes the soak of a whole server accepts, and which it reports."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def soak(load: Any) -> ModuleType:
    module: ModuleType = load("soak_server")
    return module


def test_a_fault_explains_failures_while_it_lasted(load: Any, soak: ModuleType) -> None:
    outcome, fault = load("soak_clients").Outcome, load("soak_watch").Fault("SIGKILL", at=100.0, noticed=101.0)
    fine = outcome("chat", 50.0, 60.0, "")
    lost = outcome("chat", 90.0, 101.0, "503 replica_lost")
    before = outcome("chat", 90.0, 99.0, "503 replica_lost")
    after = outcome("chat", 110.0, 120.0, "500 engine_dead")
    wrong = outcome("chat", 90.0, 101.0, "another answer to this")
    assert soak.unexplained([fine, lost, before, after, wrong], [fault]) == [before, after, wrong]
    assert soak.unexplained([lost], []) == [lost]


def test_a_session_of_a_replica_that_is_down_cannot_be_opened_until_it_is_back(load: Any, soak: ModuleType) -> None:
    outcome, fault = load("soak_clients").Outcome, load("soak_watch").Fault("SIGKILL", 100.0, 101.0, back=140.0)
    meanwhile = outcome("bad_input", 130.0, 130.0, "503 replica_lost")
    others = [
        outcome("chat", 130.0, 130.0, "503 replica_lost"),
        outcome("bad_input", 130.0, 130.0, "500 engine_dead"),
        outcome("bad_input", 99.0, 99.0, "503 replica_lost"),
        outcome("bad_input", 146.0, 147.0, "503 replica_lost"),
    ]
    assert soak.unexplained([meanwhile, *others], [fault]) == others


def samples(load: Any, name: str, begin: float, sizes: list[float]) -> Any:
    one = load("soak_watch").Samples(name, begin)
    for minute, size in enumerate(sizes):
        one.times += [begin + 60.0 * minute + second for second in range(60)]
        one.memory += [size] * 60
    return one


def test_growing_memory_is_noticed(load: Any, soak: ModuleType) -> None:
    flat, grows = samples(load, "front end", 0.0, [100.0] * 30), samples(load, "core", 0.0, [100.0] * 25 + [103.0] * 5)
    early = samples(load, "front end", 0.0, [100.0] * 8 + [200.0] * 22)  # it had this size at the first sample
    rows = soak.memory_rows({1: flat, 2: grows, 3: early}, 600.0, 1800.0)
    assert [round(row["spread"], 3) for row in rows] == [0.0, 0.03, 0.0]


def test_cores_that_grow_with_each_restart_are_noticed(load: Any, soak: ModuleType) -> None:
    cores = {n: samples(load, "core", 200.0 * n, [50.0, 100.0 + 2 * n]) for n in range(6)}
    [row] = soak.memory_rows(cores, 600.0, 1800.0)
    assert row["process"] == "6 later cores"
    assert row["spread"] > soak.FLAT
    same = {n: samples(load, "core", 200.0 * n, [50.0, 100.0 + 3 * (n % 2)]) for n in range(8)}
    [row] = soak.memory_rows(same, 600.0, 1800.0)
    assert row["spread"] < soak.FLAT


def test_an_answer_must_equal_the_first_one(load: Any) -> None:
    oracle = load("soak_clients").Oracle()
    assert [oracle.check("a", "x"), oracle.check("b", "y"), oracle.check("a", "x")] == ["", "", ""]
    assert oracle.check("a", "y") == "another answer to a"

"""The targets of the CPU decode benchmark for each backend."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_each_backend_has_targets_and_a_read_rate(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("decode_cpu")
    assert module.TARGETS[backend].keys() == {1, 8, 32}
    assert 1e8 < module.read_bandwidth(backend) < 1e13

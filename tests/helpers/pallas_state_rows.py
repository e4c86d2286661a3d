"""For tests of the TPU kernels of states: rows of a step in an order in which no result is right by chance, and
faults."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from sglang_jax.kernels.state_rows import StateRows


def pallas_rows(rows: int, slots: int, counts: list[int], num_decode: int, *, decode_only: bool) -> StateRows:
    """Most sequences start from another slot than their own, every third with an empty state; slots are in random
    order."""
    padding = rows - len(counts)
    order = np.random.default_rng(1).permutation(np.arange(1, slots))
    own = np.concatenate((order[: len(counts)], np.zeros(padding, np.int64)))
    others = np.concatenate((order[len(order) - len(counts) :], np.zeros(padding, np.int64)))
    begin = np.where(np.arange(rows) % 4 == 0, own, others)
    fresh = np.arange(rows) % 3 == 1
    fresh[len(counts) :] = True
    starts = np.concatenate(([0], np.cumsum(counts + [int(decode_only)] * padding)))
    none = jnp.zeros(0, jnp.int32)
    return StateRows(
        begin=jnp.asarray(begin, jnp.int32),
        fresh=jnp.asarray(fresh),
        own=jnp.asarray(own, jnp.int32),
        sequences=none,
        offsets=none,
        query_starts=jnp.asarray(starts, jnp.int32),
        num_decode=jnp.int32(num_decode),
        decode_only=decode_only,
    )


def faulty_module(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: ModuleType, right: str, wrong: str
) -> ModuleType:
    """The module with one of its texts replaced by another, written to `folder`."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert right in text
    path = folder / "faulty.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty", path)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty", faulty)
    spec.loader.exec_module(faulty)
    return faulty

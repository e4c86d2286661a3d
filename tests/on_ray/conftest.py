from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.ray_cluster import Nodes, cluster_of_nodes

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # if it hides GPUs, Ray refuses nodes that have some
        with cluster_of_nodes() as nodes:
            yield nodes


@pytest.fixture
def cluster(whole_cluster: Nodes) -> Iterator[Nodes]:
    """Only the head; a test adds the nodes that it needs."""
    yield whole_cluster
    given_back = whole_cluster.groups_come_and_gone()
    whole_cluster.clear()
    assert given_back, "a placement group is left, which would take the next test's nodes"


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Where starts of engines are recorded."""
    folder = tmp_path / "started"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.fixture
def read_output(output: Path) -> Callable[[], tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The lines of all files of answers, and of all files of errors; asserts that ids are unique."""

    def read() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        lines: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for path in output.iterdir():
            assert path.name.endswith(".jsonl")
            written = path.read_bytes().splitlines()  # splits at line feeds only, not at Unicode line ends
            lines[path.name.endswith(".errors.jsonl")] += map(json.loads, written)
        times = Counter(line["id"] for line in lines[True] + lines[False])
        assert set(times.values()) <= {1}
        return lines[False], lines[True]

    return read

"""Replicas of a small model on each backend, and the server that starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.engine.engine import Engine
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.sampling.params import SamplingParams

PROMPTS = [
    f"{beginning} {number}" for number in range(3) for beginning in ("the quick brown fox", "what is the capital")
]
SAMPLING = [
    SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(folder)
    return folder


@pytest.fixture(autouse=True)
def two_cores() -> None:
    """Replicas on a CPU need a core each."""
    assert len(os.sched_getaffinity(0)) >= 2, "this machine gives the tests one core; replicas need two"


def outputs(checkpoint: Path, backend: str, dp_size: int) -> list[list[int]]:
    with Engine(
        model_path=str(checkpoint),
        backend=backend,
        device="cpu",
        dtype="float32",
        dp_size=dp_size,
        load_balance_method="round_robin",
        max_running_requests=4,
        max_total_tokens=1024,
        skip_warmup=True,
    ) as engine:
        found = []
        for sampling in SAMPLING:
            answers = engine.generate(PROMPTS, sampling)
            assert isinstance(answers, list)
            found += [_ids(answer) for answer in answers]
        if dp_size > 1:
            replicas = engine.state()["replicas"]
            assert isinstance(replicas, list)
            assert [replica["num_finished"] for replica in replicas] == [len(PROMPTS)] * 2
        return found


def _ids(output: GenerateOutput) -> list[int]:
    return output.output_ids


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_outputs_equal_those_of_one_replica(checkpoint: Path, backend: str) -> None:
    """Greedy and sampled ones: the router assigns seeds in order of arrival."""
    assert outputs(checkpoint, backend, 2) == outputs(checkpoint, backend, 1)


@contextmanager
def server(checkpoint: Path, log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """A server of the small model, started by the command line, and a client of it."""
    command = [sys.executable, "-m", "sglang_jax.launch_server", "--model-path", str(checkpoint), "--port", "0", *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://[\d.]+:\d+", process.stdout.readline() + process.stdout.readline())
        assert address is not None
        with httpx2.Client(base_url=address[0], timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a server as operators do."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_the_server_starts_and_restarts_replicas_also_behind_a_router(checkpoint: Path, tmp_path: Path) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0}
    flags = ["--dp-size", "2", "--device", "cpu", "--backend", "torch", "--skip-warmup", "--max-total-tokens", "1024"]
    with server(checkpoint, tmp_path / "behind", *flags) as (behind, http):
        first = http.post("/v1/completions", json=body).json()["choices"]
        children = _cores(behind.pid)
        assert len(children) == 2
        cores = sorted(core for pid in children for core in os.sched_getaffinity(pid))
        assert cores == sorted(os.sched_getaffinity(0))
        address = http.base_url.netloc.decode()
        with server(checkpoint, tmp_path / "router", "--connect", address) as (router, outside):
            assert _cores(router.pid) == []
            assert outside.post("/v1/completions", json=body).json()["choices"] == first
            os.kill(children[0], signal.SIGKILL)
            end = time.monotonic() + 60
            while sum(load["restarts"] for load in http.get("/v1/loads").json()["loads"]) == 0:
                assert outside.post("/v1/completions", json=body).json()["choices"] == first
                assert time.monotonic() < end
            assert [load["state"] for load in http.get("/v1/loads").json()["loads"]] == ["serving"] * 2
            assert outside.post("/v1/completions", json=body).json()["choices"] == first
            stop(router)
        stop(behind)
    said = (tmp_path / "behind").read_text()
    assert "replica 1: CPU cores" in said
    assert re.search(r"Replica \d is lost \(the engine is lost: the engine process was killed by SIGKILL", said)


def _cores(parent: int) -> list[int]:
    """Engine processes of a server, from the kernel's list of its children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_more_replicas_than_cores_are_refused_at_once() -> None:
    command = [sys.executable, "-m", "sglang_jax.launch_server", "--dp-size", "4000", "--device", "cpu", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    cores = len(os.sched_getaffinity(0))
    assert f"--dp-size 4000 needs a CPU core for each replica; this process may use {cores}" in done.stderr

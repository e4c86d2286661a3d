"""Several nodes, as processes over loopback: the text of one process, a clean end, and an end when one is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.nodes import launch_nodes
from sglang_jax.runner.claimed_address import claim_address

PROMPT = [100, 3, 77, 200, 13, 14, 15, 16, 18, 40, 41]
LOST_WITHIN_SECONDS = 30.0
BEFORE: dict[str, object] = {"attention_backend": "pallas"}
AFTER: dict[str, object] = {"max_total_tokens": 10**10}
"""Errors in loading on one node, before and after the nodes agree on sizes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", **overrides)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("what these nodes know each other by\n")
    return file


def options(folder: Path, secret: Path) -> dict[str, object]:
    return {
        "model_path": str(folder),
        "backend": "jax",
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 256,
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "skip_warmup": True,
        "group_secret_file": str(secret),
    }


@dataclass
class Nodes:
    """The server's command on each of several nodes. `changes`: options of a node that differ from the others'."""

    folder: Path
    secret: Path
    count: int
    changes: dict[int, dict[str, object]] = field(default_factory=dict)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        self.launch()
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if line.startswith("Ready"):
                return
        raise AssertionError("node 0 ended before it was ready")

    def launch(self) -> None:
        meeting, self.port = free_port(), free_port()
        for rank in range(self.count):
            flags = [
                text
                for name, value in (options(self.folder, self.secret) | self.changes.get(rank, {})).items()
                for text in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
            ]
            command = [sys.executable, "-m", "sglang_jax.launch_server", *flags, "--port", str(self.port)]
            command += ["--tp-size", str(self.count), "--nnodes", str(self.count), "--node-rank", str(rank)]
            command += ["--dist-init-addr", f"127.0.0.1:{meeting}"]
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            self.processes.append(process)

    def generate(self) -> list[int]:
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=200) as response:
            output: list[int] = json.load(response)["output_ids"]
        return output

    def kill(self, rank: int) -> None:
        """As if the machine were gone: its engine process too."""
        process = psutil.Process(self.processes[rank].pid)
        for victim in (*process.children(recursive=True), process):
            victim.kill()

    def exits(self, ranks: list[int], timeout: float) -> list[int]:
        """Exit statuses, each within `timeout` seconds from now."""
        deadline = time.monotonic() + timeout
        return [self.processes[rank].wait(max(deadline - time.monotonic(), 0.01)) for rank in ranks]

    def wait_for(self, rank: int, *words: str) -> None:
        """Waits until a node logs a line with all of these texts."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        assert any(all(word in line for word in words) for line in stdout), (
            f"node {rank} ended without saying {words!r}"
        )

    def close(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(rank)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def nodes(folder: Path, secret: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(folder, secret, request.param)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("count", "change"),
    [
        pytest.param(2, {"kv_cache_dtype": "int8"}, id="two, which agree on scales of keys and values"),
        pytest.param(2, {}, marks=pytest.mark.soak, id="two"),
        pytest.param(4, {}, marks=pytest.mark.soak, id="four"),
    ],
)
def test_several_nodes_give_the_same_text_as_one_and_end_together(
    folder: Path, secret: Path, count: int, change: dict[str, object]
) -> None:
    with Engine(config=EngineConfig(**options(folder, secret) | change)) as engine:
        alone = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True))
    assert not isinstance(alone, list)
    nodes = Nodes(folder, secret, count, dict.fromkeys(range(count), change))
    try:
        nodes.start()
        assert nodes.generate() == alone.output_ids
        nodes.processes[0].send_signal(signal.SIGTERM)
        assert nodes.exits(list(range(count)), 30.0) == [0] * count
    finally:
        nodes.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.parametrize("lost", [0, 1], ids=["the leader", "a follower"])
def test_a_lost_node_ends_every_other(nodes: Nodes, lost: int) -> None:
    nodes.kill(lost)
    (status,) = nodes.exits([1 - lost], LOST_WITHIN_SECONDS)
    assert status != 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failing", "change", "reason"),
    [
        pytest.param(0, BEFORE, "pallas needs a TPU", id="the leader, before the nodes agree on sizes"),
        pytest.param(1, AFTER, " 10000000000 needs", id="a follower, after that"),
        pytest.param(1, BEFORE, "pallas needs a TPU", marks=pytest.mark.soak, id="a follower, before that"),
        pytest.param(0, AFTER, " 10000000000 needs", marks=pytest.mark.soak, id="the leader, after that"),
    ],
)
def test_a_node_that_cannot_load_ends_every_other(
    folder: Path, secret: Path, failing: int, change: dict[str, object], reason: str
) -> None:
    """In the first case the others wait for it in a collective; in the second they have loaded, and wait for orders."""
    nodes = Nodes(folder, secret, 2, {failing: change})
    try:
        nodes.launch()
        nodes.wait_for(failing, reason)
        statuses = nodes.exits([0, 1], LOST_WITHIN_SECONDS)
        nodes.wait_for(1 - failing, f"node {failing} gave up: ", reason)
    finally:
        nodes.close()
    assert 0 not in statuses


def test_the_address_of_another_group_is_refused() -> None:
    """gRPC would let both listen, and nodes would join either."""
    options = {"nnodes": 2, "node_rank": 0, "dist_init_addr": "127.0.0.1:45679", "model_path": "demo"}
    config = EngineConfig(**options)  # type: ignore[arg-type]
    taken = claim_address("127.0.0.1", 45679)
    if taken is None:
        pytest.skip("only Linux has names that the kernel frees with their process")
    with taken, pytest.raises(ConfigError, match=r"another group uses dist_init_addr 127\.0\.0\.1:45679"):
        launch_nodes(config, open_checkpoint("demo"))

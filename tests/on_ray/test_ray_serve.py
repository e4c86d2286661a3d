"""The example of Ray Serve: replicas of the server behind Ray Serve's proxy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
from helpers.ray_cluster import Nodes
from helpers.tiny_models import make_tiny_checkpoint

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_serve.py"
DEADLINE = 180.0

IN_THE_BACKGROUND = 'trap "" INT; exec "$@"'
"""Background processes of a script ignore SIGINT, as do those of a test run started in the background."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def engine_cores() -> set[int]:
    """Engine processes next to an actor of Ray Serve."""
    commands = {
        process.pid: (process.info["ppid"], " ".join(process.info["cmdline"] or []))
        for process in psutil.process_iter(["ppid", "cmdline"])
    }
    actors = {pid for pid, (_, command) in commands.items() if "ServeReplica:default:Replica" in command}
    return {pid for pid, (parent, command) in commands.items() if parent in actors and "spawn_main" in command}


@pytest.fixture
def url(cluster: Nodes, tmp_path: Path) -> Iterator[str]:
    cluster.add(num_cpus=4)
    model = make_tiny_checkpoint(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path / "log"
    with log.open("w") as output:
        proxy = subprocess.Popen(
            ["sh", "-c", IN_THE_BACKGROUND, "sh", sys.executable, str(EXAMPLE), str(model), "2", str(port)],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: "Ready: 2 replicas" in log.read_text() or proxy.poll() is not None)
        assert proxy.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        proxy.send_signal(signal.SIGINT)
        try:
            assert proxy.wait(DEADLINE) == 0, log.read_text()
        finally:
            proxy.kill()  # a remaining one would delay the cluster's shutdown too


def answers(url: str) -> bool:
    body = {"prompt": "one two", "max_tokens": 4, "temperature": 0}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def test_replicas_answer_and_one_whose_engine_dies_is_replaced(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": "one two", "max_tokens": 100, "temperature": 0}
    endless = {"ignore_eos": True}
    whole = client.completions.create(**asked, extra_body=endless)
    parts = list(client.completions.create(**asked, extra_body=endless, stream=True))
    assert len(parts) > 1  # tokens that wait for a slow reader are sent together
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="temperature must be in"):
        client.completions.create(model=model, prompt="one", temperature=-1)

    before = engine_cores()
    assert len(before) == 2
    killed, kept = before
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(engine_cores() - before) == 1 and all(answers(url) for _ in range(8)))
    assert kept in engine_cores()

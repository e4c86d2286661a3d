"""`/start_profile` and `/stop_profile`: what is recorded, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import ByteTokenizer, load_fake_model, load_tokenizer

from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import EngineClient
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.server import remote_link
from sglang_jax.server.remote_replicas import connect_engines

OPTIONS = {"page_size": 4, "max_total_tokens": 512}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[EchoServer]:
    with serve_echo(load_fake_model, load_tokenizer, profile_dir=str(root), **OPTIONS) as server:
        yield server


def generate(server: EchoServer, tokens: int) -> None:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    assert server.http.post("/generate", json={"text": "ab", "sampling_params": sampling}).status_code == 200


def recorded_steps(folder: Path) -> int:
    deadline = time.monotonic() + 60
    while not (folder / "steps.txt").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int((folder / "steps.txt").read_text())


def test_a_recording_lasts_until_it_is_stopped(server: EchoServer, root: Path) -> None:
    generate(server, 5)
    started = server.http.post("/start_profile")
    assert (started.status_code, started.json()) == (200, {"success": True, "folders": [str(root)]})
    generate(server, 20)
    assert not (root / "steps.txt").exists()
    assert server.http.post("/stop_profile").json() == {"success": True, "folders": [str(root)]}
    assert 20 <= recorded_steps(root) <= 22  # a step may be launched after the last token


def test_a_recording_of_n_steps_ends_by_itself(server: EchoServer, root: Path) -> None:
    body = {"num_steps": 7, "output_dir": "runs/seven"}
    assert server.http.post("/start_profile", json=body).json()["folders"] == [f"{root}/runs/seven"]
    generate(server, 20)
    assert 7 <= recorded_steps(root / "runs" / "seven") <= 9  # steps in flight belong to it
    assert "no profile is being recorded" in server.http.post("/stop_profile").json()["error"]["message"]


def test_only_one_recording_at_a_time(server: EchoServer) -> None:
    assert server.http.post("/start_profile", json={"output_dir": "first"}).status_code == 200
    second = server.http.post("/start_profile", json={"output_dir": "second"})
    assert second.status_code == 400
    assert "already being recorded" in second.json()["error"]["message"]
    assert server.http.post("/stop_profile").status_code == 200


@pytest.mark.parametrize("folder", ["/tmp", "../up", "a/../../b", "", "a\0b"])
def test_a_client_cannot_choose_a_folder_outside_the_root(server: EchoServer, folder: str) -> None:
    refused = server.http.post("/start_profile", json={"output_dir": folder})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "output_dir"


@pytest.mark.parametrize("steps", [0, -1, 10_001, "many"])
def test_the_number_of_steps_is_limited(server: EchoServer, steps: object) -> None:
    refused = server.http.post("/start_profile", json={"num_steps": steps})
    assert refused.status_code == 400
    assert "num_steps" in refused.text


def test_a_folder_that_cannot_be_made_is_an_error(server: EchoServer, root: Path) -> None:
    (root / "file").write_text("")
    refused = server.http.post("/start_profile", json={"output_dir": "file"})
    assert refused.status_code == 400
    assert "folder cannot be created" in refused.json()["error"]["message"]
    generate(server, 1)


def test_a_server_without_a_folder_refuses_profiles() -> None:
    with serve_echo(load_fake_model, load_tokenizer, **OPTIONS) as server:
        refused = server.http.post("/start_profile", json={})
        assert refused.status_code == 400
        assert "--profile-dir FOLDER" in refused.json()["error"]["message"]


@pytest.fixture
def writes_slowly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Recordings are written once this is set."""
    may_end, stop = threading.Event(), FakeRunner.stop_profile

    def stop_later(runner: FakeRunner) -> None:
        assert may_end.wait(60)
        stop(runner)

    monkeypatch.setattr(FakeRunner, "stop_profile", stop_later)
    monkeypatch.setattr(remote_link, "CONNECT_SECONDS", 0.5)
    return may_end


async def gone(*_: object) -> NoReturn:
    raise EngineDeadError("it is gone", started=False)


async def connect(config: ServerConfig) -> EngineClient:
    return await connect_engines(config, ByteTokenizer())


def test_a_router_waits_longer_for_profiles(
    root: Path, writes_slowly: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_echo(load_fake_model, load_tokenizer, profile_dir=str(root / "behind"), **OPTIONS) as behind,
        serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}", profile_dir=str(root)) as router,
        ThreadPoolExecutor() as pool,
    ):
        assert router.http.post("/start_profile").status_code == 200
        stopped = pool.submit(router.http.post, "/stop_profile")
        with pytest.raises(TimeoutError):
            stopped.result(1.5)  # longer than a server may take to answer other requests
        writes_slowly.set()
        assert stopped.result(30).json()["folders"] == [f"127.0.0.1:{behind.port}: {root}/behind"]
        assert router.http.post("/start_profile").status_code == 200
        writes_slowly.clear()
        stopped = pool.submit(router.http.post, "/stop_profile")
        with pytest.raises(TimeoutError):
            stopped.result(0.5)
        monkeypatch.setattr(remote_link, "_ask", gone)
        lost = stopped.result(30)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "replica_lost")
        writes_slowly.set()

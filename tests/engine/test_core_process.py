"""An engine core in its own process: how it starts, fails and dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from helpers.engine_fakes import load_echo, load_tokenizer, refuse_tokenizer
from helpers.whole_outputs import collect

from sglang_jax import errors
from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel, StartFailed
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import Core
from sglang_jax.engine.launch import TokenizerLoader, _check_ready, launch_core
from sglang_jax.engine.loop_thread import LoopThread
from sglang_jax.engine.replica import Backoff, Replica
from sglang_jax.engine.types import GenerateInput, ReplicaState
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import FlushCache, GetState

LONG = SamplingParams(max_new_tokens=None, ignore_eos=True)


async def start(
    model_path: str, *, in_process: bool = False, load_tokenizer: TokenizerLoader = load_tokenizer
) -> AsyncEngineClient:
    config = EngineConfig(model_path=model_path)
    return await launch_core(config, in_process=in_process, load=load_echo, load_tokenizer=load_tokenizer)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncEngineClient]:
    client = await start("echo:0.002")
    yield client
    await client.close()


async def core_pid(client: AsyncEngineClient) -> int:
    pid = (await client.call(GetState()))[0]["pid"]
    assert isinstance(pid, int)
    return pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other engines on this machine have their folders elsewhere. The path is short, as a socket's must be."""
    tmp_path_factory.getbasetemp()  # chosen first, as it outlives this folder
    with tempfile.TemporaryDirectory(prefix="wires-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


def wire_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("sglang-jax-*"))


async def test_serves_and_leaves_nothing_behind() -> None:
    client = await start("echo")
    pid = await core_pid(client)
    assert pid != os.getpid()
    assert not wire_folders()  # both ends are connected
    outputs = await asyncio.gather(*(collect(client, GenerateInput(prompt=f"héllo {i}")) for i in range(20)))
    assert [output.text for (output,) in outputs] == [f"héllo {i}" for i in range(20)]
    await client.close()
    assert not is_running(pid)


def load_between(config: EngineConfig, channel: CoreChannel) -> Core:
    """Frees 60 MB between blocks that stay."""
    blocks = [bytearray(3000) for _ in range(20_000)]
    KEPT.append(blocks[::20])
    return load_echo(config, channel)


KEPT: list[list[bytearray]] = []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own ways")
async def test_memory_that_loading_freed_goes_back() -> None:
    sizes = []
    for load in (load_echo, load_between):
        config = EngineConfig(model_path="echo")
        client = await launch_core(config, in_process=False, load=load, load_tokenizer=load_tokenizer)
        await collect(client, GenerateInput(prompt="a"))  # memory that is given back before the first answer
        pages = Path(f"/proc/{await core_pid(client)}/statm").read_text().split()[1]
        sizes.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
        await client.close()
    assert sizes[1] - sizes[0] < 20_000 * 3000 / 3


async def test_drain_delivers_all_outputs_before_the_process_ends(client: AsyncEngineClient) -> None:
    task = asyncio.create_task(collect(client, GenerateInput(prompt="abc" * 20)))
    while (await client.call(GetState()))[0]["seen"] == "[]":
        await asyncio.sleep(0.001)
    await client.close(drain=True)
    ((output,),) = await asyncio.gather(task)
    assert output.text == "abc" * 20


async def test_killed_process_is_noticed_at_once(client: AsyncEngineClient) -> None:
    pid = await core_pid(client)
    tasks = [asyncio.create_task(collect(client, GenerateInput(prompt="a", sampling=LONG))) for _ in range(3)]
    streamed = client.generate(GenerateInput(prompt="abc", sampling=LONG, stream=True))
    await anext(streamed)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        async for _ in streamed:
            pass
    for task in tasks:
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await task
    assert not client.alive
    for attempt in (client.call(GetState()), client.call(FlushCache()), collect(client, GenerateInput(prompt="a"))):
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await attempt
    client.abort_all()


async def test_process_that_exits_is_noticed(client: AsyncEngineClient) -> None:
    with pytest.raises(EngineDeadError, match="exited with status 7"):
        await collect(client, GenerateInput(prompt=[258]))
    assert not client.alive


async def test_a_failure_in_the_process_is_reported(client: AsyncEngineClient) -> None:
    with pytest.raises(EngineDeadError, match="RuntimeError: the echo broke"):
        await collect(client, GenerateInput(prompt=[257]))


async def test_signals_for_the_whole_group_are_left_to_the_parent(client: AsyncEngineClient) -> None:
    pid = await core_pid(client)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert [output.text for output in await collect(client, GenerateInput(prompt="abc"))] == ["abc"]


async def test_stuck_process_is_killed(
    client: AsyncEngineClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang_jax.engine.core_link.STOP_SECONDS", 0.2)
    pid = await core_pid(client)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(client.close(), 5)
    assert wait_until_gone(pid, 2)
    assert "did not stop within 0.2 s: killing its process" in caplog.text


async def test_a_thread_that_is_late_to_stop_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang_jax.engine.core_link.STOP_SECONDS", 0.0)
    client = await start("echo:0.2", in_process=True)
    await asyncio.wait_for(client.close(), 20)
    assert "did not stop within 0 s: waiting for its step in flight" in caplog.text


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("model_path", "error", "words"),
    [
        ("missing", CheckpointError, "^no checkpoint at 'missing'$"),
        ("misconfigured", ConfigError, "^backend 'x' is not installed$"),
        ("broken", EngineDeadError, "^the engine failed to start: RuntimeError: no such device$"),
    ],
)
async def test_start_up_errors(model_path: str, error: type[Exception], words: str, in_process: bool) -> None:
    with pytest.raises(error, match=words):
        await asyncio.wait_for(start(model_path, in_process=in_process), 20)
    assert not wire_folders()


@pytest.mark.parametrize("in_process", [True, False])
async def test_tokenizer_error_ends_the_core_as_well(in_process: bool) -> None:
    with pytest.raises(CheckpointError, match="there is no tokenizer"):
        await asyncio.wait_for(start("echo", in_process=in_process, load_tokenizer=refuse_tokenizer), 20)


async def test_death_while_starting() -> None:
    with pytest.raises(EngineDeadError, match="failed to start: the engine process exited with status 9"):
        await asyncio.wait_for(start("dying"), 20)


async def test_a_start_that_hangs_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model_path="never", engine_start_timeout=1.0)
    with pytest.raises(
        EngineDeadError, match=r"failed to start: it was not ready after 1 s \(--engine-start-timeout\)"
    ):
        await asyncio.wait_for(launch_core(config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer), 60)
    found = re.search(r"Process (\d+) of the engine is in state .*; the stacks of its threads", caplog.text)
    assert found is not None
    assert wait_until_gone(int(found[1]), 5)
    assert not wire_folders()


async def test_starts_that_hang_count_as_restarts() -> None:
    """A replica whose first engine was lost tries again until its restarts are used up."""
    starts = 0

    async def launch() -> AsyncEngineClient:
        nonlocal starts
        starts += 1
        if starts == 1:
            return await start("echo")
        config = EngineConfig(model_path="never", engine_start_timeout=0.5)
        return await launch_core(config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer)

    replica = Replica(0, launch, backoff=Backoff(first_delay=0.0, give_up=None, max_restarts=2))
    await replica.start()
    os.kill(await core_pid(replica.client), signal.SIGKILL)
    while replica.state is ReplicaState.SERVING:
        await asyncio.sleep(0.05)
    with pytest.raises(EngineDeadError, match=r"stopped: it failed to start: .*not ready after 0\.5 s"):
        await replica.serving()
    assert starts == 3


async def test_cancelled_start_ends_the_process() -> None:
    task = asyncio.create_task(start("slow"))
    await asyncio.sleep(0.1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert task.cancelled()
    assert not wire_folders()


PARENT = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from helpers.engine_fakes import load_tokenizer
from helpers.sleeping_core import TRAP, load_sleeping
from sglang_jax.config import EngineConfig
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import GenerateInput, ReplicaState

async def main():
    config = EngineConfig(model_path="native:0.001")
    client = await launch_core(config, in_process=False, load=load_sleeping, load_tokenizer=load_tokenizer)
    if sys.argv[2] == "hang":
        waiting = asyncio.ensure_future(anext(client.generate(GenerateInput(prompt=[TRAP]))))
        await asyncio.sleep(0.5)
    print(client.model_info.architecture, flush=True)
    if sys.argv[2] != "leave":
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["killed", "killed while the child hangs", "forgets to close"])
def test_child_does_not_outlive_its_parent(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    mode = {"killed": "wait", "killed while the child hangs": "hang", "forgets to close": "leave"}[ending]
    parent = subprocess.Popen(
        [sys.executable, str(script), json.dumps(sys.path), mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if mode != "leave":
            assert is_running(pid)
            parent.kill()
        parent.wait(20)
        assert wait_until_gone(pid, 5)
        assert not wire_folders()
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_an_engine_that_is_interrupted_while_a_thread_loads_it_waits_for_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(config: EngineConfig, channel: CoreChannel) -> Core:
        loading.set()
        go_on.wait(30)
        return load_echo(config, channel)

    loop = LoopThread("interrupted")
    config = EngineConfig(model_path="echo")
    start = loop.submit(launch_core(config, in_process=True, load=load, load_tokenizer=load_tokenizer))
    assert loading.wait(30)
    start.cancel()
    closing = threading.Thread(target=loop.close)  # which cancels it once more
    closing.start()
    time.sleep(0.2)
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("from_a_loop", [False, True])
def test_what_a_closing_loop_cancels_is_an_error_of_the_engine(from_a_loop: bool) -> None:
    """And not a cancellation, which the caller did not ask for."""
    loop, running = LoopThread("closing"), threading.Event()

    async def wait() -> None:
        running.set()
        await asyncio.Event().wait()

    def close() -> None:
        running.wait(30)
        loop.close()

    closing = threading.Thread(target=close)
    closing.start()
    run = (lambda: asyncio.run(loop.run_async(wait()))) if from_a_loop else (lambda: loop.run(wait()))
    with pytest.raises(EngineDeadError, match="shut down"):
        run()
    closing.join()


def test_errors_of_options_and_checkpoints_keep_their_type() -> None:
    """And do not arrive as a failure of the engine, under the name of their class."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, ConfigError | CheckpointError):
            with pytest.raises((ConfigError, CheckpointError), match=r"^why$") as caught:
                _check_ready(StartFailed(kind.__name__, "why"))
            assert caught.type is kind

"""The command line's `batch` and `serve` over an echo engine, for tests that kill them.

As a script it imports everything once, then runs each command (a line of JSON on its standard input) in a fork of
itself, and answers with the fork's process id: a command starts at once, and may be killed at any moment.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sglang_jax.batch import run as run_module
from sglang_jax.batch.run import run_batch
from sglang_jax.cli.main import cli, run
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.launch import TokenizerLoader, launch_core
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.replica import Backoff, Replica, launch_replicas
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.server import serve as serve_module

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.engine_fakes import EchoCore, load_tokenizer

QUICK = Backoff(first_delay=0.01, max_delay=0.02)


class AuditedEchoCore(EchoCore):
    """Records every prompt that it gets in the file `AUDIT`, before anything else is done with it."""

    def _admit(self, message: NewRequest) -> None:
        descriptor = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        prompt = bytes(token if token < 256 else ord("!") for token in memoryview(message.token_ids).cast("i"))
        os.write(descriptor, prompt + b"\n")
        os.close(descriptor)
        super()._admit(message)


def load_audited_echo(config: EngineConfig, channel: CoreChannel) -> AuditedEchoCore:
    return AuditedEchoCore(config, channel)


def launcher(
    load: CoreLoader, *, in_process: bool, load_tokenizer: TokenizerLoader = load_tokenizer
) -> Callable[..., object]:
    """A `Launch` whose engines are these cores."""

    async def launch_one(config: EngineConfig, placement: Placement) -> AsyncEngineClient:
        where = None if in_process else placement
        return await launch_core(
            config, in_process=in_process, load=load, load_tokenizer=load_tokenizer, placement=where
        )

    async def launch(config: ServerConfig, count: int) -> list[Replica[AsyncEngineClient]]:
        return await launch_replicas(config, count, launch=launch_one, backoff=QUICK)

    return launch


def run_with(
    load: CoreLoader,
    arguments: Sequence[str],
    *,
    in_process: bool = True,
    load_tokenizer: TokenizerLoader = load_tokenizer,
) -> int:
    """Runs the command line in this process, with `batch` and `serve` over these cores."""

    async def launch_for_server(config: ServerConfig) -> AsyncEngineClient:
        return await launch_core(config, in_process=in_process, load=load, load_tokenizer=load_tokenizer)

    originals = run_module.run_batch, serve_module.run
    launch = launcher(load, in_process=in_process, load_tokenizer=load_tokenizer)
    run_module.run_batch = functools.partial(run_batch, launch=launch)
    serve_module.run = functools.partial(serve_module.run, launch=launch_for_server)
    try:
        return run(cli, "sglang-jax", arguments)
    finally:
        run_module.run_batch, serve_module.run = originals


class CommandForks:
    """Starts commands by a process that has already imported everything."""

    def __init__(self, audit: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "AUDIT": str(audit), "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        )

    def start(self, arguments: Sequence[str], log: Path) -> int:
        """The process id of a new command, which writes its output to `log`."""
        return int(self._ask({"run": list(arguments), "log": str(log)}))

    def wait(self, pid: int) -> int:
        """The exit status of a command once it has ended: negative for a signal."""
        return int(self._ask({"wait": pid}))

    def _ask(self, request: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            print(status, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request["run"], Path(request["log"]))
        print(pid, flush=True)


def _become(arguments: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(run_with(load_audited_echo, arguments))


if __name__ == "__main__":
    _serve()

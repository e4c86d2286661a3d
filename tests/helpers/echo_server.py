"""The HTTP server over an engine that echoes prompts (or over another), on a separate socket, in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import uvicorn
from helpers.engine_fakes import load_echo, load_tokenizer
from uvicorn.loops.auto import auto_loop_factory

from sglang_jax.batch.served.routes import serve_batches
from sglang_jax.config import ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.launch import TokenizerLoader, launch_core
from sglang_jax.engine.types import EngineClient
from sglang_jax.scheduler.commands import GetState
from sglang_jax.server.app import create_context
from sglang_jax.server.context import ServerContext
from sglang_jax.server.serve import Launch, bind, http_config, open_files, traces_of

Result = TypeVar("Result")

LOADING_SECONDS = 250
"""How long an engine may take to start: a real model, on a machine with other work."""


@dataclass
class EchoServer:
    """A running server. `http` is a client of it; `port` is where it listens on 127.0.0.1."""

    port: int
    http: httpx2.Client
    context: ServerContext
    engine: EngineClient
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def await_(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def seen(self) -> list[dict[str, Any]]:
        """The requests that reached the engine's core."""
        return json.loads(str(self.state()["seen"]))

    def state(self) -> dict[str, Any]:
        """The figures of the engine's only core."""
        (state,) = self.await_(self.engine.call(GetState()))
        return state

    def aborted(self) -> list[int]:
        """Ids of the requests that the core has aborted."""
        return json.loads(str(self.state()["aborted"]))

    def running(self) -> int:
        return int(str(self.state()["running"]))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Posts over a bare socket and returns it without reading the answer."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(post_bytes(path, body))
        return connection

    def tasks(self) -> list[str]:
        """The tasks of the server's event loop, except this call: the coroutine of each."""

        async def others() -> list[str]:
            return sorted(str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()})

        return self.await_(others())


def post_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A POST of JSON as bytes on the wire."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


@contextmanager
def serve_echo(
    load: CoreLoader = load_echo,
    load_tokenizer: TokenizerLoader = load_tokenizer,
    *,
    in_process: bool = True,
    launch: Launch | None = None,
    **options: Any,
) -> Iterator[EchoServer]:
    """Runs a server for as long as the block lasts, over the engine that `launch` makes if it is given. `options` are
    those of `ServerConfig`."""
    listener = bind("127.0.0.1", options.pop("port", 0))
    config = ServerConfig(**{"model_path": "echo", **options})
    ready = threading.Event()
    running: list[EchoServer] = []
    servers: list[uvicorn.Server] = []
    port = listener.getsockname()[1]

    async def main() -> None:
        if launch is not None:
            engine = await launch(config)
        else:
            engine = await launch_core(config, in_process=in_process, load=load, load_tokenizer=load_tokenizer)
        with open_files(config) as files, traces_of(config) as traces:
            context = create_context(engine, config, files=files)
            service = None if files is None else serve_batches(context, files)
            server = uvicorn.Server(http_config(context, service, traces))
            servers.append(server)
            running.append(EchoServer(port, http, context, engine, asyncio.get_running_loop()))
            ready.set()
            await server.serve(sockets=[listener])
            if service is not None:
                await service.close()
        await engine.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # the loop of a real server
            runner.run(main())

    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(LOADING_SECONDS)
        wait_for(lambda: servers[0].started)
        try:
            yield running[0]
        finally:
            servers[0].should_exit = servers[0].force_exit = True
            thread.join(30)
            assert not thread.is_alive()


async def launch_echo(config: ServerConfig) -> AsyncEngineClient:
    """The launch function for `sglang_jax.server.serve.run` in a separate process."""
    return await launch_core(config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Fails unless the condition becomes true in time."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"still not so after {seconds} s")

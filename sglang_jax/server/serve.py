"""Runs the server: engine, socket, signals."""

from __future__ import annotations

import asyncio
import logging
import platform
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.loops.auto import auto_loop_factory

from sglang_jax import logs
from sglang_jax.about import documentation, version
from sglang_jax.architectures.pooling import Pooler
from sglang_jax.config import LogFormat, LogLevel, ServerConfig
from sglang_jax.engine.allocator import FreeMemory, limit_free_memory
from sglang_jax.engine.collector import frozen_heap
from sglang_jax.engine.launch_replicated import launch_engines
from sglang_jax.engine.types import EngineClient
from sglang_jax.errors import ConfigError, how_to_install
from sglang_jax.runner.backends import load_follower
from sglang_jax.runner.claimed_address import claim_address
from sglang_jax.server.app import Service, create_app, create_context, create_routes
from sglang_jax.server.auth import ROUTES_PATH
from sglang_jax.server.callers import Callers
from sglang_jax.server.connections import (
    ConnectionGate,
    ConnectionLimits,
    bounded_connections,
    raise_descriptor_limit,
)
from sglang_jax.server.context import ServerContext
from sglang_jax.server.file_store import FileStore
from sglang_jax.server.local_hosts import LocalHosts, OwnPagesOnly, is_loopback
from sglang_jax.server.remote_replicas import connect_engines
from sglang_jax.server.requests_seen import RequestsSeen
from sglang_jax.server.shutdown import Stoppable
from sglang_jax.server.tracing import SpanWriter, Traced

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open for this long: longer than clients keep theirs, so that no request meets a closing one."""

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted per iteration of the event loop: uvloop accepts one per listening socket. With one,
when thousands arrived at once, a health check waited for seconds in the kernel's queue."""

BACKLOG = 2048
"""Connections that may wait in the kernel's queue, uvicorn's default; the kernel may allow fewer."""

SEND_BUFFER = 131_072
"""Bytes of a socket's send buffer, doubled by Linux: enough for 2 MB/s over 100 ms, but soon full if no one reads."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM while the engine is starting, as in shells."""

SWITCH_SECONDS = 0.0005
"""Seconds that the event loop waits for a thread that holds Python's lock, a tenth of the default: threads read and
write megabytes, and a request releases the lock a dozen times until its first token."""

Launch = Callable[[ServerConfig], Awaitable[EngineClient]]
MakeService = Callable[[ServerContext, FileStore], Service]


MALFORMED_REQUESTS = logs.OnceASecond()
"""Limits uvicorn's log, which has a line for each malformed request."""

LAST_ANSWER_SECONDS = 2.0
"""Seconds before the server exits that clients have to read that the engine is gone or that the server stops."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains, or exits when its engine is gone for good, so that the service manager restarts it.

    After a first SIGTERM or SIGINT, `/health` returns 503, new requests are refused with 503, and the server exits when
    those in flight have finished. A second signal, or the end of `--drain-timeout`, ends those too: they get 503, or an
    error event if their stream has started. A third signal, or `LAST_ANSWER_SECONDS` later, drops connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: ServerContext,
        on_ready: Callable[[], None],
        service: Service | None = None,
    ) -> None:
        super().__init__(config)
        self._context = context
        self._service = service
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._memory = FreeMemory()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs between two instructions of the main thread, so it only schedules the work."""
        self._loop.call_soon_threadsafe(self._stop if self._context.draining else self._drain)
        self._context.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second: exits if it is time; every tenth time, returns free memory to the system."""
        if counter % 10 == 0:
            self._memory.look()
        gone = self._context.client.gone
        if gone and self._deadline is None:
            logger.error("The engine cannot be restarted: the server exits")
            self._deadline = self._loop.call_later(LAST_ANSWER_SECONDS, self._stop)
        if not self._context.in_flight and (self._context.draining or gone):
            self.should_exit = True
        return await super().on_tick(counter)

    def _drain(self) -> None:
        seconds = self._context.config.drain_timeout
        if self._service is not None:
            self._service.stop()
        if not self._context.in_flight:
            logger.info("Stopping")
        else:
            logger.info(
                "Draining: %d requests in flight have %g s to finish; a second signal stops the server at once",
                len(self._context.in_flight),
                seconds,
            )
        if self._deadline is None:
            self._deadline = self._loop.call_later(seconds, self._stop)

    def _stop(self) -> None:
        if self._context.shutdown.stopped:
            self._drop()
            return
        if self._context.in_flight:
            logger.warning("Stopping: aborting %d requests in flight", len(self._context.in_flight))
        self._context.draining = True
        self._context.shutdown.stop()
        self._loop.call_later(LAST_ANSWER_SECONDS, self._drop)

    def _drop(self) -> None:
        self.should_exit = self.force_exit = True
        self._context.client.abort_all()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


async def launch_or_connect(config: ServerConfig) -> EngineClient:
    """Launches the engines of the options, or connects to other servers. Raises as these do."""
    if config.connect is not None:
        return await connect_engines(config)
    return await launch_engines(config)


def run(config: ServerConfig, launch: Launch = launch_or_connect, make_service: MakeService | None = None) -> int:
    """Serves until a signal; a node with `node_rank` above 0 follows node 0 until that ends. Returns the exit status:
    0, or 1 if the engine is gone for good. `make_service`: makes the service of a server with files. Raises as
    `launch_or_connect`; `ConfigError` for an invalid address, keys or folder of files."""
    begin = time.perf_counter()
    logs.configure(config.log_level.upper(), as_json=config.log_format is LogFormat.JSON)
    logger.info("sglang-jax %s, Python %s", version(), platform.python_version())
    if config.node_rank > 0:
        load_follower(config)(config)
        return 0
    limit_free_memory()
    sys.setswitchinterval(SWITCH_SECONDS)
    callers = Callers.of(config)
    if not callers.asks_for_a_key and not is_loopback(config.host):
        logger.warning(
            "Anyone who can connect to %s may use this server, because it has no key. Set --api-key-file, or "
            "listen on 127.0.0.1",
            config.host,
        )
    listener = bind(config.host, config.port)  # before loading the model, so that a taken port shows at once
    with (
        listener,
        claim(listener),
        open_files(config) as files,
        traces_of(config) as traces,
        asyncio.Runner(loop_factory=auto_loop_factory()) as runner,
    ):
        try:
            return runner.run(_serve(config, listener, launch, make_service, files, traces, begin))
        except asyncio.CancelledError:
            return TERMINATED


@contextmanager
def open_files(config: ServerConfig) -> Iterator[FileStore | None]:
    """Opens the files of clients while the context is open; None without `files_dir`. Raises `ConfigError`."""
    if config.files_dir is None:
        yield None
        return
    with FileStore(config.files_dir, max_file_bytes=config.max_file_bytes, max_bytes=config.max_files_bytes) as files:
        yield files


@contextmanager
def traces_of(config: ServerConfig) -> Iterator[SpanWriter | None]:
    """Sends traces to the collector of the options while the context is open; None without one. Raises `ConfigError`
    if OpenTelemetry is not installed."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    try:
        from sglang_jax.server.otlp import otlp_spans  # here, because most servers need no OpenTelemetry
    except ImportError as error:
        needed = f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): {how_to_install('otel')}"
        raise ConfigError(needed) from error
    with otlp_spans(config.otlp_traces_endpoint) as spans:
        yield spans


async def _serve(
    config: ServerConfig,
    listener: socket.socket,
    launch: Launch,
    make_service: MakeService | None,
    files: FileStore | None,
    traces: SpanWriter | None,
    begin: float,
) -> int:
    with _cancelled_by_sigterm():
        client = await launch(config)
    service: Service | None = None
    try:
        context = create_context(client, config, files=files)
        if make_service is not None and files is not None:
            service = make_service(context, files)
        uvicorn_config = http_config(context, service, traces)
        url = _url(config.host, listener.getsockname()[1])
        server = DrainingServer(uvicorn_config, context, lambda: _announce(context, url, begin), service)
        with frozen_heap():
            listen(listener)
            await server.serve(sockets=listening_sockets(listener))
        status = 1 if client.gone else 0
    finally:
        if service is not None:
            await service.close()
        await client.close()
    logger.info("Stopped")
    return status


def http_config(
    context: ServerContext, service: Service | None = None, traces: SpanWriter | None = None
) -> uvicorn.Config:
    """Returns uvicorn's options for the context's application, and starts the service. `traces`: None if requests are
    not traced."""
    config = context.config
    logging.getLogger("uvicorn.error").addFilter(MALFORMED_REQUESTS)
    limits = ConnectionLimits(raise_descriptor_limit(config.max_connections), config.client_timeout)
    app: ASGIApp = create_app(context, service)
    routes: ASGIApp | None = None if service is None else create_routes(context)
    if traces is not None:
        app = Traced(app, traces, config.model_name)
        routes = None if routes is None else Traced(routes, traces, config.model_name)
    if service is not None and routes is not None:
        service.start(routes)
    if not context.callers.asks_for_a_key and is_loopback(config.host):
        app = OwnPagesOnly(LocalHosts(app, (config.allowed_hosts or "").split(",")), config.origins())
    return uvicorn.Config(
        ConnectionGate(Stoppable(RequestsSeen(app, context.metrics), context.shutdown)),
        http=bounded_connections(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="info" if config.log_level is LogLevel.DEBUG else "warning",
        access_log=False,  # `RequestsSeen` logs requests
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM cancel the current task, as SIGINT does with `asyncio.Runner`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to this address, not listening yet. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections. Otherwise, megabytes may wait in the kernel for a client that does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, str(error.strerror)) from error
    return listener


@contextmanager
def claim(listener: socket.socket) -> Iterator[None]:
    """Keeps other servers of this machine from using the address of a bound socket while the context is open. Raises
    `ConfigError` if another server has it. Does nothing except on Linux."""
    host, port = listener.getsockname()[:2]
    try:
        claimed = claim_address(host, port)
    except OSError as error:
        raise _taken(host, port, "another server has this address and is starting") from error
    with claimed or nullcontext():
        yield


def listen(listener: socket.socket) -> None:
    """Lets clients connect. Raises `ConfigError` if another program listens, which an event loop may not report."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, str(error.strerror)) from error


def _taken(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host")


def listening_sockets(listener: socket.socket) -> list[socket.socket]:
    """Returns the socket and its duplicates: see `ACCEPTED_AT_ONCE`."""
    return [listener, *(listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _announce(context: ServerContext, url: str, begin: float) -> None:
    key = ' -H "Authorization: Bearer $API_KEY"' if context.callers.asks_for_a_key else ""
    left = sum(load.stats.programs_left for load in context.client.loads())
    more = f" ({left} more programs are compiled while serving: the first answers take longer)" if left else ""
    print(
        f"Ready after {time.perf_counter() - begin:.1f} s{more}: serving {context.config.model_name} at {url}. "
        f"Its routes: {url}{ROUTES_PATH}; documentation: {documentation('operations.md')}. Try it:\n"
        f"  {_example(context.client.model_info.pooler, url, key)}",
        flush=True,
    )


def _example(pooler: Pooler | None, url: str, key: str) -> str:
    """A command that shows what the model does."""
    path, body = "/v1/embeddings", '{"input": ["The capital of France is Paris."]}'
    if pooler is None:
        path = "/v1/chat/completions"
        body = (
            '{"messages": [{"role": "user", "content": "What is the capital of Japan?"}], '
            '"max_tokens": 100, "temperature": 0}'
        )
    elif pooler.labels:
        path = "/classify"
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'"

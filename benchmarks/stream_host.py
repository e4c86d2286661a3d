"""Host time of streamed tokens, from the wire of the engine core to the response.

    python benchmarks/stream_host.py [--json FILE] [--seconds 8]

Tables, none of which needs a model:

- *Completion*: a token is added to an output and read from it as text, at 1k, 8k and 32k tokens of output.
  Target: at most 3 us, equal within 10 %.
- *Put together*: new tokens become a cumulative output, as Python callers get it. The same target.
- *Engine client*: a step's message for 64 streams, until each of the 64 tasks that read has its token, the event loop
  included.
- *Engine.generate*: the same for a script that reads 64 streams in its own thread, both threads included.
- *Server*: the engine client, detokenizing, and the HTTP server that writes events of `/v1/chat/completions`, for 64
  streams of 50 tokens a second: as an ASGI application whose events are dropped, and over sockets on the loopback,
  where the kernel's work for them counts too. The core and the readers of sockets are separate processes; the figure
  is that of the server's process. Target: at most 15 % of a core.

All figures are processor time, so that other programs on the machine matter little. All text goes through the
detokenizer that models have, over a table of short words.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from machine import report
from starlette.types import Message
from uvicorn.loops.auto import auto_loop_factory

from sglang_jax.checkpoint.tokenizer import TextStream
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.channel import CoreChannel, Published, Ready, Stopped
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.cumulative import CumulativeOutputs
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.engine import Engine
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.engine.single_link import SingleLink
from sglang_jax.engine.types import SCRIPT, GenerateInput, ModelInfo, OutputDelta, TokenizedRequest
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Inbound,
    NewRequest,
    SchedulerStats,
    Shutdown,
    StepOutputs,
)
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.context import ServerContext
from sglang_jax.server.serve import bind, http_config

LENGTHS = (1024, 8192, 32768)
AT_ONCE = 1024
"""Tokens of each stream that a step gives before times are taken; a client that has more unread tokens is ended."""
STREAMS = 64
TOKENS_PER_SECOND = 50
TURNS = 15
TOKENS_PER_TURN = 20
"""Few, so that the output is hardly longer at the end than at the start."""

VOCAB = [f" w{number}".encode() for number in range(1000)]
MODEL = ModelInfo(
    model_path="paced",
    architecture="none",
    context_length=1 << 20,
    vocab_size=len(VOCAB),
    eos_token_ids=(0,),
    bos_token_id=None,
    dtype="none",
)
READY = Ready(model_info=MODEL, max_running_requests=STREAMS, max_total_tokens=1 << 26)
ENDLESS = SamplingParams(max_new_tokens=None)

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "go on"}], "stream": True}).encode()
SCOPE = {
    "type": "http",
    "method": "POST",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "http_version": "1.1",
    "scheme": "http",
}


class WordTokenizer:
    """The part of a tokenizer that a chat needs: each byte of a prompt is a token, and each token a short word."""

    longest_token = 8

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    chat_template = ""
    response_template = None
    special_tokens: Mapping[str, int] = {}

    def stream_decoder(
        self, skip_special_tokens: bool = True, *, continues_text: bool = False, markers: Set[int] = frozenset()
    ) -> TextStream:
        return TextStream(VOCAB.__getitem__, frozenset({0}), 0)

    def check_roles(self, roles: Sequence[object]) -> None:
        """Accepts every role."""

    def marked(self, text: str) -> str:
        return text

    def render_chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def load_words(config: EngineConfig) -> Any:
    return WordTokenizer()


def step_message(ids: Sequence[int], tokens: int, first: int) -> StepOutputs:
    """A step that gave each request this many tokens."""
    sampled = [1 + (first + number) % (len(VOCAB) - 1) for number in range(tokens)]
    return StepOutputs(
        ids=np.repeat(np.array(ids, "<i8"), tokens).tobytes(), tokens=np.array(sampled * len(ids), "<i4").tobytes()
    )


# --- Completion ---


def completion(length: int) -> Completion:
    """An output with this many tokens, all of them read."""
    text = OutputText(WordTokenizer().stream_decoder(), (), frozenset({0}))
    asked = GenerateInput(prompt=[1], stream=True)
    request = TokenizedRequest(asked, "one", np.array([1], np.int32), asked.sampling, SCRIPT, None, None)
    made = Completion(RequestOutputs(request), index=0, prompt_tokens=1, text=text)
    for token in range(length):
        made.push(1 + token % 999)
    made.take()
    return made


def measure_completions() -> list[list[float]]:
    """Microseconds per token of each turn, for each length. Lengths alternate, each equally often the first."""
    times: list[list[float]] = [[] for _ in LENGTHS]
    for turn in range(4 * TURNS):
        outputs = [completion(length) for length in LENGTHS]
        for output in [*outputs, *outputs]:
            spend(output)  # warms the caches, as between the tokens of a step
        for place in range(len(LENGTHS)):
            number = (turn + place) % len(LENGTHS)
            start = time.thread_time()
            spend(outputs[number])
            times[number].append((time.thread_time() - start) / TOKENS_PER_TURN * 1e6)
    return times


def spend(output: Completion) -> None:
    for token in range(TOKENS_PER_TURN):
        output.push(1 + token)
        output.take()


# --- Put together ---


def measure_cumulative() -> list[list[float]]:
    """Microseconds per token of each turn, for each length. Lengths alternate."""
    times: list[list[float]] = [[] for _ in LENGTHS]
    for turn in range(4 * TURNS):
        for place in range(len(LENGTHS)):
            number = (turn + place) % len(LENGTHS)
            outputs = CumulativeOutputs("request")
            outputs.add(text_delta(0, LENGTHS[number]))
            deltas = [text_delta(LENGTHS[number] + token, 1) for token in range(2 * TOKENS_PER_TURN)]
            for delta in deltas[:TOKENS_PER_TURN]:
                outputs.add(delta)
            start = time.thread_time()
            for delta in deltas[TOKENS_PER_TURN:]:
                outputs.add(delta)
            times[number].append((time.thread_time() - start) / TOKENS_PER_TURN * 1e6)
    return times


def text_delta(before: int, tokens: int) -> OutputDelta:
    """This many tokens of an output that had that many before."""
    return OutputDelta(
        index=0,
        text=" word" * tokens,
        token_ids=[7] * tokens,
        prompt_tokens=1,
        completion_tokens=before + tokens,
        cached_tokens=0,
    )


# --- Engine client ---


class OpenChannel:
    """The client's end of a wire whose other end is this program, and a core that lives until it is stopped.
    `on_new` is called for each request."""

    def __init__(self, on_new: Callable[[], None] = lambda: None) -> None:
        self._on_new = on_new
        self.new: list[int] = []
        self.deliver: Callable[[Published], None] = lambda message: None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, deliver: Callable[[Published], None]) -> None:
        self.deliver = deliver

    def send(self, message: Inbound) -> None:
        if isinstance(message, NewRequest):
            self.new.append(message.id)
            self._on_new()
        if isinstance(message, Shutdown):
            self.deliver(Stopped())
            self.kill()

    def kill(self) -> None:
        self.ended.set_result("told to stop")

    def close(self) -> None:
        """Nothing to close."""


class Crowd:
    """`STREAMS` tasks that read streams of one client, and their number of tokens."""

    def __init__(self, length: int) -> None:
        self.tokens = 0
        self.channel = OpenChannel()
        channel: Any = self.channel
        tokenizer: Any = WordTokenizer()
        self._client = AsyncEngineClient(
            SingleLink(CoreLink(channel, channel, READY, contextlib.ExitStack())), tokenizer
        )
        self._tasks = [asyncio.create_task(self._read()) for _ in range(STREAMS)]
        self._length = length
        self._steps = 0

    async def begin(self) -> None:
        while len(self.channel.new) < STREAMS:
            await asyncio.sleep(0)
        for _ in range(self._length // AT_ONCE):
            await self.step(AT_ONCE)

    async def step(self, tokens: int = 1) -> None:
        """Delivers a step and waits until each task has its tokens."""
        expected = self.tokens + tokens * STREAMS
        self.channel.deliver(step_message(self.channel.new, tokens, self._steps))
        self._steps += 1
        while self.tokens < expected:
            await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._client.close()

    async def _read(self) -> None:
        async for output in self._client.generate(GenerateInput(prompt=[1, 2], sampling=ENDLESS, stream=True)):
            self.tokens += len(output.token_ids)


async def measure_clients() -> list[list[float]]:
    """Microseconds per token of each turn, for each length. Lengths alternate."""
    crowds = [Crowd(length) for length in LENGTHS]
    for crowd in crowds:
        await crowd.begin()
    times: list[list[float]] = [[] for _ in LENGTHS]
    for _ in range(TURNS):
        for crowd, found in zip(crowds, times, strict=True):
            start = time.thread_time()
            for _ in range(TOKENS_PER_TURN):
                await crowd.step()
            found.append((time.thread_time() - start) / TOKENS_PER_TURN / STREAMS * 1e6)
    for crowd in crowds:
        await crowd.end()
    return times


# --- Engine.generate ---


class Script:
    """An `Engine` whose core is this program, and a script that iterates over `STREAMS` of its streams."""

    def __init__(self, length: int) -> None:
        self._steps = 0
        self._engine = Engine(EngineConfig(model_path="paced"), launch=self._launch)
        self._outputs = self._engine.generate([[1, 2]] * STREAMS, ENDLESS, stream=True)
        self._read(AT_ONCE)
        for _ in range(length // AT_ONCE - 1):
            self.step(AT_ONCE)

    async def _launch(self, config: EngineConfig) -> AsyncEngineClient:
        self._loop = asyncio.get_running_loop()
        channel: Any = OpenChannel(self._begin)
        tokenizer: Any = WordTokenizer()
        self._channel = channel
        return AsyncEngineClient(SingleLink(CoreLink(channel, channel, READY, contextlib.ExitStack())), tokenizer)

    def _begin(self) -> None:
        if len(self._channel.new) == STREAMS:
            self._loop.call_soon(self._channel.deliver, step_message(self._channel.new, AT_ONCE, 0))

    def step(self, tokens: int = 1) -> None:
        """Delivers a step, and reads its tokens."""
        self._steps += 1
        self._loop.call_soon_threadsafe(self._channel.deliver, step_message(self._channel.new, tokens, self._steps))
        self._read(tokens)

    def _read(self, tokens: int) -> None:
        left = tokens * STREAMS
        while left:
            left -= len(next(self._outputs).delta_ids)

    def end(self) -> None:
        self._engine.shutdown()


def measure_scripts() -> list[list[float]]:
    """Microseconds of the process per token of each turn, for each length. Lengths alternate."""
    scripts = [Script(length) for length in LENGTHS]
    times: list[list[float]] = [[] for _ in LENGTHS]
    for _ in range(TURNS):
        for script, found in zip(scripts, times, strict=True):
            start = time.process_time()
            for _ in range(TOKENS_PER_TURN):
                script.step()
            found.append((time.process_time() - start) / TOKENS_PER_TURN / STREAMS * 1e6)
    for script in scripts:
        script.end()
    return times


# --- Server ---


class PacedCore:
    """Gives every request `TOKENS_PER_SECOND`, and before that a burst, in parts that are read as they arrive.
    `model_path` is `paced:TOKENS` of that burst. Requests count as running from the end of theirs on."""

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        self.ready = READY
        self._burst = int(config.model_path.partition(":")[2])
        self._channel = channel
        self._requests: list[int] = []
        self._left: dict[int, int] = {}
        self._tokens = 0

    def run(self) -> None:
        due = time.monotonic()
        steps = 0
        while True:
            for message in self._channel.receive(block=not self._requests):
                match message:
                    case NewRequest():
                        self._requests.append(message.id)
                        self._left[message.id] = self._burst - AT_ONCE
                        self._send([message.id], AT_ONCE, 0)
                    case AbortRequest():
                        self._requests.remove(message.id)
                        self._left.pop(message.id, None)
                    case Shutdown():
                        return
            steps += 1
            for name in list(self._left)[:2]:
                if self._left[name] > 0:
                    self._send([name], AT_ONCE, steps)
                self._left[name] -= AT_ONCE
                if self._left[name] <= 0:
                    del self._left[name]
            self._send(self._requests, 1, steps)
            due = max(due + 1 / TOKENS_PER_SECOND, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))

    def close(self) -> None:
        """Nothing to close."""

    def _send(self, ids: Sequence[int], tokens: int, first: int) -> None:
        if ids:
            self._channel.send(step_message(ids, tokens, first))
            self._tokens += tokens * len(ids)
            self._channel.send(SchedulerStats(generation_tokens=self._tokens, num_running=self._running))

    @property
    def _running(self) -> int:
        return len(self._requests) - len(self._left)


def load_paced(config: EngineConfig, channel: CoreChannel) -> PacedCore:
    return PacedCore(config, channel)


async def read_streams(port: int) -> None:
    """Another process: `STREAMS` clients that read and discard their streams until they are stopped."""
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(BODY)}\r\n\r\n"
    )

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + BODY)
        while await reader.read(1 << 20):
            pass

    await asyncio.gather(*(read() for _ in range(STREAMS)))


@contextlib.asynccontextmanager
async def over_sockets(context: ServerContext) -> AsyncGenerator[None, None]:
    """The server listens on the loopback, and another process reads its streams."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(http_config(context))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    readers = subprocess.Popen([sys.executable, __file__, "--read", str(listener.getsockname()[1])])
    try:
        yield
    finally:
        readers.kill()
        readers.wait()
        server.should_exit = True
        await serving
        listener.close()


@contextlib.asynccontextmanager
async def without_sockets(context: ServerContext) -> AsyncGenerator[None, None]:
    """The application is called in this process, and its events are dropped."""
    app = create_app(context)

    async def call() -> None:
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": BODY, "more_body": False})

        async def send(message: Message) -> None:
            """Accepts the message at once."""

        await app({**SCOPE, "path": PATH, "raw_path": PATH.encode()}, inbox.get, send)

    calls = [asyncio.create_task(call()) for _ in range(STREAMS)]
    try:
        yield
    finally:
        for task in calls:
            task.cancel()
        await asyncio.wait(calls)


async def measure_server(burst: int, seconds: float, *, sockets: bool) -> dict[str, float]:
    """The share of a core that this process uses while 64 streams run, and microseconds of it per token."""
    config = ServerConfig(model_path=f"paced:{burst}")
    client = await launch_core(config, in_process=False, load=load_paced, load_tokenizer=load_words)
    context = create_context(client, config)
    try:
        async with over_sockets(context) if sockets else without_sockets(context):
            while client.stats.num_running < STREAMS:
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)
            gc.collect()
            await asyncio.sleep(0.2)  # output delayed by the collection is read
            begin, cpu, tokens = time.perf_counter(), time.process_time(), client.stats.generation_tokens
            await asyncio.sleep(seconds)
            wall = time.perf_counter() - begin
            cpu, tokens = time.process_time() - cpu, client.stats.generation_tokens - tokens
            return {"share of a core": cpu / wall, "us per token": cpu / tokens * 1e6, "tokens/s": tokens / wall}
    finally:
        await client.close()


def table(what: str, times: list[list[float]], target: str) -> list[dict[str, Any]]:
    shortest = statistics.median(times[0])
    return [
        {
            "what": what,
            "output": length,
            "median us": statistics.median(found),
            "least us": min(found),
            "of shortest": statistics.median(found) / shortest,
            "target": target,
        }
        for length, found in zip(LENGTHS, times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the server is measured at each length")
    parser.add_argument("--read", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        asyncio.run(read_streams(arguments.read))
        return
    rows = table("completion, a token", measure_completions(), "<= 3 us, +-10 %")
    rows += table("put together, a token", measure_cumulative(), "<= 3 us, +-10 %")
    rows += table("Engine.generate, a token", measure_scripts(), "")
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        rows += table("engine client, a token", runner.run(measure_clients()), "")
        for sockets, what in ((False, "server without sockets"), (True, "server over sockets")):
            for length in LENGTHS[:2]:
                found = runner.run(measure_server(length, arguments.seconds, sockets=sockets))
                rows.append({"what": what, "output": length, **found, "target": "<= 0.15 of a core"})
    report("Host time of streamed tokens", rows, arguments.json)


if __name__ == "__main__":
    main()

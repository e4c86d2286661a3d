"""What a line costs the host: lines per second of offline batches over an engine that answers at once.

    python benchmarks/batch_driver.py [--lines N] [--profile] [--json FILE]

Three variants: `driver` reads, parses, orders and writes lines over an application that answers at once; `batch` has
the server's application over a client that answers at once, so it is the whole command without the engine; `ordered`
is the same with the output in the order of the input. Processor time gives the cost of a line on a machine with
other work. `--profile` lists where the time of `batch` goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import report
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory

from sglang_jax.batch.driver import Driver
from sglang_jax.batch.journal import Journal, Sink
from sglang_jax.batch.lines import Line
from sglang_jax.batch.ordered import OrderedJournal, Spool
from sglang_jax.batch.progress import Figures, RunProgress
from sglang_jax.batch.source import JsonLines
from sglang_jax.batch.work_queue import WorkQueue
from sglang_jax.config import ServerConfig
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.engine.types import FinishKind, FinishReason, GenerateInput, ModelInfo, Origin, OutputDelta
from sglang_jax.scheduler.messages import SchedulerStats
from sglang_jax.server.app import create_app, create_context

LOOKAHEAD = 4096
ROWS = 64

ANSWER = b"blue " * 40
MODEL = ModelInfo(
    model_path="instant",
    architecture="none",
    context_length=8192,
    vocab_size=260,
    eos_token_ids=(256,),
    bos_token_id=None,
    dtype="none",
)


class InstantTokenizer:
    """The part of a tokenizer that a chat needs."""

    longest_token = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    chat_template = ""

    def check_roles(self, roles: Any) -> None:
        """Accepts every role."""

    def marked(self, text: str) -> str:
        return text

    def render_chat(self, messages: Any, **more: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class InstantClient:
    """An engine client whose requests finish at once, with an output of 64 tokens."""

    tokenizer = InstantTokenizer()
    model_info = MODEL
    stats = SchedulerStats()
    alive = True
    max_running_requests = ROWS

    async def encode(self, text: str, origin: Origin, **more: Any) -> list[int]:
        return self.tokenizer.encode(text)

    async def generate(self, request: GenerateInput, origin: Origin) -> AsyncGenerator[OutputDelta, None]:
        await asyncio.sleep(0)
        text, ids = ANSWER.decode(), list(range(64))
        yield OutputDelta(
            index=0,
            text=text,
            token_ids=ids,
            prompt_tokens=len(request.prompt),
            completion_tokens=64,
            cached_tokens=0,
            finish=FinishReason(FinishKind.LENGTH),
        )


class InstantReplica:
    """A replica that always serves."""

    index = 0

    def __init__(self) -> None:
        self._client = InstantClient()

    async def serving(self) -> Any:
        return self._client


async def instant_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, without reading the request."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": INSTANT_BODY, "more_body": False})


INSTANT_BODY = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "choices": [{"index": 0, "text": ANSWER.decode(), "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}},
    },
    separators=(",", ":"),
).encode()


def write_lines(path: Path, count: int) -> None:
    """Chats of about 120 words in groups of ten with a shared system prompt, in random order."""
    with path.open("w") as file:
        for number in range(count):
            place = number * 7919 % count
            system = f"You are assistant {place // 10}. " + "Be kind and brief. " * 20
            question = f"What is the colour of thing number {place}?"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            body = {"model": "instant", "messages": messages, "max_tokens": 64}
            line = {"custom_id": f"request-{place}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run(input_file: Path, folder: Path, make_app: Callable[[Any], ASGIApp], *, ordered: bool) -> tuple[float, float]:
    """Seconds that all lines take, and seconds of processor time."""
    folder.mkdir()
    with closing(Journal(folder / "out.jsonl", folder / "errors.jsonl")) as journal:
        spool = Spool(folder, journal)
        sink: Sink = OrderedJournal(journal, spool) if ordered else journal
        source = JsonLines(input_file)
        window: Lookahead[Line] = Lookahead(LOOKAHEAD, 2**26)
        driver = Driver(
            source.records(sink.is_written),
            sink,
            WorkQueue(window, 3),
            RunProgress(Figures(), source, terminal=False),
            defaults={},
            random_seed=0,
            max_ahead=4 * LOOKAHEAD,
            make_app=make_app,
        )
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            runner.run(driver.run([InstantReplica()]))
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        assert not journal.num_errors
        spool.close()
    return seconds, cpu_seconds


def server_app(client: Any) -> ASGIApp:
    return create_app(create_context(client, ServerConfig(model_path="instant")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000, help="lines of the input")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, of which the best counts")
    parser.add_argument("--profile", action="store_true", help="list where the time of `batch` goes")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        input_file = folder / "in.jsonl"
        write_lines(input_file, arguments.lines)
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(run, input_file, folder / "profiled", server_app, ordered=False)
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            return
        rows = []
        ways = {
            "driver": (lambda client: instant_app, False),
            "batch": (server_app, False),
            "ordered": (server_app, True),
        }
        for way, (make_app, ordered) in ways.items():
            repeats = [
                run(input_file, folder / f"{way}-{repeat}", make_app, ordered=ordered)
                for repeat in range(arguments.repeats)
            ]
            lines = arguments.lines
            seconds, cpu_seconds = (min(taken) for taken in zip(*repeats, strict=True))
            per_line = {"us/line": seconds / lines * 1e6, "CPU us/line": cpu_seconds / lines * 1e6}
            rows.append({"way": way, "lines": lines, "lines/s": lines / seconds, **per_line})
        report("Offline batches over an engine that answers at once", rows, arguments.json)


if __name__ == "__main__":
    main()

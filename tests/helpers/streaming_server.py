"""A small HTTP server that streams made-up tokens on the three routes that `bench serving` measures."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCAB_SIZE = 500


@dataclass
class FakeServer:
    """The requests that the server got, and how it answers.

    `first_delay` and `step_delay` are seconds; `tokens_per_chunk` tokens are sent at once. With `fail_after`, requests
    beyond this number get status 503. With `tokenizes`, there is `/tokenize`, for which every letter is two tokens.
    """

    first_delay: float = 0.0
    step_delay: float = 0.0
    tokens_per_chunk: int = 1
    fail_after: int | None = None
    tokenizes: bool = False
    port: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path != "/flush_cache"]

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/model_info", self._model_info),
                Route("/flush_cache", self._flush_cache, methods=["POST"]),
                *([Route("/tokenize", self._tokenize, methods=["POST"])] if self.tokenizes else []),
                *(
                    Route(path, self._generate, methods=["POST"])
                    for path in ("/generate", "/v1/completions", "/v1/chat/completions")
                ),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"vocab_size": VOCAB_SIZE})

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"count": 2 * len((await request.json())["prompt"])})

    async def _flush_cache(self, request: Request) -> Response:
        self.calls.append(("/flush_cache", None))
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        if self.fail_after is not None and len(self.bodies) > self.fail_after:
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=503)
        return StreamingResponse(self._events(request.url.path, body), media_type="text/event-stream")

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        make = {"/generate": native_events}.get(path, openai_events)
        try:
            for number, event in enumerate(make(path, body, self.tokens_per_chunk)):
                await asyncio.sleep(self.step_delay if number else self.first_delay)
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self._now -= 1


def native_events(path: str, body: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
    """Cumulative text and ids, as `/generate` streams them."""
    total = body["sampling_params"]["max_new_tokens"]
    for tokens in [*range(step, total, step), total]:
        yield {
            "text": "a" * tokens,
            "output_ids": list(range(tokens)),
            "meta_info": {
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": tokens,
                "cached_tokens": 2,
                "finish_reason": {"type": "length"} if tokens == total else None,
            },
        }


def openai_events(path: str, body: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
    """Deltas, a finish without text, and usage in a separate chunk."""

    def choice(text: str, finish: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if "chat" in path else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish, **said}], "usage": None}

    total = body["max_tokens"]
    for start in range(0, total, step):
        yield choice("a" * min(step, total - start), None)
    yield choice("", "length")
    usage = {"prompt_tokens": 11, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 3}}
    yield {"choices": [], "usage": usage}


@contextmanager
def serve_in_thread(fake: FakeServer) -> Iterator[FakeServer]:
    """Runs the server on a free port for as long as the block lasts."""
    # uvicorn's own log config would close the handlers of other libraries, and with them pytest's capture.
    server = uvicorn.Server(uvicorn.Config(fake.application(), port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        fake.port = server.servers[0].sockets[0].getsockname()[1]
        yield fake
    finally:
        server.should_exit = True
        thread.join()

"""Answers a task's questions, by a running server's OpenAI routes or by an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2

from sglang_jax.cli.bench.load import KEY_REMEDIES, describe
from sglang_jax.cli.eval.task import Question, Reply, Task

if TYPE_CHECKING:
    from sglang_jax.engine.engine import Engine

OnDone = Callable[[], None]
"""Called after each reply."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are asked: as messages of a user (`chat`), or as text to continue."""

    chat: bool
    temperature: float
    max_new_tokens: int

    def prompt(self, question: Question) -> dict[str, Any]:
        """Returns the field that has the prompt, on OpenAI's routes and for the engine."""
        if self.chat:
            return {"messages": [{"role": "user", "content": question.prompt}]}
        return {"prompt": question.prompt}


async def ask_server(
    client: httpx2.AsyncClient, model: str, task: Task, asking: Asking, *, at_once: int, on_done: OnDone
) -> tuple[list[Reply], float]:
    """Returns the replies of a server in the order of the questions, and the seconds that they took together. At most
    `at_once` requests run at once. A failed request is a reply with an error."""
    replies = [Reply()] * len(task.questions)
    todo = iter(enumerate(task.questions))
    path = "/v1/chat/completions" if asking.chat else "/v1/completions"
    options = {"model": model, "temperature": asking.temperature, "max_tokens": asking.max_new_tokens}
    stop = {"stop": list(task.stop)} if task.stop else {}

    async def work() -> None:
        for place, question in todo:
            replies[place] = await _post(client, path, {**options, **stop, **asking.prompt(question)})
            on_done()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for _ in range(min(at_once, len(replies))):
            workers.create_task(work())
    return replies, time.perf_counter() - start


async def _post(client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]) -> Reply:
    try:
        response = await client.post(path, json=body)
        if response.is_error:
            remedy = KEY_REMEDIES.get(response.status_code, "")
            return Reply(error=f"status {response.status_code}: {response.text[:200]}{remedy}")
        answer = response.json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Reply(str(text or ""), int((answer.get("usage") or {}).get("completion_tokens") or 0))
    except httpx2.RequestError as error:
        return Reply(error=describe(error))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return Reply(error=f"the answer of {path} could not be read: {describe(error)}")


def ask_engine(engine: Engine, task: Task, asking: Asking, *, on_done: OnDone) -> tuple[list[Reply], float]:
    """Does the same as `ask_server`, with an engine, which chooses how many requests run at once."""
    replies = [Reply()] * len(task.questions)

    def items() -> Iterator[dict[str, Any]]:
        for question in task.questions:
            yield asking.prompt(question)

    sampling = {
        "temperature": asking.temperature,
        "max_new_tokens": asking.max_new_tokens,
        "stop": list(task.stop),
    }
    start = time.perf_counter()
    for result in engine.batch(items(), sampling):
        if result.error is None:
            output = result.outputs[0]
            replies[result.index] = Reply(output.text, output.completion_tokens)
        else:
            replies[result.index] = Reply(error=str(result.error))
        on_done()
    return replies, time.perf_counter() - start

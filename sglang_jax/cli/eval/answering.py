"""Answers a task's questions, by a running server's OpenAI routes or by an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2

from sglang_jax.cli.eval.task import Question, Reply, Task
from sglang_jax.cli.server_client import (
    ChatCompletion,
    Completion,
    ProtocolError,
    describe,
    failure,
    read_answer,
)
from sglang_jax.engine.types import FinishKind

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
        if not response.is_success:
            return Reply(error=f"status {failure(response)}")
        answer: ChatCompletion | Completion
        if "messages" in body:
            answer = read_answer(ChatCompletion, response.content, path)
        else:
            answer = read_answer(Completion, response.content, path)
    except httpx2.RequestError as error:
        return Reply(error=describe(error))
    except ProtocolError as error:
        return Reply(error=error.message)
    if not answer.choices:
        return Reply(error=f"the answer of {path} has no choices")
    choice = answer.choices[0]
    tokens = answer.usage.completion_tokens if answer.usage else None
    return Reply(choice.said, tokens or 0, cut=choice.finish_reason == FinishKind.LENGTH)


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
            cut = output.finish is not None and output.finish.kind is FinishKind.LENGTH
            replies[result.index] = Reply(output.text, output.completion_tokens, cut=cut)
        else:
            replies[result.index] = Reply(error=str(result.error))
        on_done()
    return replies, time.perf_counter() - start

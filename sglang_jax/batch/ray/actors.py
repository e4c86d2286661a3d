"""The actors of `map_batches`: each has an engine, takes rows, and gives them back with their answers. How often a
batch was begun is counted where no killed actor or node loses it."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import msgspec
import pyarrow as pa
import ray
from msgspec import Raw
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sglang_jax import logs
from sglang_jax.batch.answers import Answer, failed
from sglang_jax.batch.journal import Kind
from sglang_jax.batch.lines import MAX_LINE_BYTES, BadLine, Line, parse_defaults, parse_line
from sglang_jax.batch.parquet import first_text, row_as_json
from sglang_jax.batch.ray.engine import Asking, Launch, LineEngine, LocalEngine
from sglang_jax.batch.ray.files import ANSWERS, LINE_BITS
from sglang_jax.batch.ray.nodes import GroupPlacement, MultiNodeEngine
from sglang_jax.config import ServerConfig
from sglang_jax.engine.launch import launch_engine
from sglang_jax.errors import EngineDeadError

logger = logging.getLogger(__name__)

MOST_STARTS = 5
"""How often in a row an actor may be lost while its engine starts. Ray would start it again for ever."""

REQUEST_COLUMNS = ("custom_id", "method", "url", "body", "prompt", "messages")
"""Columns that make a request of a row: those of a line of the input format."""

ANSWER_COLUMNS = pa.schema(
    [
        ("answer", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("response", pa.string()),
        ("error_code", pa.string()),
        ("error", pa.string()),
    ]
)
"""What `AnswerRows` adds to a row. `answer` is the first completion's text, `response` the whole response as JSON; both
are null for a row that failed, whose `error_code` and `error` say why."""


class AttemptBook:
    """Work that was begun and not finished, with how often. It holds no more than what is under way."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()
        self._finished = 0

    def begin(self, key: str) -> int:
        """A piece of work is begun; for which time, from 1."""
        self._begun[key] += 1
        return self._begun[key]

    def finish(self, key: str) -> None:
        """It is done. If its answers are lost later, with the node that holds them, it counts as new. It may be done
        twice: by an actor on a node that was only thought lost, and by its successor."""
        self._begun.pop(key, None)
        self._finished += 1

    def under_way(self) -> int:
        """How much is begun and not finished."""
        return len(self._begun)

    def finished(self) -> int:
        """How much is done."""
        return self._finished


class Attempts(Protocol):
    """Counts how often work was begun."""

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """Around the work: for which time it is begun, from 1. Left by an error, it stays begun."""
        ...


class SharedAttempts:
    """Counts for all actors of a job, in an actor on the node of whoever makes this: the driver's, without which there
    is no job. It lives as long as somebody holds this."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._book: ActorHandle = ray.remote(AttemptBook).options(num_cpus=0, scheduling_strategy=here).remote()

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """See `Attempts`."""
        yield ray.get(self._book.begin.remote(key))
        ray.get(self._book.finish.remote(key))

    def finished(self) -> int:
        """See `AttemptBook`."""
        number: int = ray.get(self._book.finished.remote())
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How rows are answered: what an actor is made with.

    - `config`: the engine's options; it is made in the actor, on the actor's devices.
    - `asking`: how rows are asked. Its `max_retries` is also how often a batch is begun again after its actor or its
      node was lost. Then it fails.
    - `defaults`: a JSON object of body fields for rows that leave them out.
    - `launch`: starts the engine; for tests and other cores.
    - `group`: where an engine over several nodes is placed; `answer_rows` sees to it.
    """

    config: ServerConfig
    asking: Asking = field(default_factory=Asking)
    defaults: str | None = None
    launch: Launch = launch_engine
    group: GroupPlacement | None = None


class _InferenceActor:
    """What both actors have: an engine, and a limit to how often a batch may cost an actor its life."""

    def __init__(self, answering: Answering, attempts: Attempts) -> None:
        logs.configure(answering.config.log_level.upper())
        self.defaults: Mapping[str, Raw] = {} if answering.defaults is None else parse_defaults(answering.defaults)
        self._max_retries = answering.asking.max_retries
        self._attempts = attempts
        this = ray.get_runtime_context().get_actor_id()
        with attempts.of(f"start of {this}") as attempt:
            if attempt > MOST_STARTS:
                raise EngineDeadError(f"the actor or a node was lost each of the {MOST_STARTS} times an engine started")
            self._engine = _start_engine(answering)

    def answer(self, lines: Sequence[Line | BadLine], key: bytes) -> list[Answer]:
        """The answers of a batch, in order. `key` tells it from other batches of the same task."""
        task = ray.get_runtime_context().get_task_id()
        with self._attempts.of(f"{task}-{hashlib.sha256(key).hexdigest()}") as attempt:
            if attempt > 1:
                logger.warning("Starting a batch of %d rows for the %dth time", len(lines), attempt)
            if attempt > self._max_retries + 1:
                message = f"the actor or its node was lost each of the {attempt - 1} times that this batch was started"
                return [failed(line, "replica_lost", message) for line in lines]
            with _leaving_without_engine():
                return self._engine.answer(lines)


def _start_engine(answering: Answering) -> LineEngine:
    if answering.group is None:
        return LocalEngine(answering.config, answering.asking, launch=answering.launch)
    try:
        return MultiNodeEngine(answering.config, answering.asking, answering.launch, answering.group)
    except RayActorError as error:
        _leave(f"a node was lost while the engine started: {error}")


@contextmanager
def _leaving_without_engine() -> Iterator[None]:
    """An actor whose engine cannot be started again is of no use: it ends."""
    try:
        yield
    except EngineDeadError as error:
        _leave(f"its engine is given up: {error}")


def _leave(reason: str) -> NoReturn:
    """Ends this process, so that Ray starts the actor again, which may be elsewhere, and gives it the rows. Leaving
    through Ray would be for good, and an error would end the job."""
    logger.critical("Ending this actor: %s", reason)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


class AnswerLines:
    """Rows of `RequestFiles` to rows of `AnswerFiles`.

    **Arguments:** `files`: names of the files, by number: of several, they stand before the default of `custom_id`.
    """

    def __init__(self, answering: Answering, attempts: Attempts, files: Sequence[str]) -> None:
        self._files = files
        self._random_seed = answering.config.random_seed
        self._engine = _InferenceActor(answering, attempts)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """`ROWS` to `ANSWERS`."""
        numbers = rows["number"].to_pylist()
        lines = [self._parse(number, raw) for number, raw in zip(numbers, rows["raw"].to_pylist(), strict=True)]
        answers = self._engine.answer(lines, repr(numbers).encode())
        return pa.table(
            [
                numbers,
                [answer.kind is Kind.ERROR for answer in answers],
                [answer.tokens.prompt for answer in answers],
                [answer.tokens.output for answer in answers],
                [answer.line for answer in answers],
            ],
            schema=ANSWERS,
        )

    def _parse(self, number: int, raw: bytes | None) -> Line | BadLine:
        if raw is None:
            message = f"a line may have at most {MAX_LINE_BYTES} bytes, this one has more"
            return BadLine(number, None, "line_too_long", message)
        return parse_line(number, raw, self._engine.defaults, self._name(number), self._random_seed)

    def _name(self, number: int) -> str:
        file, line = number >> LINE_BITS, number & ((1 << LINE_BITS) - 1)
        return f"line-{line + 1}" if len(self._files) == 1 else f"{self._files[file]}:line-{line + 1}"


class AnswerRows:
    """Rows with `REQUEST_COLUMNS`, as many of them as a line of the input format needs, to the same rows with
    `ANSWER_COLUMNS`. For `Dataset.map_batches`, with `batch_format="pyarrow"`; `answer_rows` does it all.

    **Arguments:** `columns`: further columns that are fields of a plain row's body, such as `max_tokens`.
    """

    def __init__(self, answering: Answering, attempts: Attempts, columns: Sequence[str] = ()) -> None:
        self._columns = {*REQUEST_COLUMNS, *columns}
        self._numbers = itertools.count()
        self._engine = _InferenceActor(answering, attempts)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Answers a batch of rows. Columns that are there already by the name of one that is added are replaced."""
        raws = [self._request(row) for row in rows.to_pylist(maps_as_pydicts="strict")]
        lines = [parse_line(next(self._numbers), raw, self._engine.defaults) for raw in raws]
        answers = [_columns_of(answer) for answer in self._engine.answer(lines, b"\n".join(raws))]
        kept = rows.drop_columns([name for name in rows.column_names if name in ANSWER_COLUMNS.names])
        added = pa.Table.from_pylist(answers, schema=ANSWER_COLUMNS)
        for name in ANSWER_COLUMNS.names:
            kept = kept.append_column(ANSWER_COLUMNS.field(name), added[name])
        return kept

    def _request(self, row: dict[str, Any]) -> bytes:
        return row_as_json({name: value for name, value in row.items() if name in self._columns})


class _Response(msgspec.Struct):
    body: Raw


class _ErrorObject(msgspec.Struct):
    code: str | None
    message: str


class _OutputLine(msgspec.Struct):
    response: _Response | None
    error: _ErrorObject | None


_output_line = msgspec.json.Decoder(_OutputLine)


def _columns_of(answer: Answer) -> dict[str, Any]:
    output = _output_line.decode(answer.line)
    if output.error is not None:
        return {"error_code": output.error.code, "error": output.error.message}
    assert output.response is not None
    body = bytes(output.response.body)
    return {
        "answer": first_text(body),
        "prompt_tokens": answer.tokens.prompt,
        "output_tokens": answer.tokens.output,
        "response": body.decode(),
    }

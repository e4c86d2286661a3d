"""The actors of `map_batches`: each has an engine, and adds answers to rows. Attempts are counted in a separate actor,
which survives the loss of other actors and nodes."""

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
from sglang_jax.batch.answers import Answer, error_answer
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

MAX_STARTS = 5
"""Maximum consecutive losses of an actor while its engine starts. Ray itself would restart it without limit."""

REQUEST_COLUMNS = ("custom_id", "method", "url", "body", "prompt", "messages")
"""Columns that form a request: the fields of a line of the input format."""

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
"""Columns that `AnswerRows` adds. `answer` is the first completion's text, `response` the whole response as JSON; both
are null for a failed row, whose `error_code` and `error` have the reason."""


class AttemptBook:
    """Counts the starts of unfinished work. Its size is bounded by the work in progress."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._finished = 0

    def begin(self, key: str) -> int:
        """Notes that work starts. Returns how often it has started, from 1."""
        self._started[key] += 1
        return self._started[key]

    def finish(self, key: str) -> None:
        """Notes that work is finished. If its answers are lost later, with their node, it counts as new. Work may
        finish twice: by an actor on a node that was wrongly considered lost, and by its successor."""
        self._started.pop(key, None)
        self._finished += 1

    def num_unfinished(self) -> int:
        """Number of started, unfinished pieces of work."""
        return len(self._started)

    def finished(self) -> int:
        """Number of finished pieces of work."""
        return self._finished


class Attempts(Protocol):
    """Counts the starts of work."""

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """Wraps a piece of work. Yields how often it has started, from 1. After an error, it stays unfinished."""
        ...


class SharedAttempts:
    """Counts for all actors of a job, in an actor on the node of its creator. That is the driver's node, without which
    the job ends. The actor lives as long as it is referenced."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._book: ActorHandle = ray.remote(AttemptBook).options(num_cpus=0, scheduling_strategy=here).remote()

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """See `Attempts`."""
        yield ray.get(self._book.begin.remote(key))
        ray.get(self._book.finish.remote(key))

    def finished(self) -> int:
        """See `AttemptBook.finished`."""
        number: int = ray.get(self._book.finished.remote())
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How an actor answers rows.

    - `config`: the engine's options; the engine is created in the actor, on the actor's devices.
    - `asking`: how lines are sent to the engine. Its `max_retries` also limits the restarts of a batch after its actor
      or node was lost; then the batch fails.
    - `defaults`: a JSON object of body fields for rows that leave them out.
    - `launch`: starts the engine; for tests and other cores.
    - `group`: placement of an engine over several nodes; set by `answer_rows`.
    """

    config: ServerConfig
    asking: Asking = field(default_factory=Asking)
    defaults: str | None = None
    launch: Launch = launch_engine
    group: GroupPlacement | None = None


class _InferenceActor:
    """The common part of both actors: an engine, and a limit on how many actors one batch may kill."""

    def __init__(self, answering: Answering, attempts: Attempts) -> None:
        logs.configure(answering.config.log_level.upper())
        self.defaults: Mapping[str, Raw] = {} if answering.defaults is None else parse_defaults(answering.defaults)
        self._max_retries = answering.asking.max_retries
        self._attempts = attempts
        this = ray.get_runtime_context().get_actor_id()
        with attempts.of(f"start of {this}") as attempt:
            if attempt > MAX_STARTS:
                raise EngineDeadError(f"the actor or a node was lost each of the {MAX_STARTS} times an engine started")
            self._engine = _start_engine(answering)

    def answer(self, lines: Sequence[Line | BadLine], key: bytes) -> list[Answer]:
        """Returns the answers of a batch, in order. `key` distinguishes it from other batches of the same task."""
        task = ray.get_runtime_context().get_task_id()
        with self._attempts.of(f"{task}-{hashlib.sha256(key).hexdigest()}") as attempt:
            if attempt > 1:
                logger.warning("Starting a batch of %d rows for the %dth time", len(lines), attempt)
            if attempt > self._max_retries + 1:
                message = f"the actor or its node was lost each of the {attempt - 1} times that this batch was started"
                return [error_answer(line, "replica_lost", message) for line in lines]
            with _exit_without_engine():
                return self._engine.answer(lines)


def _start_engine(answering: Answering) -> LineEngine:
    if answering.group is None:
        return LocalEngine(answering.config, answering.asking, launch=answering.launch)
    try:
        return MultiNodeEngine(answering.config, answering.asking, answering.launch, answering.group)
    except RayActorError as error:
        _exit_process(f"a node was lost while the engine started: {error}")


@contextmanager
def _exit_without_engine() -> Iterator[None]:
    """Ends the actor if its engine cannot be restarted."""
    try:
        yield
    except EngineDeadError as error:
        _exit_process(f"its engine is given up: {error}")


def _exit_process(reason: str) -> NoReturn:
    """Ends this process, so that Ray restarts the actor, maybe elsewhere, and retries its rows. Exiting through Ray
    would end the actor permanently, and an error would end the job."""
    logger.critical("Ending this actor: %s", reason)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


class AnswerLines:
    """Converts rows of `RequestFiles` to rows of `AnswerFiles`. `files`: names of the files, by number. If there are
    several, they prefix the default `custom_id`."""

    def __init__(self, answering: Answering, attempts: Attempts, files: Sequence[str]) -> None:
        self._files = files
        self._random_seed = answering.config.random_seed
        self._engine = _InferenceActor(answering, attempts)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Converts a table of `ROWS` to one of `ANSWERS`."""
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
    """Adds `ANSWER_COLUMNS` to rows that have the `REQUEST_COLUMNS` of a line of the input format. For
    `Dataset.map_batches`, with `batch_format="pyarrow"`; `answer_rows` calls that. `columns`: further columns that are
    fields of a plain row's body, such as `max_tokens`."""

    def __init__(self, answering: Answering, attempts: Attempts, columns: Sequence[str] = ()) -> None:
        self._columns = {*REQUEST_COLUMNS, *columns}
        self._numbers = itertools.count()
        self._engine = _InferenceActor(answering, attempts)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Answers a batch of rows. Replaces existing columns that have the name of an added one."""
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

"""The control commands of an engine, and the rules by which several replicas execute them.

To add a command: write its message and its rule here, execute it in `SchedulerLoop._execute`, and give it a route in
`server/control.py`. All between these passes commands on and knows none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Union

import msgspec

from sglang_jax.errors import ReplicaLostError, RequestError, SessionNotFoundError, quote
from sglang_jax.scheduler.messages import Command, OneWay, Reply, Result, Result_co

logger = logging.getLogger(__name__)

STATE_SECONDS = 10.0
"""Seconds that a replica may take to report its figures, which it does between two steps."""

Figures = list[dict[str, object]]


class SessionCommand(Command[Result_co], frozen=True):
    """A command about the session `id` of `owner`, the only one who may use it."""

    id: str
    owner: str


class OpenSession(SessionCommand[str], tag="open_session", frozen=True):
    """Returns the session's id, a new one if `id` is empty. `streaming`: a turn need not name the turn that it follows;
    `timeout`: seconds without a turn after which the session is closed, None for the engine's default. Raises
    `SessionLimitError`, `ParameterError`."""

    streaming: bool = False
    timeout: float | None = None

    def read(self, reply: Reply) -> str:
        return self.id


class CloseSession(SessionCommand[None], tag="close_session", frozen=True):
    """A running turn continues to its end. Raises `SessionNotFoundError`."""

    def read(self, reply: Reply) -> None:
        return None


class FlushCache(Command[bool], tag="flush", frozen=True):
    """Empties the prefix cache. Returns False, with nothing changed, while requests run or wait."""

    def read(self, reply: Reply) -> bool:
        if not reply.ok:
            logger.info("The prefix cache was not cleared: %s", reply.message)
        return reply.ok


class PauseMode(StrEnum):
    """What a pause does with requests.

    - `ABORT`: they end with the text so far.
    - `RETRACT`: running ones return to the queue and give back their memory; later, their tokens are computed again.
    - `IN_PLACE`: running ones keep their rows and their KV.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class PauseGeneration(Command[None], tag="pause", frozen=True):
    """Makes no more steps until `ContinueGeneration`, or until the engine is drained. New requests wait in the
    queue."""

    mode: PauseMode = PauseMode.ABORT

    def read(self, reply: Reply) -> None:
        return None


class ContinueGeneration(Command[None], tag="continue", frozen=True):
    """Ends a pause; does nothing without one."""

    def read(self, reply: Reply) -> None:
        return None


class UpdateWeights(Command[int], tag="update_weights", frozen=True):
    """Replaces the weights by those of another checkpoint of the same architecture. Requests wait meanwhile, or are
    aborted first (`abort_all`). With `flush_cache`, the prefix cache is emptied and running requests are retracted, so
    that no KV of the old weights is used. `weight_version`: the name of the new ones; None keeps the old name. Returns
    the number of requests that wait. Raises `ParameterError` if the checkpoint does not fit; the old weights then
    stay."""

    model_path: str
    abort_all: bool = False
    flush_cache: bool = True
    weight_version: str | None = None

    def read(self, reply: Reply) -> int:
        return int(reply.message)


class NameWeights(Command[None], tag="name_weights", frozen=True):
    """Gives the weights another name (`weight_version`). Nothing else changes."""

    weight_version: str

    def read(self, reply: Reply) -> None:
        return None


class MemoryTag(StrEnum):
    """A part of the device's memory that an engine can give back."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_MEMORY = frozenset(MemoryTag)


class ReleaseMemory(Command[None], tag="release", frozen=True):
    """Frees device memory; requests are refused until `ResumeMemory`. The prefix cache is emptied with its memory.
    Raises `RequestError` while requests run or wait, and if the engine cannot do it."""

    tags: frozenset[MemoryTag] = ALL_MEMORY

    def read(self, reply: Reply) -> None:
        return None


class ResumeMemory(Command[None], tag="resume", frozen=True):
    """Allocates released memory again: the last weights, and an empty KV cache. Parts that are not released are
    ignored. Raises `ParameterError` if the weights cannot be read."""

    tags: frozenset[MemoryTag] = ALL_MEMORY

    def read(self, reply: Reply) -> None:
        return None


class GetState(Command[Figures], tag="state", frozen=True):
    """Returns the figures of each replica's scheduler and runner, for `/server_info`."""

    def read(self, reply: Reply) -> Figures:
        return [dict(reply.state)]


class GetCacheReport(Command[Figures], tag="cache_report", frozen=True):
    """Returns a `CacheReport` of each serving replica, with the replica's number."""

    def read(self, reply: Reply) -> Figures:
        return [{"replica": 0, **msgspec.json.decode(reply.report)}]


class GetCacheSummary(Command[Figures], tag="cache_summary", frozen=True):
    """Returns a `CacheSummary` of each serving replica, with the replica's number. It is cheap enough to be polled."""

    def read(self, reply: Reply) -> Figures:
        return [{"replica": 0, **msgspec.json.decode(reply.report)}]


class StartProfile(Command[list[str]], tag="start_profile", frozen=True):
    """Records a profile of the runner into a folder, for `steps` steps or until `StopProfile` (None). Returns the
    folders, one per replica; a server behind this one has its own. Raises `ParameterError` during a recording, or for a
    folder that cannot be written."""

    folder: str
    steps: int | None = None

    def read(self, reply: Reply) -> list[str]:
        return [reply.message]

    def for_replica(self, index: int) -> StartProfile:
        return msgspec.structs.replace(self, folder=f"{self.folder}/replica-{index}")


class StopProfile(Command[list[str]], tag="stop_profile", frozen=True):
    """Ends the recording. Returns the folders once written. Raises `ParameterError` if there is no recording."""

    def read(self, reply: Reply) -> list[str]:
        return [reply.message]


@dataclass(frozen=True, slots=True)
class OfSession(Generic[Result]):
    """Only the replica of the session gets the command. `lost`: the error if it is down, from the session's id."""

    lost: Callable[[str], RequestError]


@dataclass(frozen=True, slots=True)
class Each(Generic[Result]):
    """Each serving replica executes the command, whatever the others do. An error of one is raised.

    - `merge`: returns the result of all, from the results by number of the replica.
    - `absent`: stands for the result of a replica that does not serve, is lost, or does not answer within `seconds`;
      from its state and error, which may be empty. None: only serving replicas are asked, without a time limit.
    - `while_busy`: the result while the front end has requests, and then no replica is asked; None: they are.
    - `empties_cache`: a replica with a true result has no prefixes any more.
    """

    merge: Callable[[Mapping[int, Result]], Result]
    absent: Callable[[str, str], Result] | None = None
    seconds: float | None = None
    while_busy: Result | None = None
    empties_cache: bool = False


@dataclass(frozen=True, slots=True)
class AllOrNone(Generic[Result]):
    """All serving replicas execute the command, at least one. If one fails, its error is raised, and the others get
    `undo`. `merge`: see `Each`; `others`: says in the error what became of the others, from their merged result."""

    merge: Callable[[Mapping[int, Result]], Result]
    others: Callable[[Result], str]
    undo: Command[Any] | None = None


Rule = OfSession[Result] | Each[Result] | AllOrNone[Result]


def inbound_types() -> Any:
    """The union of all messages to the engine, for their decoder."""
    return Union[(OneWay, *COMMANDS)]


def _entry(kind: type[Command[Result]], rule: Rule[Result]) -> tuple[type[Command[Any]], Rule[Any]]:
    return kind, rule


def _nothing(results: Mapping[int, None]) -> None:
    return None


def _lists(results: Mapping[int, list[str]]) -> list[str]:
    return [one for result in results.values() for one in result]


def _numbered(results: Mapping[int, Figures]) -> Figures:
    return [report | {"replica": index} for index, reports in results.items() for report in reports]


def _states(results: Mapping[int, Figures]) -> Figures:
    return [
        {"replica": index, "replica_state": "serving"} | figures for index, each in results.items() for figures in each
    ]


def _absent_state(state: str, error: str) -> Figures:
    known: dict[str, object] = {"replica_state": state, "error": error}
    return [{name: value for name, value in known.items() if value}]


COMMANDS: dict[type[Command[Any]], Rule[Any]] = dict(
    [
        _entry(
            OpenSession,
            OfSession(
                lambda session: ReplicaLostError(
                    f"session {quote(session)} belongs to a replica that is down; try again later, or open a session "
                    "without an id"
                )
            ),
        ),
        _entry(
            CloseSession,
            OfSession(
                lambda session: SessionNotFoundError(
                    f"there is no session {quote(session)}: its replica is down", param="session_id"
                )
            ),
        ),
        _entry(FlushCache, Each(lambda done: all(done.values()), while_busy=False, empties_cache=True)),
        _entry(PauseGeneration, Each(_nothing)),
        _entry(ContinueGeneration, Each(_nothing)),
        _entry(
            UpdateWeights,
            AllOrNone(
                lambda waiting: sum(waiting.values()),
                lambda _: "replicas that had no error have the new weights: fix the error and update again",
            ),
        ),
        _entry(NameWeights, AllOrNone(_nothing, lambda _: "replicas that had no error have the new name: try again")),
        _entry(ReleaseMemory, AllOrNone(_nothing, lambda _: "the others have resumed all", undo=ResumeMemory())),
        _entry(ResumeMemory, Each(_nothing)),
        _entry(GetState, Each(_states, absent=_absent_state, seconds=STATE_SECONDS)),
        _entry(GetCacheReport, Each(_numbered)),
        _entry(GetCacheSummary, Each(_numbered)),
        _entry(StartProfile, AllOrNone(_lists, lambda _: "no replica is recording", undo=StopProfile())),
        _entry(
            StopProfile,
            AllOrNone(
                _lists, lambda written: f"others wrote {', '.join(written)}" if written else "the others wrote none"
            ),
        ),
    ]
)
"""All control commands, and the rule of each."""

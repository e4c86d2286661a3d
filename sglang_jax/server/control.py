"""Routes of the engine's control commands, and how a router calls those of the servers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends
from pydantic import Field

from sglang_jax.config import WeightVersion
from sglang_jax.errors import ParameterError, RequestError, cut
from sglang_jax.scheduler import commands
from sglang_jax.scheduler.commands import MemoryTag, PauseMode
from sglang_jax.scheduler.messages import Command, Result
from sglang_jax.server.callers import require_admin
from sglang_jax.server.context import ServerContext
from sglang_jax.server.fields import Body, ShortText
from sglang_jax.server.json_body import JsonRoute

MAX_PROFILED_STEPS = 10_000
"""Maximum steps of one profile, which is held in memory until it is written."""

PROFILE_SECONDS = 600.0
"""Seconds that another server may take to start or write a profile: one of many steps has hundreds of megabytes."""

WEIGHTS_SECONDS = 3600.0
"""Seconds that another server may take to load other weights."""

MAX_PATH_CHARACTERS = 4096

OPERATORS_ONLY = [Depends(require_admin)]

CommandT = TypeVar("CommandT", bound=Command[Any])


class CacheBusyError(RequestError):
    """The prefix cache cannot be emptied while requests run or wait."""

    code = "engine_busy"


class AbortBody(Body):
    """`POST /abort_request`."""

    rid: ShortText | None = None
    abort_all: bool | None = None


class DrainBody(Body):
    """`POST /drain_replica`. Without a number all replicas are drained, one after the other."""

    replica: int | None = None


class ProfileBody(Body):
    """`POST /start_profile`. `num_steps`: the profile ends by itself after this many steps. `output_dir`: a folder in
    `--profile-dir`."""

    num_steps: int | None = Field(None, ge=1, le=MAX_PROFILED_STEPS)
    output_dir: str | None = None


class PauseBody(Body):
    """`POST /pause_generation`."""

    mode: PauseMode = Field(PauseMode.ABORT, strict=False)


class ContinueBody(Body):
    """`POST /continue_generation`. `torch_empty_cache`: ignored, because no memory is kept that it could free."""

    torch_empty_cache: bool | None = None


class MemoryBody(Body):
    """`POST /release_memory_occupation` and `/resume_memory_occupation`. `tags`: the parts; None: all."""

    tags: list[Annotated[MemoryTag, Field(strict=False)]] | None = Field(None, min_length=1, max_length=8)

    @property
    def asked(self) -> frozenset[MemoryTag]:
        return commands.ALL_MEMORY if self.tags is None else frozenset(self.tags)


class UpdateWeightsBody(Body):
    """`POST /update_weights_from_disk`. `model_path`: like `--model-path`; `weight_version`: like
    `--weight-version`, by default as before. `torch_empty_cache`, `token_step`: ignored, because they cannot change an
    output."""

    model_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    weight_version: WeightVersion | None = None
    torch_empty_cache: bool | None = None
    token_step: int | None = None


class NameWeightsBody(Body):
    """`POST /update_weight_version`. `new_version`: like `--weight-version`."""

    new_version: WeightVersion
    abort_all_requests: bool | None = None


def control_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.get("/flush_cache", dependencies=OPERATORS_ONLY)
    @router.post("/flush_cache", dependencies=OPERATORS_ONLY)
    @router.post("/reset_prefix_cache", dependencies=OPERATORS_ONLY)
    async def flush_cache() -> dict[str, object]:
        """Empties the prefix cache. While requests are running or queued it does nothing and returns 400."""
        if not await context.client.call(commands.FlushCache()):
            raise CacheBusyError(
                "the prefix cache cannot be cleared while requests are running or queued; try again when the server "
                "is idle"
            )
        return {"success": True, "message": "the prefix cache is empty"}

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> dict[str, object]:
        """Aborts the request with this id, or all requests (operators only). Unknown ids, and those of other keys, are
        ignored."""
        if body.abort_all:
            await require_admin()
            context.client.abort_all()
        elif body.rid:
            context.abort(body.rid)
        else:
            raise ParameterError("one of rid and abort_all must be given", param="rid")
        return {"success": True}

    @router.post("/pause_generation", dependencies=OPERATORS_ONLY)
    async def pause_generation(body: PauseBody | None = None) -> dict[str, object]:
        """Stops all steps until `/continue_generation`; new requests wait in the queue. `mode` says what becomes of
        the others: abort, retract, or in_place."""
        await context.client.call(commands.PauseGeneration((body or PauseBody()).mode))
        return {"message": "Generation paused successfully.", "status": "ok"}

    @router.post("/continue_generation", dependencies=OPERATORS_ONLY)
    async def continue_generation(body: ContinueBody | None = None) -> dict[str, object]:
        """Ends a pause."""
        await context.client.call(commands.ContinueGeneration())
        return {"message": "Generation continued successfully.", "status": "ok"}

    @router.post("/release_memory_occupation", dependencies=OPERATORS_ONLY)
    async def release_memory_occupation(body: MemoryBody | None = None) -> dict[str, object]:
        """Frees the device memory of weights and KV cache on all replicas. Requests get 503 until it is resumed."""
        command = commands.ReleaseMemory((body or MemoryBody()).asked)
        await asyncio.shield(context.client.call(command))
        return {"success": True}

    @router.post("/resume_memory_occupation", dependencies=OPERATORS_ONLY)
    async def resume_memory_occupation(body: MemoryBody | None = None) -> dict[str, object]:
        """Allocates released memory again, and reads the weights again."""
        command = commands.ResumeMemory((body or MemoryBody()).asked)
        await asyncio.shield(context.client.call(command))
        return {"success": True}

    @router.post("/update_weights_from_disk", dependencies=OPERATORS_ONLY)
    async def update_weights_from_disk(body: UpdateWeightsBody) -> dict[str, object]:
        """Replaces the weights on all replicas by those of another checkpoint of the same architecture. Continues if
        the client disconnects."""
        command = commands.UpdateWeights(
            body.model_path, body.abort_all_requests is True, body.flush_cache is not False, body.weight_version
        )
        waiting = await asyncio.shield(context.client.call(command))
        message = f"the weights are now those of {body.model_path}"
        return {"success": True, "message": message, "num_paused_requests": waiting}

    @router.post("/update_weight_version", dependencies=OPERATORS_ONLY)
    async def update_weight_version(body: NameWeightsBody) -> dict[str, object]:
        """Gives the weights another name on all replicas, without loading any."""
        if body.abort_all_requests:
            context.client.abort_all()
        await asyncio.shield(context.client.call(commands.NameWeights(body.new_version)))
        message = f"the weights are now named {body.new_version}"
        return {"success": True, "message": message, "new_version": body.new_version}

    @router.post("/start_profile", dependencies=OPERATORS_ONLY)
    async def start_profile(body: ProfileBody | None = None) -> dict[str, object]:
        """Starts a profile of each replica in `--profile-dir`, for `num_steps` steps or until `/stop_profile`."""
        asked = body or ProfileBody()
        folder = profile_folder(context.config.profile_dir, asked.output_dir)
        return {"success": True, "folders": await context.client.call(commands.StartProfile(folder, asked.num_steps))}

    @router.post("/stop_profile", dependencies=OPERATORS_ONLY)
    async def stop_profile() -> dict[str, object]:
        """Stops the profile; returns once it is written."""
        return {"success": True, "folders": await context.client.call(commands.StopProfile())}

    @router.post("/drain_replica", dependencies=OPERATORS_ONLY)
    async def drain_replica(body: DrainBody) -> dict[str, object]:
        """Drains a replica (for `--drain-timeout` at most) and restarts it, or all of them in turn; returns when they
        serve again. Continues if the client disconnects."""
        await asyncio.shield(context.client.drain(body.replica, context.config.drain_timeout))
        return {"success": True}

    return router


def profile_folder(root: str | None, within: str | None) -> str:
    """Returns the folder `within` the `root`. Raises `ParameterError` without `root`, and if the folder is outside."""
    if root is None:
        raise ParameterError("profiling is off: start the server with --profile-dir FOLDER", param="output_dir")
    if within is None:
        return root
    parts = PurePosixPath(within).parts
    if not parts or within.startswith("/") or ".." in parts or "\0" in within:
        raise ParameterError(
            f"output_dir must be a folder inside --profile-dir, such as run-1, got {cut(within)!r}", param="output_dir"
        )
    return f"{root.rstrip('/')}/{'/'.join(parts)}"


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[CommandT, Result]):
    """How a command is sent to another server.

    - `read`: returns the result, from the answer's JSON and the server's address.
    - `otherwise`: the result if the server refuses; None: its error.
    - `seconds`: how long the server may take; None: as long as for requests that do not use the model.
    """

    path: str
    read: Callable[[Any, str], Result]
    body: Callable[[CommandT], dict[str, object] | None] = lambda _: None
    method: str = "POST"
    otherwise: Result | None = None
    seconds: float | None = None


def _entry(kind: type[CommandT], call: RemoteCall[CommandT, Result]) -> tuple[type[Command[Any]], RemoteCall[Any, Any]]:
    return kind, call


def _open_body(command: commands.OpenSession) -> dict[str, object]:
    return {
        "capacity_of_str_len": 0,
        "session_id": command.id,
        "streaming": command.streaming,
        "timeout": command.timeout,
    }


def _profile_body(command: commands.StartProfile) -> dict[str, object]:
    """Without the folder: the other server has its own."""
    return {} if command.steps is None else {"num_steps": command.steps}


def _weights_body(command: commands.UpdateWeights) -> dict[str, object]:
    body: dict[str, object] = {
        "model_path": command.model_path,
        "abort_all_requests": command.abort_all,
        "flush_cache": command.flush_cache,
    }
    return body if command.weight_version is None else {**body, "weight_version": command.weight_version}


def _memory_body(command: commands.ReleaseMemory | commands.ResumeMemory) -> dict[str, object]:
    return {"tags": sorted(tag.value for tag in command.tags)}


def _folders(answer: Any, address: str) -> list[str]:
    return [", ".join(f"{address}: {folder}" for folder in answer["folders"])]


def _states(answer: Any, address: str) -> list[dict[str, object]]:
    states = answer["internal_states"]
    return [states[0] if len(states) == 1 else {"replicas": states}]


def _reports(answer: Any, address: str) -> list[dict[str, object]]:
    return list(answer["replicas"])


REMOTE_CALLS: dict[type[Command[Any]], RemoteCall[Any, Any]] = dict(
    [
        _entry(commands.OpenSession, RemoteCall("/open_session", lambda answer, _: str(answer), _open_body)),
        _entry(commands.CloseSession, RemoteCall("/close_session", lambda *_: None, lambda of: {"session_id": of.id})),
        _entry(commands.FlushCache, RemoteCall("/flush_cache", lambda *_: True, otherwise=False)),
        _entry(
            commands.PauseGeneration,
            RemoteCall("/pause_generation", lambda *_: None, lambda of: {"mode": of.mode.value}),
        ),
        _entry(commands.ContinueGeneration, RemoteCall("/continue_generation", lambda *_: None, lambda _: {})),
        _entry(
            commands.UpdateWeights,
            RemoteCall(
                "/update_weights_from_disk",
                lambda answer, _: int(answer["num_paused_requests"]),
                _weights_body,
                seconds=WEIGHTS_SECONDS,
            ),
        ),
        _entry(
            commands.NameWeights,
            RemoteCall("/update_weight_version", lambda *_: None, lambda of: {"new_version": of.weight_version}),
        ),
        _entry(
            commands.ReleaseMemory,
            RemoteCall("/release_memory_occupation", lambda *_: None, _memory_body, seconds=WEIGHTS_SECONDS),
        ),
        _entry(
            commands.ResumeMemory,
            RemoteCall("/resume_memory_occupation", lambda *_: None, _memory_body, seconds=WEIGHTS_SECONDS),
        ),
        _entry(commands.GetState, RemoteCall("/server_info", _states, method="GET")),
        _entry(commands.GetCacheReport, RemoteCall("/cache_report", _reports, method="GET")),
        _entry(commands.GetCacheSummary, RemoteCall("/cache_summary", _reports, method="GET")),
        _entry(commands.StartProfile, RemoteCall("/start_profile", _folders, _profile_body, seconds=PROFILE_SECONDS)),
        _entry(commands.StopProfile, RemoteCall("/stop_profile", _folders, lambda _: {}, seconds=PROFILE_SECONDS)),
    ]
)

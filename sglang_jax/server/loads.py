"""`GET /v1/loads`: the load of each replica, with SGLang's field names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Depends, Response

from sglang_jax.about import version
from sglang_jax.engine.types import EngineClient, ReplicaLoad
from sglang_jax.server.callers import require_admin
from sglang_jax.server.streaming import json_response


class Load(msgspec.Struct, kw_only=True):
    """The load of one replica. The numbers are its scheduler's; `state`, `address`, `in_flight`, `silent_seconds`,
    `restarts` and `last_end` are this server's (see `ReplicaLoad`). `utilization`: fraction of its rows that run."""

    dp_rank: int
    timestamp: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    programs_left: int
    weight_version: str
    max_running_requests: int
    state: str
    address: str
    in_flight: int
    silent_seconds: float
    restarts: int
    last_end: str


class Aggregate(msgspec.Struct, kw_only=True):
    """All replicas: sums, and means over them."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(msgspec.Struct, kw_only=True):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: Aggregate


def loads_router(client: EngineClient) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/loads", dependencies=[Depends(require_admin)])
    async def loads() -> Response:
        """Running and queued requests, memory and state of each replica."""
        now = datetime.now(UTC).isoformat()
        each = [load_of(one, now) for one in client.loads()]
        answer = Loads(timestamp=now, version=version(), dp_rank_count=len(each), loads=each, aggregate=_all(each))
        return json_response(answer)

    return router


def load_of(one: ReplicaLoad, now: str) -> Load:
    """Returns a replica's load; `now`: the time, in ISO 8601."""
    stats = one.stats
    return Load(
        dp_rank=one.index,
        timestamp=now,
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        num_used_tokens=stats.num_used_tokens,
        max_total_num_tokens=stats.max_total_tokens or one.max_total_tokens,
        token_usage=stats.token_usage,
        gen_throughput=stats.gen_throughput,
        cache_hit_rate=stats.cache_hit_rate,
        utilization=stats.num_running / one.max_running_requests if one.max_running_requests else 0.0,
        programs_left=stats.programs_left,
        weight_version=stats.weight_version,
        max_running_requests=one.max_running_requests,
        state=one.state.value,
        address=one.address,
        in_flight=one.in_flight,
        silent_seconds=one.silent_seconds,
        restarts=one.restarts,
        last_end=one.last_end,
    )


def _all(loads: Sequence[Load]) -> Aggregate:
    running = sum(load.num_running_reqs for load in loads)
    waiting = sum(load.num_waiting_reqs for load in loads)
    return Aggregate(
        total_running_reqs=running,
        total_waiting_reqs=waiting,
        total_reqs=running + waiting,
        avg_token_usage=sum(load.token_usage for load in loads) / len(loads),
        avg_throughput=sum(load.gen_throughput for load in loads) / len(loads),
        avg_utilization=sum(load.utilization for load in loads) / len(loads),
    )

"""Records profiles of several replicas: all of them, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from sglang_jax.engine.link import Link
from sglang_jax.engine.replica import Replica
from sglang_jax.errors import EngineDeadError, ParameterError, ReplicaLostError, RequestError

logger = logging.getLogger(__name__)

ServingReplicas = Sequence[Replica[Link]]


async def start_profiles(serving: ServingReplicas, folders: Sequence[str], steps: int | None) -> list[str]:
    """Makes each replica record to its own entry of `folders`. Returns the folders of the profiles. Raises the error of
    the first replica that failed, as `ParameterError` or `ReplicaLostError`; replicas that had started are stopped."""
    own = dict(zip(serving, folders, strict=True))
    started, failed = await _each(serving, lambda replica: replica.client.start_profile(own[replica], steps))
    if failed:
        _, unstopped = await _each([one for one in serving if one not in failed], _stop)
        for replica, error in unstopped.items():
            logger.warning("The profile of replica %d was not stopped: %s", replica.index, error.message)
        raise _first(failed, "no replica is recording")
    return started


async def stop_profiles(serving: ServingReplicas) -> list[str]:
    """Stops recording on all replicas. Returns the folders of the profiles. Raises the error of the first replica that
    wrote no profile, as `ParameterError` or `ReplicaLostError`; its message lists the folders of the others."""
    written, failed = await _each(serving, _stop)
    if failed:
        raise _first(failed, f"others wrote {', '.join(written)}" if written else "the others wrote none")
    return written


def _stop(replica: Replica[Link]) -> Awaitable[str]:
    return replica.client.stop_profile()


async def _each(
    serving: ServingReplicas, ask: Callable[[Replica[Link]], Awaitable[str]]
) -> tuple[list[str], dict[Replica[Link], RequestError]]:
    answers = await asyncio.gather(*(ask(replica) for replica in serving), return_exceptions=True)
    folders: list[str] = []
    failed: dict[Replica[Link], RequestError] = {}
    for replica, answer in zip(serving, answers, strict=True):
        if isinstance(answer, str):
            folders.append(answer)
        elif isinstance(answer, RequestError):
            failed[replica] = answer
        else:
            raise answer
    return folders, failed


def _first(failed: dict[Replica[Link], RequestError], others: str) -> RequestError:
    """The error of the first replica that failed, with the outcome of the others."""
    replica, error = next(iter(failed.items()))
    message = f"replica {replica.index}: {error.message}; {others}"
    if isinstance(error, EngineDeadError):
        return ReplicaLostError(message)
    return ParameterError(message, param=error.param)

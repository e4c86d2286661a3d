"""Has several replicas execute a command, by its rule."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from sglang_jax.engine.link import Link
from sglang_jax.engine.replica import Replica
from sglang_jax.engine.types import ReplicaState
from sglang_jax.errors import EngineDeadError, ParameterError, ReplicaLostError, RequestError
from sglang_jax.scheduler.commands import AllOrNone, Each
from sglang_jax.scheduler.messages import Command, Result

logger = logging.getLogger(__name__)

Replicas = Sequence[Replica[Link]]


async def call_each(command: Command[Result], rule: Each[Result], replicas: Replicas) -> Mapping[int, Result]:
    """Returns the results by number of the replica. Raises the first error, unless the rule has `absent`."""
    results = await asyncio.gather(*(_call(command, rule, replica) for replica in replicas))
    return {replica.index: result for replica, result in zip(replicas, results, strict=True)}


async def _call(command: Command[Result], rule: Each[Result], replica: Replica[Link]) -> Result:
    if rule.absent is None:
        return await replica.client.call(command)
    if replica.state is not ReplicaState.SERVING:
        return rule.absent(replica.state.value, "")
    try:
        return await asyncio.wait_for(replica.client.call(command), rule.seconds)
    except TimeoutError:
        return rule.absent("", f"no answer within {rule.seconds:g} s")
    except EngineDeadError as error:
        return rule.absent(ReplicaState.DEAD.value, error.message)


async def call_all_or_none(
    command: Command[Result], rule: AllOrNone[Result], replicas: Replicas
) -> Mapping[int, Result]:
    """Returns the results by number of the replica. Raises the error of the first replica that failed, as
    `ParameterError` or `ReplicaLostError`; the others have then undone the command."""
    results, failed = await _settled(command, replicas)
    if not failed:
        return results
    if rule.undo is not None:
        _, unstopped = await _settled(rule.undo, [replica for replica in replicas if replica.index in results])
        for index, error in unstopped.items():
            logger.warning("%s failed on replica %d: %s", type(rule.undo).__name__, index, error.message)
    index, error = next(iter(failed.items()))
    message = f"replica {index}: {error.message}; {rule.others(rule.merge(results))}"
    if isinstance(error, EngineDeadError):
        raise ReplicaLostError(message)
    raise ParameterError(message, param=error.param)


async def _settled(command: Command[Result], replicas: Replicas) -> tuple[dict[int, Result], dict[int, RequestError]]:
    """Returns the results and the errors, by number of the replica."""
    calls = (replica.client.call(command.for_replica(replica.index)) for replica in replicas)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    results: dict[int, Result] = {}
    failed: dict[int, RequestError] = {}
    for replica, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, RequestError):
            failed[replica.index] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            results[replica.index] = answer
    return results, failed

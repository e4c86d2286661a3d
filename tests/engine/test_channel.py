from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import zmq

from sglang_jax.engine import channel
from sglang_jax.engine.channel import ClientChannel, CoreChannel, Published
from sglang_jax.errors import EngineDeadError
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import GetState
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Finished,
    NewRequest,
    Reply,
    Started,
    StepOutputs,
    WireError,
    WireLogprob,
)


@pytest.fixture(params=["inproc", "ipc"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ClientChannel, CoreChannel]]:
    address = "inproc://test" if request.param == "inproc" else f"ipc://{tmp_path}/test"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = ClientChannel(context, address)
    core = CoreChannel(context, address)
    yield client, core
    client.close()
    core.close()
    context.term()


def receive_all(core: CoreChannel, count: int) -> list[object]:
    messages: list[object] = []
    while len(messages) < count:
        messages += core.receive(block=True)
    return messages


async def until(condition: list[Published], count: int) -> None:
    while len(condition) < count:
        await asyncio.sleep(0.001)


async def test_requests_arrive_whole_and_in_order(ends: tuple[ClientChannel, CoreChannel]) -> None:
    client, core = ends
    sampling = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, stop=["ä"], stop_token_ids=[7], seed=-(2**63), max_new_tokens=None
    )
    core.send(Reply(0, True))
    assert await client.receive_one() == Reply(0, True)
    sent = [NewRequest(id=i, token_ids=b"\1\0\0\0" * i, sampling=sampling, extra_key="é") for i in range(1, 300)]
    for message in sent:
        client.send(message)
    client.send(AbortRequest(2**60))
    *requests, abort = await asyncio.to_thread(receive_all, core, 300)
    assert abort == AbortRequest(2**60)
    for got, wanted in zip(requests, sent, strict=True):
        assert isinstance(got, NewRequest)
        assert (got.id, got.token_ids, got.extra_key) == (wanted.id, wanted.token_ids, "é")
        assert got.sampling.logit_bias == {3: -1.5}
        assert (list(got.sampling.stop), list(got.sampling.stop_token_ids)) == (["ä"], [7])
        assert (got.sampling.seed, got.sampling.max_new_tokens) == (-(2**63), None)
    assert list(core.receive(block=False)) == []


@pytest.mark.parametrize("seconds", [3e6, 1e300])
def test_a_core_may_sleep_for_longer_than_a_poll_can_take(
    ends: tuple[ClientChannel, CoreChannel], seconds: float
) -> None:
    """As long as the timeout of the only open session, which a client may choose."""
    client, core = ends
    for _ in range(1000):
        try:
            client.send(AbortRequest(1))
            break
        except EngineDeadError:  # the ends are not connected yet
            time.sleep(0.01)
    assert list(core.receive(True, seconds)) == [AbortRequest(1)]


async def test_any_sequence_mapping_and_float_can_be_sent(ends: tuple[ClientChannel, CoreChannel]) -> None:
    client, core = ends
    core.send(Reply(0, True))
    await client.receive_one()
    sampling = SamplingParams(
        stop_token_ids=range(3), logit_bias=MappingProxyType({1: np.float64(2.5)}), top_p=np.float64(0.5)
    )
    client.send(NewRequest(id=1, token_ids=b"", sampling=sampling))
    (message,) = await asyncio.to_thread(receive_all, core, 1)
    assert isinstance(message, NewRequest)
    got = message.sampling
    assert (list(got.stop_token_ids), got.logit_bias, got.top_p) == ([0, 1, 2], {1: 2.5}, 0.5)


async def test_outputs_arrive_whole_and_in_order(ends: tuple[ClientChannel, CoreChannel]) -> None:
    client, core = ends
    got: list[Published] = []
    client.start(got.append)
    sent: list[Published] = [
        StepOutputs(
            ids=bytes(8 * i),
            tokens=bytes(4 * i),
            started=[Started(i, 3)],
            finished=[Finished(i, "error", None, 0, b"\0", 0, WireError("RequestError", "ü", None, "code"))],
            logprobs=[(i, WireLogprob(5, -0.5, [1, 2], [-0.1, -0.2]))],
            prompt_logprobs=[(i, [WireLogprob(6, None, [], [])])],
        )
        for i in range(500)
    ]
    for message in sent:
        core.send(message)
    await asyncio.wait_for(until(got, len(sent)), 10)
    assert got == sent


async def test_messages_in_both_directions_at_once_all_arrive(ends: tuple[ClientChannel, CoreChannel]) -> None:
    client, core = ends
    replies: list[Published] = []
    client.start(replies.append)
    count = 2000

    def echo() -> None:
        answered = 0
        while answered < count:
            for message in core.receive(block=True):
                assert isinstance(message, GetState)
                core.send(Reply(message.call, True))
                answered += 1

    core.send(Reply(-1, True))
    await asyncio.wait_for(until(replies, 1), 10)
    thread = threading.Thread(target=echo)
    thread.start()
    for call in range(count):
        client.send(GetState(call=call))
        if call % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(until(replies, count + 1), 20)
    thread.join()
    assert [reply.call for reply in replies if isinstance(reply, Reply)] == list(range(-1, count))


@pytest.mark.parametrize(("seconds", "taken"), [(0.0, [4, 6]), (channel.TURN_SECONDS, [2, 4, 6])])
async def test_many_large_messages_are_handled_in_several_turns_of_the_event_loop(
    ends: tuple[ClientChannel, CoreChannel], monkeypatch: pytest.MonkeyPatch, seconds: float, taken: list[int]
) -> None:
    """Regression: eight messages of ten thousand logprobs each blocked the event loop for half a second."""
    client, core = ends
    now, got, turns = [0.0], list[Published](), list[int]()

    def take(message: Published) -> None:
        got.append(message)
        now[0] += 0.6 * seconds

    monkeypatch.setattr(channel, "MESSAGES_PER_TURN", 4)
    for call in range(6):
        core.send(Reply(call, True))
    await client.receive_one()
    core.send(Reply(6, True))
    await asyncio.sleep(0.05)  # all of them have arrived
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client.start(take)
    while len(got) < 6:
        await asyncio.sleep(0)
        if got and turns[-1:] != [len(got)]:
            turns.append(len(got))
    assert turns == taken


async def test_waiting_costs_no_processor_time(ends: tuple[ClientChannel, CoreChannel]) -> None:
    client, core = ends
    spent: list[float] = []

    def wait() -> None:
        begin = time.thread_time()
        spent.append(float(len(list(core.receive(block=True)))))
        spent.append(time.thread_time() - begin)

    core.send(Reply(0, True))
    await client.receive_one()
    thread = threading.Thread(target=wait)
    thread.start()
    await asyncio.sleep(0.3)
    client.send(GetState(call=1))
    await asyncio.to_thread(thread.join)
    assert spent[0] == 1
    assert spent[1] < 0.05


async def test_sending_without_a_receiver_is_an_error(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = ClientChannel(context, f"ipc://{tmp_path}/nobody")
    with pytest.raises(EngineDeadError, match="engine has ended"):
        client.send(GetState(call=0))
    client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.send(GetState(call=0))
    client.close()
    context.term()

"""`Engine.open_session`, and which replica a session belongs to."""

from __future__ import annotations

import time

import pytest
from helpers.engine_fakes import FAKE_EOS, FAKE_VOCAB_SIZE, load_fake_model, load_tokenizer
from helpers.replica_fakes import ScriptedReplicas, fake_replicas

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.routing import session_home
from sglang_jax.engine.types import GenerateInput, SessionTurnInput
from sglang_jax.engine.validation import new_session
from sglang_jax.errors import EngineDeadError, ParameterError, ReplicaLostError, SessionNotFoundError
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.scheduler.commands import CloseSession, GetState

ORACLE = Oracle(FAKE_VOCAB_SIZE)
CONFIG = EngineConfig(page_size=4, max_total_tokens=512)
SAMPLING = {"max_new_tokens": 5, "seed": 3}


async def launch(config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load_fake_model, load_tokenizer=load_tokenizer)


def test_an_engines_sessions_end_with_their_blocks() -> None:
    with Engine(CONFIG, launch=launch) as engine:
        with engine.open_session() as session:
            first = session.generate("Hello", SAMPLING)
            stream = session.generate([1, 2], SAMPLING, stream=True)
            *_, second = stream
            history = [*b"Hello", *first.output_ids, 1, 2]
            assert second.output_ids == ORACLE.output(history, 3, 5, {FAKE_EOS})
            assert second.prompt_tokens == len(history)
            scored = session.generate("z", {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
            history += [*second.output_ids, *b"z"]
            assert scored.prompt_logprobs is not None
            assert [one.logprob for one in scored.prompt_logprobs] == ORACLE.prompt_logprobs(history)[-1:]
            second = scored
            assert engine.stats.num_sessions == 1
            for unfinished in session.generate("x", {"max_new_tokens": 100, "ignore_eos": True}, stream=True):
                assert unfinished.prompt_tokens == len(history) + len(second.output_ids) + 1
                break
            with pytest.raises(ParameterError, match="one prompt"):
                session.generate(["a", "b"], SAMPLING)  # type: ignore[list-item]
            with pytest.raises(ParameterError, match="is open already"):
                engine.open_session(session.id)
        with pytest.raises(SessionNotFoundError, match=session.id):
            session.generate("y", SAMPLING)
        session.close()
        named = engine.open_session("mine", timeout=100.0)
        assert named.id == "mine"
        assert named.generate("Hello", SAMPLING).output_ids == first.output_ids
    named.close()
    with pytest.raises(EngineDeadError):
        named.generate("x")


def test_options_that_no_core_can_decode_are_refused_before_they_reach_one() -> None:
    wrong = [{"session_id": name} for name in (5, b"x", "", "\ud800")]
    wrong += [{"timeout": seconds} for seconds in ("1", True, 0, -1.0, 10**400, float("inf"), float("nan"))]
    with Engine(CONFIG, launch=launch) as engine:
        for options in wrong:
            with pytest.raises(ParameterError, match=next(iter(options))):
                engine.open_session(**options)  # type: ignore[arg-type]
        assert engine.generate("a", SAMPLING).output_ids == ORACLE.output([*b"a"], 3, 5, {FAKE_EOS})


def test_a_block_ends_without_an_error_although_its_session_has_timed_out() -> None:
    with Engine(CONFIG, launch=launch) as engine:
        with engine.open_session(timeout=0.01) as session:
            time.sleep(0.1)
        with pytest.raises(SessionNotFoundError, match=session.id):
            session.generate("x", SAMPLING)


async def test_a_session_stays_with_the_replica_that_its_id_names() -> None:
    client = await fake_replicas(3, LoadBalanceMethod.ROUND_ROBIN, CONFIG)
    sessions = [await client.call(new_session(None)) for _ in range(9)]
    per_replica = [state["num_sessions"] for state in await client.call(GetState())]
    assert per_replica == [sum(session_home(one, 3) == index for one in sessions) for index in range(3)]
    history: dict[str, list[int]] = {one: [] for one in sessions}
    for number in range(3):
        for session in sessions:
            turn, sampling = SessionTurnInput(session), SamplingParams(max_new_tokens=5)
            request = GenerateInput(prompt=[1 + number, 2, 3], sampling=sampling, session=turn)
            output = [delta async for delta in client.generate(request)][-1]
            history[session] += [1 + number, 2, 3]
            assert output.prompt_tokens == len(history[session])
            history[session] += output.token_ids
    for session in sessions:
        await client.call(CloseSession(session, ""))
    await client.close()


async def test_a_session_is_lost_with_its_replica_and_no_other_gets_its_turns() -> None:
    two = ScriptedReplicas(2)
    client = await two.client()
    homes = {session_home(name, 2): name for name in ("a", "b", "c", "d", "e")}
    assert set(homes) == {0, 1}
    for index, name in homes.items():
        assert await client.call(new_session(name)) == name
        assert two.engine(index).opened == [name]
    two.gates[1].clear()
    two.engine(1).die()
    with pytest.raises(SessionNotFoundError, match=f"'{homes[1]}'"):
        await anext(client.generate(GenerateInput(prompt=[1], session=SessionTurnInput(homes[1]))))
    with pytest.raises(SessionNotFoundError, match=f"'{homes[1]}'"):
        await client.call(CloseSession(homes[1], ""))
    with pytest.raises(ReplicaLostError, match="belongs to a replica that is down"):
        await client.call(new_session(homes[1]))
    made_up = await client.call(new_session(None))
    assert session_home(made_up, 2) == 0
    await client.call(CloseSession(homes[0], ""))
    await client.close()

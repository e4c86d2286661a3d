"""`Engine.batch`: endless prompts, one outcome for each, and few items in memory at a time."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers.engine_fakes import EOS, EchoCore, load_fake_model, load_tokenizer

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.item_stream import BatchResult
from sglang_jax.engine.launch import launch_core
from sglang_jax.errors import CapacityError, EngineDeadError, ParameterError, PromptTooLongError
from sglang_jax.sampling import GenerationDefaults

ASKED: list[bytes] = []


class NotingCore(EchoCore):
    """Records the prompts in the order in which they arrive."""

    def _admit(self, message: Any) -> None:
        ASKED.append(bytes(np.frombuffer(message.token_ids, "<i4").astype(np.uint8)))
        super()._admit(message)


def load_noting(config: EngineConfig, channel: CoreChannel) -> NotingCore:
    return NotingCore(config, channel)


async def launch(config: EngineConfig) -> AsyncEngineClient:
    load = load_fake_model if config.model_path == "fake" else load_noting
    return await launch_core(config, in_process=True, load=load, load_tokenizer=load_tokenizer)


@pytest.fixture
def engine() -> Iterator[Engine]:
    ASKED.clear()
    with Engine(model_path="echo", launch=launch) as engine:
        yield engine


def texts(results: list[BatchResult]) -> dict[int, list[str]]:
    return {result.index: [output.text for output in result.outputs] for result in results}


def test_items_may_be_prompts_or_have_further_fields(engine: Engine) -> None:
    items = [
        "text",
        [104, 105],
        np.array([104, 111]),
        {"prompt": "abcdef", "max_new_tokens": 3},
        {"prompt": [97, 98], "n": 2, "custom_id": "anything"},
        {"messages": [{"role": "user", "content": "yo"}]},
        {"prompt": "abc", "return_logprob": True, "extra_key": "k", "priority": 3},
    ]
    results = list(engine.batch(items, ordered=True))
    assert [result.index for result in results] == list(range(len(items)))
    assert all(result.item is item for result, item in zip(results, items, strict=True))
    assert [result.error for result in results] == [None] * len(items)
    assert texts(results) == {
        0: ["text"],
        1: ["hi"],
        2: ["ho"],
        3: ["abc"],
        4: ["ab", "ab"],
        5: ["user: yo\n"],
        6: ["abc"],
    }
    assert [output.index for output in results[4].outputs] == [0, 1]
    assert results[3].text == "abc"
    assert [one.token_id for one in results[6].outputs[0].logprobs] == [97, 98, 99, EOS]


@pytest.mark.parametrize("shared", [{"max_new_tokens": 2}, SamplingParams(max_new_tokens=2)], ids=["dict", "params"])
def test_sampling_is_shared_except_for_fields_that_an_item_sets(engine: Engine, shared: Any) -> None:
    results = engine.batch(["abcd", {"prompt": "abcd"}, {"prompt": "abcd", "max_new_tokens": 3}], shared, ordered=True)
    assert [result.text for result in results] == ["ab", "ab", "abc"]


def test_the_models_defaults_apply_where_no_value_is_given(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    info = engine.model_info
    monkeypatch.setattr(type(info), "generation_defaults", GenerationDefaults(temperature=0.25), raising=False)
    seen: list[SamplingParams] = []
    generate = engine._client.generate

    def note(request: Any) -> Any:
        seen.append(request.sampling)
        return generate(request)

    monkeypatch.setattr(engine._client, "generate", note)
    list(engine.batch(["a", {"prompt": "b", "top_k": 3}, {"prompt": "c", "temperature": 1.5}], reorder=False))
    assert [(one.temperature, one.top_k) for one in seen] == [(0.25, -1), (0.25, 3), (1.5, -1)]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_in_an_item_is_the_outcome_of_that_item(engine: Engine, ordered: bool) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (7, ParameterError, "int"),
        (b"bytes", ParameterError, "bytes"),
        (None, ParameterError, "NoneType"),
        ("", ParameterError, "empty"),
        ([], ParameterError, "empty"),
        ([1, "x"], ParameterError, "integers"),
        ([10**9], ParameterError, "1000000000"),
        ({}, ParameterError, "neither"),
        ({"prompt": "a", "messages": []}, ParameterError, "both"),
        ({"messages": []}, ParameterError, "empty"),
        ({"messages": "hi"}, ParameterError, "list"),
        ({"messages": [{"role": "alien", "content": "a"}]}, ParameterError, "messages[0].role is 'alien'"),
        ({"messages": [{"content": "a"}]}, ParameterError, "messages[0].role is None"),
        ({"prompt": {"a": 1}}, ParameterError, "dict"),
        ({"prompt": "a", "max_tokens": 3}, ParameterError, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, ParameterError, "temperature"),
        ({"prompt": "a", "priority": "high"}, ParameterError, "priority"),
        ({"prompt": "a", "extra_key": 5}, ParameterError, "extra_key"),
        ({"prompt": "\ud800"}, ParameterError, "surrogate"),
        ("x" * 5000, PromptTooLongError, "5000"),
        ([259], CapacityError, "pool"),
    ]
    items = [item for item, _, _ in wrong]
    results = {result.index: result for result in engine.batch([*items, "good"], ordered=ordered)}
    assert results.pop(len(wrong)).text == "good"
    assert sorted(results) == list(range(len(wrong)))
    for index, (_, kind, word) in enumerate(wrong):
        error = results[index].error
        assert isinstance(error, kind), (index, error)
        assert word in str(error)
        assert results[index].outputs == []
        with pytest.raises(kind):
            _ = results[index].text


def test_arguments_that_no_item_can_have_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="lookahead must be at least 1, got 0"):
        engine.batch(["a"], lookahead=0)
    with pytest.raises(ParameterError, match="no field 'heat'"):
        engine.batch(["a"], {"heat": 1})


@pytest.mark.parametrize("ordered", [True, False])
def test_an_endless_iterable_is_read_a_bounded_number_of_items_ahead(engine: Engine, ordered: bool) -> None:
    read = 0

    def items() -> Iterator[dict[str, object]]:
        nonlocal read
        while True:
            read += 1
            yield {"prompt": f"p{read - 1:06d}", "max_new_tokens": 7}

    limit = 4 * 8 + 50
    results = engine.batch(items(), lookahead=50, ordered=ordered)
    for count in range(1000):
        result = next(results)
        assert result.text == f"p{result.index:06d}"
        if ordered:
            assert result.index == count
        assert read <= count + 1 + limit
    results.close()
    assert read <= 1000 + limit


class Prompt(str):
    """Text that can be checked for references."""

    alive: ClassVar[weakref.WeakSet[Prompt]] = weakref.WeakSet()


@pytest.mark.parametrize("ordered", [True, False])
def test_only_as_many_items_and_results_are_in_memory_as_may_be_in_flight(engine: Engine, ordered: bool) -> None:
    """With the garbage collector off: a result is released as soon as it is yielded."""

    def items() -> Iterator[dict[str, object]]:
        for number in range(3000):
            prompt = Prompt(f"p{number:06d}")
            Prompt.alive.add(prompt)
            yield {"prompt": prompt, "max_new_tokens": 1}

    most = 0
    gc.disable()
    try:
        for _ in engine.batch(items(), lookahead=32, ordered=ordered):
            most = max(most, len(Prompt.alive))
    finally:
        gc.enable()
    assert 32 < most <= 4 * 8 + 32 + 4


class Broken(Exception):
    pass


def test_an_error_of_the_iterable_is_raised_and_the_rest_aborted() -> None:
    def items() -> Iterator[str]:
        yield "one"
        yield "two"
        raise Broken

    with Engine(model_path="echo", launch=launch) as engine:
        with pytest.raises(Broken):
            list(engine.batch(items()))
        assert engine.generate("still here").text == "still here"
        assert engine.state()["running"] == 0


def test_leaving_early_aborts_what_still_runs() -> None:
    with Engine(model_path="echo:0.002", launch=launch) as engine:
        long = {"prompt": "x" * 2000, "max_new_tokens": None}
        for result in engine.batch(["quick", *[long] * 20]):
            assert result.text == "quick"
            break
        gc.collect()
        for _ in range(500):
            if engine.state()["running"] == 0:
                break
        assert engine.state()["running"] == 0


def test_a_lost_engine_ends_the_iteration() -> None:
    with Engine(model_path="echo", launch=launch) as engine, pytest.raises(EngineDeadError):
        list(engine.batch(["one", [257], "two"]))


def test_a_shut_down_engine_ends_the_iteration() -> None:
    engine = Engine(model_path="echo:0.01", launch=launch)
    results = engine.batch({"prompt": f"p{n}"} for n in range(10**9))
    next(results)
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    with pytest.raises(EngineDeadError):
        for _ in results:
            pass
    stopping.join()
    with pytest.raises(EngineDeadError):
        engine.batch(["a"])


def test_prompts_that_share_a_prefix_are_sent_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # All are read before the first is sent, however busy the machine is.
    monkeypatch.setattr("sglang_jax.engine.item_stream.GATHER_SECONDS", 60.0)
    prompts = [f"group {group} item {item}" for group in range(8) for item in range(8)]
    random.Random(1).shuffle(prompts)
    list(engine.batch(prompts))
    asked = [prompt.decode() for prompt in ASKED]
    assert asked == sorted(prompts)
    ASKED.clear()
    list(engine.batch(prompts, reorder=False))
    assert [prompt.decode() for prompt in ASKED] == prompts


def test_a_slow_iterable_is_not_waited_for() -> None:
    """Each item is answered before the next one is available."""
    with Engine(model_path="echo", launch=launch) as engine:
        answered: list[str] = []

        def items() -> Iterator[str]:
            for n in range(5):
                yield f"p{n}"
                for _ in range(3000):
                    if len(ASKED) > n:
                        break
                    threading.Event().wait(0.01)
                answered.append(ASKED[n].decode())

        ASKED.clear()
        assert len(list(engine.batch(items()))) == 5
        assert answered == [f"p{n}" for n in range(5)]


def test_grouping_raises_the_hit_rate_of_the_real_scheduler() -> None:
    choice = random.Random(5)
    prompts = []
    for _ in range(50):
        prefix = [choice.randrange(1, 120) for _ in range(48)]
        prompts += [prefix + [choice.randrange(1, 120) for _ in range(16)] for _ in range(10)]
    choice.shuffle(prompts)
    rates = []
    for reorder in (False, True):
        with Engine(
            model_path="fake", page_size=4, max_total_tokens=1024, chunked_prefill_size=64, launch=launch
        ) as engine:
            results = list(engine.batch(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True), reorder=reorder))
            rates.append(sum(result.outputs[0].cached_tokens for result in results) / (500 * 64))
    assert rates[1] > 0.95 * 48 / 64 * 9 / 10
    assert rates[1] > 2 * rates[0], rates

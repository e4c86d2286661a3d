"""`Engine` over an engine core that echoes prompts."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.engine_fakes import EOS, MAX_RUNNING, load_echo, load_tokenizer
from helpers.stepped_core import Steps, load_stepped

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig
from sglang_jax.engine.batch import FLIGHTS_PER_ROW
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.errors import CapacityError, CheckpointError, ConfigError, EngineDeadError, ParameterError

LONG = SamplingParams(max_new_tokens=None, ignore_eos=True)


async def launch(config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load_echo, load_tokenizer=load_tokenizer)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="echo", launch=launch) as engine:
        yield engine


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[Engine]:
    """Two milliseconds a step."""
    with Engine(model_path="echo:0.002", launch=launch) as engine:
        yield engine


def one(output: GenerateOutput | list[GenerateOutput]) -> GenerateOutput:
    assert isinstance(output, GenerateOutput)
    return output


def many(outputs: GenerateOutput | list[GenerateOutput]) -> list[GenerateOutput]:
    assert isinstance(outputs, list)
    return outputs


@pytest.mark.parametrize(
    ("prompt", "request_fields", "error", "message"),
    [
        (3, {}, ParameterError, r"prompts must be a text, .*, got int; conversations go to chat\(messages\)"),
        ({"role": "user"}, {}, ParameterError, "got dict"),
        (b"hi", {}, ParameterError, "got bytes"),
        ("hi", {"streem": True}, TypeError, "there is no argument 'streem'; there are return_logprob, .*priority"),
        ("hi", {"max_tokens": 3}, TypeError, r"give sampling_params=SamplingParams\(max_new_tokens=\.\.\.\)"),
        ("hi", {"temperature": 0}, TypeError, r"give sampling_params=SamplingParams\(temperature=\.\.\.\)"),
    ],
)
def test_unknown_arguments_are_refused(
    engine: Engine, prompt: Any, request_fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.generate(prompt, **request_fields)


def wait_for_idle(engine: Engine) -> None:
    end = time.monotonic() + 30
    while engine.state()["running"] and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.state()["running"] == 0


def assert_threads_end(before: set[threading.Thread]) -> None:
    end = time.monotonic() + 30
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_one_prompt(engine: Engine) -> None:
    assert one(engine.generate("héllo")).text == "héllo"
    assert one(engine.generate([97, 98])).text == "ab"
    assert one(engine.generate("abc", {"max_new_tokens": 2})).text == "ab"


def test_a_conversation(engine: Engine) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = engine.tokenizer.render_chat(messages)
    assert one(engine.chat(messages)).text == text
    assert one(engine.chat(messages, {"max_new_tokens": 4})).text == text[:4]
    assert "".join(output.delta_text for output in engine.chat(messages, stream=True)) == text
    assert [output.text for output in many(engine.chat(messages, SamplingParams(n=2)))] == [text] * 2
    with pytest.raises(ParameterError, match="messages must be a list"):
        engine.chat("hi")  # type: ignore[call-overload]


def test_lists_come_back_in_order(engine: Engine) -> None:
    texts = [f"prompt {i} " * (1 + i % 3) for i in range(200)]
    assert [output.text for output in many(engine.generate(texts))] == texts
    assert [output.text for output in many(engine.generate([[97], [98, 99]]))] == ["a", "bc"]
    assert [output.text for output in many(engine.generate(["a"]))] == ["a"]
    assert many(engine.generate([])) == []


def test_sampling_for_each_prompt(engine: Engine) -> None:
    each = [SamplingParams(max_new_tokens=1), {"max_new_tokens": 2}]
    assert [output.text for output in many(engine.generate(["abc", "abc"], each))] == ["a", "ab"]
    with pytest.raises(ParameterError, match="got 2 for 3 prompts"):
        engine.generate(["a", "b", "c"], each)
    with pytest.raises(ParameterError, match="no field 'max_tokens'") as caught:
        engine.generate("a", {"max_tokens": 3})
    assert caught.value.param == "max_tokens"


def test_several_completions_of_a_prompt(engine: Engine) -> None:
    outputs = many(engine.generate(["abc", "de", "f"], [SamplingParams(n=n) for n in (2, 1, 3)]))
    assert [output.text for output in outputs] == ["abc", "abc", "de", "f", "f", "f"]
    assert [output.index for output in outputs] == list(range(6))
    assert len(many(engine.generate("abc", SamplingParams(n=2)))) == 2


def test_request_options(engine: Engine) -> None:
    output = one(engine.generate("ab", return_logprob=True, logprob_start_len=0, top_logprobs_num=1))
    assert [entry.token_id for entry in output.logprobs] == [97, 98, EOS]
    assert output.prompt_logprobs is not None
    assert [entry.top for entry in output.prompt_logprobs] == [((-9.7, 97),), ((-9.8, 98),)]


def test_stream(engine: Engine) -> None:
    outputs = list(engine.generate("héllo", stream=True))
    assert "".join(output.delta_text for output in outputs) == outputs[-1].text == "héllo"
    assert outputs[-1].finish is not None


def test_a_stream_over_a_list_names_the_prompt_of_each_output(engine: Engine) -> None:
    texts = ["one", "twotwo", "threethreethree"]
    pieces = [""] * 3
    for output in engine.generate(texts, stream=True):
        pieces[output.index] += output.delta_text
    assert pieces == texts


def test_leaving_a_stream_early_aborts(slow_engine: Engine) -> None:
    for output in slow_engine.generate(["abc", "def"], LONG, stream=True):
        assert output.finish is None
        break
    gc.collect()
    wait_for_idle(slow_engine)


def test_one_bad_prompt_raises_and_the_others_are_aborted(slow_engine: Engine) -> None:
    prompts = ["fine", "x" * 5000, *["fine"] * 20]
    with pytest.raises(CapacityError, match="too small"):
        slow_engine.generate([[97], [259], [98]], LONG)
    wait_for_idle(slow_engine)
    with pytest.raises(Exception, match="5000 tokens"):
        slow_engine.generate(prompts, LONG)
    wait_for_idle(slow_engine)
    with pytest.raises(Exception, match="5000 tokens"):
        list(slow_engine.generate(prompts, LONG, stream=True))
    wait_for_idle(slow_engine)
    assert one(slow_engine.generate("ab")).text == "ab"


@pytest.mark.parametrize(("options", "bound"), [({}, FLIGHTS_PER_ROW * MAX_RUNNING), ({"max_queued_requests": 3}, 3)])
def test_number_in_flight_is_bounded(options: dict[str, int], bound: int) -> None:
    steps = Steps()
    steps.allow(1000)

    async def launch_patient(config: EngineConfig) -> AsyncEngineClient:
        """No step before `bound` requests are in flight: a fast core may end some before others arrive."""
        load = load_stepped(steps, expected=bound)
        return await launch_core(config, in_process=True, load=load, load_tokenizer=load_tokenizer)

    with Engine(model_path="echo", launch=launch_patient, **options) as engine:
        engine.generate([[97, 98, 99]] * 10 * bound)
        assert engine.state()["peak"] == bound


async def test_inside_a_running_event_loop(engine: Engine) -> None:
    assert one(engine.generate("abc")).text == "abc"
    assert one(await engine.async_generate("héllo")).text == "héllo"
    both = await asyncio.gather(engine.async_generate("one"), engine.async_generate(["two", "three"]))
    assert (one(both[0]).text, [output.text for output in many(both[1])]) == ("one", ["two", "three"])
    outputs = [output async for output in engine.async_generate("héllo", stream=True)]
    assert "".join(output.delta_text for output in outputs) == "héllo"


async def test_cancelling_aborts(slow_engine: Engine) -> None:
    task = asyncio.ensure_future(slow_engine.async_generate("abc", LONG))
    while not slow_engine.state()["running"]:
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for_idle(slow_engine)
    stream = slow_engine.async_generate("abc", LONG, stream=True)
    await anext(stream)
    await stream.aclose()
    wait_for_idle(slow_engine)


def test_from_several_threads(engine: Engine) -> None:
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        texts[number] = one(engine.generate(f"thread {number}")).text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"thread {number}" for number in range(8)}


def test_encode_decode_flush(engine: Engine) -> None:
    assert engine.decode(engine.encode("é")) == "é"
    with pytest.raises(ParameterError, match=r"^text must be a string, got 5$"):
        engine.encode(5)  # type: ignore[arg-type]
    assert engine.tokenizer.token_text(97) == "a"
    assert engine.model_info.architecture == "echo"
    assert engine.flush_cache()


def test_shutdown_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    engine = Engine(model_path="echo", launch=launch)
    engine.generate("x" * 3000)
    assert set(threading.enumerate()) > before
    engine.shutdown()
    engine.shutdown()
    assert_threads_end(before)
    for call in (lambda: engine.generate("a"), engine.flush_cache, engine.state):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_shutdown_fails_what_is_in_flight() -> None:
    engine = Engine(model_path="echo:0.002", launch=launch)
    stream = engine.generate("abc", LONG, stream=True)
    next(stream)
    closer = threading.Timer(0.05, engine.shutdown)
    closer.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        list(stream)
    closer.join()


def test_collected_engine_shuts_down() -> None:
    before = set(threading.enumerate())
    Engine(model_path="echo", launch=launch)
    gc.collect()
    assert_threads_end(before)


def test_errors_at_the_start() -> None:
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Engine(model_path="missing", launch=launch)
    with pytest.raises(ConfigError, match=r"page_size: input should be .* got 0"):
        Engine(page_size=0)
    with pytest.raises(ConfigError, match="there is no option 'page_sice'; did you mean page_size"):
        Engine(page_sice=16)
    with pytest.raises(ConfigError, match="not both; got config and page_size"):
        Engine(EngineConfig(), page_size=16)
    assert_threads_end(before)


def test_bad_model_path_is_a_clear_error() -> None:
    with pytest.raises(CheckpointError, match=r"/no/such/model does not exist"):
        Engine(model_path="/no/such/model")


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_the_package_imports_no_framework() -> None:
    done = run_script("import sglang_jax\nprint(*sorted({'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_script_that_forgets_to_close_ends_cleanly() -> None:
    done = run_script(
        """
from helpers.engine_fakes import load_echo, load_tokenizer
from sglang_jax import Engine
from sglang_jax.engine.launch import launch_core
launch = lambda config: launch_core(config, in_process=True, load=load_echo, load_tokenizer=load_tokenizer)
engine = Engine(model_path="echo", launch=launch)
print(engine.generate("abc").text)
stream = engine.generate("x" * 3000, stream=True)
next(stream)
"""
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "abc", "")

"""`POST /generate`."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import CACHED_TOKENS, EOS
from helpers.stepped_core import Steps, load_stepped
from helpers.tokenized import tokenized

from sglang_jax.engine.types import GenerateInput
from sglang_jax.server.remote_format import request_body
from sglang_jax.server.repeats import RepeatedAnswer
from sglang_jax.server.streaming import RESPONSE_SLICE, event


def generate(server: EchoServer, **body: Any) -> Any:
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_completed(server: EchoServer) -> None:
    answer = generate(server, text="Hello", rid="mine")
    assert answer["text"] == "Hello"
    assert answer["output_ids"] == [*b"Hello", EOS]
    meta = answer["meta_info"]
    assert 0 <= meta.pop("queue_time") < meta.pop("e2e_latency")
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "cached_tokens": CACHED_TOKENS,
        "weight_version": "default",
    }


def test_token_ids_are_completed_to_the_length(server: EchoServer) -> None:
    answer = generate(server, input_ids=list(b"Hello"), sampling_params={"max_new_tokens": 3})
    assert answer["text"] == "Hel"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_stop_string_and_stop_token(server: EchoServer) -> None:
    stopped = generate(server, text="one, two", sampling_params={"stop": ","})
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == ("one", {"type": "stop", "matched": ","})
    kept = generate(server, text="one, two", sampling_params={"stop": ["x", ","], "no_stop_trim": True})
    assert kept["text"] == "one,"
    token = generate(server, text="one, two", sampling_params={"stop_token_ids": [ord(",")]})
    assert token["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord(",")}


def test_batches_are_answered_in_order(server: EchoServer) -> None:
    texts = generate(server, text=["one", "three", "five"])
    assert [answer["text"] for answer in texts] == ["one", "three", "five"]
    ids = generate(server, input_ids=[list(b"ab"), list(b"c")])
    assert [answer["text"] for answer in ids] == ["ab", "c"]
    assert isinstance(generate(server, text=["only"]), list)


def test_each_prompt_of_a_batch_may_have_its_own_parameters(server: EchoServer) -> None:
    answers = generate(
        server,
        text=["abc", "def"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
        rid=["first", "second"],
        return_logprob=[True, False],
    )
    assert [answer["text"] for answer in answers] == ["a", "de", "de"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["first", "second", "second"]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False, False]


def test_parameters_reach_the_engine(server: EchoServer) -> None:
    generate(
        server,
        text="parameters",
        sampling_params={"max_new_tokens": 7, "sampling_seed": 5, "stop": ["zz"], "logit_bias": {"65": -2.5}, "n": 1},
        extra_key="tenant",
        priority=3,
    )
    seen = server.seen()[-1]
    assert seen["max_new_tokens"] == 7
    assert seen["seed"] == 5
    assert seen["logit_bias"] == {"65": -2.5}
    assert (seen["extra_key"], seen["priority"]) == ("tenant", 3)


def test_logprobs(server: EchoServer) -> None:
    answer = generate(
        server,
        text="AB",
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-6.5, 65, "A"]]
    assert meta["output_top_logprobs"] == [[[-6.5, 65, "A"], [-6.6, 66, "B"]]]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[65, "A"], [66, "B"]]
    assert len(meta["input_top_logprobs"]) == 2


def test_logprobs_have_no_text_and_no_prompt_unless_asked(server: EchoServer) -> None:
    meta = generate(server, text="AB", sampling_params={"max_new_tokens": 1}, return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-6.5, 65, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta


def test_stream_is_cumulative(server: EchoServer) -> None:
    events = server.events("/generate", {"text": "häßlich"})
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == "häßlich"
    assert not any("\ufffd" in text for text in texts)
    assert events[-1]["output_ids"] == [*"häßlich".encode(), EOS]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert "index" not in events[0]


def test_a_batch_streams_with_an_index(server: EchoServer) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": [{"n": 2}, {"n": 1}]}
    last = {event["index"]: event["text"] for event in server.events("/generate", body)}
    assert last == {0: "ab", 1: "ab", 2: "cd"}


LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")


def test_an_incremental_stream_sends_everything_once() -> None:
    """Each step has its own event, without earlier output."""
    body = {"text": ["häß", "cd"], "sampling_params": [{"n": 2}, {"n": 1}], "return_logprob": True}
    body |= {"logprob_start_len": 0, "top_logprobs_num": 2}
    steps = Steps()
    together: dict[int, Any] = {}
    with serve_echo(load_stepped(steps, expected=3)) as server:
        stream = {**body, "stream": True, "incremental_output": True}
        with server.http.stream("POST", "/generate", json=stream) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            for writing in ({0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}, {0, 1}):  # six tokens and three, with EOS
                events = [json.loads(next(lines)) for _ in writing]
                assert {event["index"] for event in events} == writing
                for event in events:
                    empty = {**event, "text": "", "output_ids": [], "logprobs": {name: [] for name in LOGPROBS}}
                    before = together.setdefault(event["index"], empty)
                    before["text"] += event["text"]
                    before["output_ids"] += event["output_ids"]
                    for name in LOGPROBS:
                        before["logprobs"][name] += event["meta_info"][name]
                    assert len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"]) == 1
                steps.allow()
            assert list(lines) == ["[DONE]"]
        steps.allow(100)
        for index, whole in enumerate(generate(server, **body)):
            found = together[index]
            assert (found["text"], found["output_ids"]) == (whole["text"], whole["output_ids"])
            assert found["logprobs"] == {name: whole["meta_info"][name] for name in LOGPROBS}


def test_incremental_output_needs_a_stream(server: EchoServer) -> None:
    response = server.http.post("/generate", json={"text": "a", "incremental_output": True})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "incremental_output needs stream to be true"


def test_one_prompt_with_several_completions_is_a_list(server: EchoServer) -> None:
    answers = generate(server, text="ab", sampling_params={"n": 3, "max_new_tokens": 1})
    assert [answer["text"] for answer in answers] == ["a"] * 3


@pytest.mark.parametrize("extra", [{"lora_path": None}, {"return_hidden_states": False}, {"image_data": []}])
def test_fields_that_load_generators_send_are_accepted(server: EchoServer, extra: dict[str, Any]) -> None:
    assert generate(server, text="a", **extra)["text"] == "a"


def test_marker_tokens_are_shown(server: EchoServer) -> None:
    """A server behind another one needs them so that the other can parse replies."""
    body = {"input_ids": [65, 258, 66, 259, 67], "sampling_params": {"stop": ["<25", "C"]}}
    assert server.http.post("/generate", json=body).json()["text"] == "AB"
    asked = request_body(tokenized(GenerateInput(prompt=[65], markers=frozenset({258}))), "name", 99)
    assert asked["marker_token_ids"] == [258]
    shown = server.http.post("/generate", json={**body, "marker_token_ids": asked["marker_token_ids"]}).json()
    assert (shown["text"], shown["meta_info"]["finish_reason"]["matched"]) == ("A<258>B", "C")


def test_a_cumulative_event_is_copied_a_slice_at_a_time() -> None:
    """Each event that a slow client had not read kept four copies of a megabyte."""
    text, ids, top = 'a"\0', [1, 2], [[[-0.5, 7, None]] * 20] * 300
    repeated = RepeatedAnswer()
    for count in range(1, 9):
        data = event(repeated.add({"text": text, "output_ids": ids, "meta_info": {"id": "\0x", "top": top}}))
        tracemalloc.start()
        longest = max(map(len, repeated.pieces(data)))
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        received = b"".join(repeated.pieces(data))
        meta = {"id": "\0x", "top": top * count}
        answer = json.loads(received.removeprefix(b"data: "))
        assert answer == {"text": text * count, "output_ids": ids * count, "meta_info": meta}
        assert longest <= RESPONSE_SLICE
        assert held < 3 * RESPONSE_SLICE
    assert len(received) > 5 * RESPONSE_SLICE
    short = RepeatedAnswer()
    assert list(short.pieces(event(short.add({"text": text, "output_ids": ids, "meta_info": {}})))) == [
        b'data: {"text":"a\\"\\u0000","output_ids":[1,2],"meta_info":{}}\n\n'
    ]

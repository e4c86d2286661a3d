"""`/v1/completions` beyond what OpenAI's client covers."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.echo_server import EchoServer
from helpers.engine_fakes import EOS

EURO = list("€".encode())


def complete(server: EchoServer, **body: Any) -> Any:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (list(b"ab"), ["ab"]),
        ([list(b"ab"), list(b"c")], ["ab", "c"]),
    ],
)
def test_a_prompt_is_a_text_ids_or_a_list_of_either(server: EchoServer, prompt: Any, texts: list[str]) -> None:
    choices = complete(server, prompt=prompt)["choices"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(len(texts)))


def test_choices_are_numbered_by_prompt_then_completion(server: EchoServer) -> None:
    choices = complete(server, prompt=["a", "b"], n=2, best_of=2)["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_defaults(server: EchoServer) -> None:
    complete(server, prompt="a" * 40)
    assert server.seen()[-1]["max_new_tokens"] == 16


def test_stop_may_be_included(server: EchoServer) -> None:
    assert complete(server, prompt="a.b", stop=".")["choices"][0]["text"] == "a"
    kept = complete(server, prompt="a.b", stop=".", include_stop_str_in_output=True)["choices"][0]
    assert (kept["text"], kept["matched_stop"]) == ("a.", ".")


def test_special_tokens_are_shown_if_asked(server: EchoServer) -> None:
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    assert complete(server, **body)["choices"][0]["text"] == "a"
    assert complete(server, **body, skip_special_tokens=False)["choices"][0]["text"] == "a<256>"


def test_logprobs(server: EchoServer) -> None:
    logprobs = complete(server, prompt="AB", logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "B"],
        "token_logprobs": [-6.5, -6.6],
        "top_logprobs": [{"A": -6.5, "B": -6.6}, {"B": -6.6, "C": -6.7}],
        "text_offset": [0, 1],
    }


def test_logprobs_of_0_still_report_the_sampled_token(server: EchoServer) -> None:
    logprobs = complete(server, prompt="A", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"A": -6.5}]


def test_parts_of_a_character_are_spelled_as_bytes_and_counted_once(server: EchoServer) -> None:
    logprobs = complete(server, prompt="€!", logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*[f"bytes:\\x{byte:02x}" for byte in EURO], "!", f"<{EOS}>"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2]


def test_echo(server: EchoServer) -> None:
    assert complete(server, prompt="ab", echo=True)["choices"][0]["text"] == "abab"
    assert complete(server, prompt=list(b"ab"), echo=True)["choices"][0]["text"] == "abab"


def test_echo_with_logprobs_includes_the_prompts_logprobs(server: EchoServer) -> None:
    choice = complete(server, prompt="€b", echo=True, logprobs=1, max_tokens=4)["choices"][0]
    assert choice["text"] == "€b€b"
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 8
    assert logprobs["tokens"][3] == logprobs["tokens"][7] == "b"
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_adds_up_to_the_whole_answer(server: EchoServer, echo: bool) -> None:
    body = {"prompt": ["€b", "cd"], "echo": echo, "logprobs": 1, "n": 2}
    whole = complete(server, **body)["choices"]
    events = server.events("/v1/completions", body)
    for choice in whole:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for key, expected in choice["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][key]] == expected


def test_usage_is_in_every_event_only_if_asked(server: EchoServer) -> None:
    assert not any("usage" in event for event in server.events("/v1/completions", {"prompt": "ab"}))
    *events, last = server.events("/v1/completions", {"prompt": "ab", "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_no_two_pairs_of_salt_and_extra_key_share_a_cache(server: EchoServer) -> None:
    pairs: list[dict[str, str]] = [
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_key": "a", "cache_salt": "b"},
        {"extra_key": "b", "cache_salt": "a"},
        {"extra_key": "b\x1fc", "cache_salt": "a"},
        {"extra_key": "c", "cache_salt": "a\x1fb"},
        {"cache_salt": "a\x1fb\x1fc"},
        {"extra_key": 'b", "c', "cache_salt": "a"},
        {"extra_key": "c", "cache_salt": 'a", "b'},
    ]

    def seen(fields: dict[str, str]) -> str | None:
        complete(server, prompt="a", **fields)
        key = server.seen()[-1]["extra_key"]
        assert key is None or isinstance(key, str)
        return key

    keys = [seen(fields) for fields in pairs]
    assert keys[:2] == [None, "a"]
    assert len(set(keys)) == len(pairs)
    assert [seen(fields) for fields in pairs] == keys
    assert seen({"extra_key": "", "cache_salt": ""}) is None
    assert seen({"extra_key": "", "cache_salt": "a"}) == keys[2]


@pytest.mark.parametrize(
    "extra",
    [
        {"best_of": 1},
        {"best_of": None},
        {"suffix": ""},
        {"user": "someone"},
        {"lora_path": None},
        {"return_routed_experts": False},
        {"ignore_eos": False},
        {"spaces_between_special_tokens": True},
        {"prediction": {"type": "content", "content": "b"}, "cache_prompt": False, "timings_per_token": True},
        {"keep_alive": "5m", "provider": {"order": ["a"]}, "usage": {"include": True}},
        {"mirostat": 0, "stop": ""},
        {"mirostat": 0.0, "stop": [""]},
        {"do_sample": True, "detokenize": True, "parse_tool_calls": True},
        {"temperature": None, "top_p": None, "max_tokens": None, "logprobs": None, "stop": None, "n": None},
    ],
)
def test_extra_fields_without_effect_are_accepted(server: EchoServer, extra: dict[str, Any]) -> None:
    assert complete(server, prompt="a", **extra)["choices"][0]["text"] == "a"


@pytest.mark.parametrize("name", ["detokenize", "parse_tool_calls", "spaces_between_special_tokens"])
def test_a_false_that_asks_for_something_is_refused(server: EchoServer, name: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
        response = server.http.post(path, json={**body, name: False})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name


def test_every_event_has_the_usage_so_far(server: EchoServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = server.events(path, {**body, "stream_options": options})
        so_far = 0
        for event in events:
            choice = event["choices"][0]
            so_far += len(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
            # A token is a character. An event's usage includes the tokens of the events that are written with it.
            assert event["usage"]["completion_tokens"] >= so_far
            assert event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert so_far
        assert (events[-1]["usage"], last["choices"]) == (last["usage"], [])
        # without a separate last event
        events = server.events(path, {**body, "stream_options": {"continuous_usage_stats": True}})
        assert all(event["choices"] and event["usage"] for event in events)


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"best_of": 1, "reasoning_effort": "none", "stream_options": {"include_usage": False}},
    ],
)
def test_extra_fields_without_effect_are_accepted_in_chats(server: EchoServer, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a", "name": "x"}], **extra}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == "user: a\n"


def test_a_chat_may_continue_its_last_message(server: EchoServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == "user: a\nassistant: Well, "


def test_stop_strings_do_not_match_before_min_tokens(server: EchoServer) -> None:
    for least, text in ((0, "a"), (1, "a"), (3, "abca"), (6, "abcabc")):
        assert complete(server, prompt="abcabc", stop="b", min_tokens=least)["choices"][0]["text"] == text


@pytest.mark.parametrize("special", [EOS, EOS + 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_a_special_token(server: EchoServer, special: int, stream: bool) -> None:
    """It never matched, because special tokens are left out of the text."""
    body = {"prompt": [97, 98, special, 99], "max_tokens": 10, "stop": [f"<{special}>", "x"]}
    if stream:
        choices = [event["choices"][0] for event in server.events("/v1/completions", body)]
    else:
        choices = server.http.post("/v1/completions", json=body).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", f"<{special}>")

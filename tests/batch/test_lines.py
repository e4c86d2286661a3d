"""What a line of the input requests, and the errors for invalid lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.batch.lines import BadLine, Line, parse_defaults, parse_line

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def parse(line: object, defaults: str = "{}") -> Line | BadLine:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(6, raw, parse_defaults(defaults))


def good(line: object, defaults: str = "{}") -> Line:
    parsed = parse(line, defaults)
    assert isinstance(parsed, Line), parsed
    return parsed


def body_of(line: Line) -> object:
    return json.loads(line.body)


def test_openai_batch_format() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = good({"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert (line.number, line.custom_id, line.url) == (6, "a-1", "/v1/chat/completions")
    assert body_of(line) == body


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"input_ids": [1, 2]}),
        ("/v1/responses", {"input": "hi", "store": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 2}),
    ],
)
def test_other_routes_that_generate(url: str, body: object) -> None:
    line = good({"custom_id": "a", "url": url, "body": body})
    assert (line.url, body_of(line)) == (url, body)


@pytest.mark.parametrize(
    ("plain", "url"),
    [
        ({"prompt": "hi", "temperature": 0.5}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "hi"}], "n": 2}, "/v1/chat/completions"),
    ],
)
def test_plain_lines_are_bodies(plain: dict[str, object], url: str) -> None:
    line = good(plain)
    assert (line.custom_id, line.url, body_of(line)) == ("line-7", url, plain)
    named = good({**plain, "custom_id": "mine"})
    assert (named.custom_id, body_of(named)) == ("mine", plain)


def test_numbers_as_custom_id_are_taken_as_their_digits() -> None:
    assert good({"prompt": "x", "custom_id": 12}).custom_id == "12"


def test_defaults_fill_what_a_body_leaves_out() -> None:
    defaults = '{"max_tokens": 9, "stop": ["a"]}'
    assert body_of(good({"prompt": "x"}, defaults)) == {"prompt": "x", "max_tokens": 9, "stop": ["a"]}
    assert body_of(good({"prompt": "x", "max_tokens": 1}, defaults)) == {"prompt": "x", "max_tokens": 1, "stop": ["a"]}
    line = good({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "stop": None}}, defaults)
    assert body_of(line) == {"prompt": "x", "stop": None, "max_tokens": 9}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "JSON object"),
        ("{", "not valid JSON"),
        ('{"prompt": "x"}', "prompt"),
        ('{"stream": true}', "stream"),
        ('{"custom_id": "x"}', "custom_id"),
    ],
)
def test_invalid_defaults_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_defaults(text)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b"", "malformed_json", ["not valid JSON"]),
        (b"nonsense", "malformed_json", ["the line is not valid JSON: invalid character (byte 4)"]),
        (b'{"prompt": "x"', "malformed_json", ["truncated"]),
        (b'{"prompt": "x"} {"prompt": "y"}', "malformed_json", ["trailing"]),
        (b'{"prompt": NaN}', "malformed_json", ["not valid JSON"]),
        (b'{"prompt": "\\ud800"}', "malformed_json", ["surrogate"]),
        (b'{"prompt": "\\udc00 x"}', "malformed_json", ["surrogate"]),
        (b'{"custom_id": "\xff", "prompt": "x"}', "malformed_json", ["custom_id"]),
        (b'{"prompt": ' + b"[" * 100_000, "malformed_json", ["recursion"]),
        (b"\x00" * 100, "malformed_json", ["not valid JSON"]),
        (b"[1]", "malformed_request", ["object", "array"]),
        (b"null", "malformed_request", ["object", "null"]),
        (b'"text"', "malformed_request", ["object", "str"]),
        ({}, "missing_field", ["body, prompt and messages", "none"]),
        ({"prompt": "x", "messages": []}, "missing_field", ["both"]),
        ({"prompt": "x", "url": "/v1/completions"}, "malformed_request", ["url"]),
        ({"prompt": "x", "method": "POST"}, "malformed_request", ["method"]),
        ({"prompt": "x", "stream": True}, "unsupported_parameter", ["stream"]),
        ({"prompt": "x", "custom_id": ["a"]}, "invalid_value", ["custom_id", "['a']"]),
        ({"prompt": "x", "custom_id": True}, "invalid_value", ["custom_id", "True"]),
        ({"prompt": "x", "custom_id": 1.5}, "invalid_value", ["custom_id", "1.5"]),
        ({"custom_id": "a", "body": {}, "prompt": "x"}, "malformed_request", ["prompt", "body"]),
        ({"url": "/v1/completions", "body": {"prompt": "x"}}, "missing_field", ["custom_id"]),
        ({"custom_id": "a", "body": {"prompt": "x"}}, "missing_field", ["url", "/v1/completions"]),
        ({"custom_id": "a", "url": "/v1/moderations", "body": {}}, "invalid_value", ["/v1/moderations", "/generate"]),
        ({"custom_id": "a", "url": 5, "body": {}}, "invalid_value", ["url", "5"]),
        ({"custom_id": "a", "url": "/generate", "method": "GET", "body": {}}, "invalid_value", ["GET"]),
        ({"custom_id": "a", "url": "/generate", "body": [1]}, "malformed_request", ["body", "array"]),
        ({"custom_id": "a", "url": "/generate", "body": "x"}, "malformed_request", ["body", "str"]),
        (
            {"custom_id": "a", "url": "/generate", "body": {"text": "x", "stream": True}},
            "unsupported_parameter",
            ["stream"],
        ),
    ],
)
def test_errors_of_bad_lines_say_what_is_wrong(line: object, code: str, words: list[str]) -> None:
    parsed = parse(line)
    assert isinstance(parsed, BadLine)
    assert (parsed.number, parsed.code) == (6, code)
    for word in words:
        assert word in parsed.message


def test_a_bad_line_keeps_its_custom_id() -> None:
    parsed = parse({"custom_id": "a", "url": "/nowhere", "body": {}})
    assert isinstance(parsed, BadLine)
    assert parsed.custom_id == "a"


def test_a_long_value_is_abbreviated_in_the_error() -> None:
    parsed = parse({"custom_id": "a", "url": "x" * 10_000, "body": {}})
    assert isinstance(parsed, BadLine)
    assert len(parsed.message) < 400


@given(st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_line_or_a_bad_line(raw: bytes) -> None:
    parse_line(0, raw, {})


def test_keys_share_a_prefix_where_prompts_do() -> None:
    system = {"role": "system", "content": "be brief"}
    keys = [
        good({"messages": [system, {"role": "user", "content": text}]}).key for text in ("what is a", "what is b", "no")
    ]
    others = [good({"prompt": "be brief"}).key, good({"messages": [system], "extra_key": "k"}).key]
    ordered = sorted([*keys, *others])
    assert sorted(ordered.index(key) for key in keys) in ([0, 1, 2], [1, 2, 3], [2, 3, 4])


def seeded(body: dict[str, object], url: str = "/v1/completions", number: int = 6) -> dict[str, Any]:
    line = parse_line(number, json.dumps({"custom_id": "a", "url": url, "body": body}).encode(), {}, random_seed=3)
    assert isinstance(line, Line), line
    return json.loads(line.body)  # type: ignore[no-any-return]


def test_lines_without_a_seed_get_one_from_their_number() -> None:
    seeds = [seeded({"prompt": "x"}, number=number)["seed"] for number in range(200)]
    assert seeds == [seeded({"prompt": "y", "seed": None}, number=number)["seed"] for number in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    completions = {seed + index for seed in seeds for index in range(64)}
    assert len(completions) == 200 * 64, "two completions have the same seed"
    assert seeded({"prompt": [1, 2]})["seed"] == seeds[6]
    assert seeded({"messages": [{}]}, "/v1/chat/completions")["seed"] == seeds[6]
    assert seeded({"text": "x"}, "/generate")["sampling_params"] == {"seed": seeds[6]}
    sampling = {"top_k": 3}
    assert seeded({"input_ids": [1], "sampling_params": sampling}, "/generate")["sampling_params"] == {
        **sampling,
        "seed": seeds[6],
    }


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "x", "seed": 5}),
        ("/v1/completions", {"prompt": ["x", "x"]}),
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/generate", {"text": "x", "sampling_params": {"seed": 5}}),
        ("/generate", {"text": "x", "sampling_params": {"sampling_seed": 5}}),
        ("/generate", {"text": "x", "sampling_params": [{}]}),
        ("/generate", {"text": ["x", "x"]}),
    ],
)
def test_lines_that_keep_their_seeds(url: str, body: dict[str, object]) -> None:
    assert seeded(body, url) == body

"""Every refusal is OpenAI's error object, with the field, the rejected value and the limit."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import CONTEXT_LENGTH, EOS, VOCAB_SIZE, load_fake_model

from sglang_jax.errors import cut

BEYOND = VOCAB_SIZE
CAPACITY_ERROR = EOS + 3
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {"generate": "/generate", "completion": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD: dict[str, dict[str, Any]] = {
    "generate": {"text": "hi"},
    "completion": {"prompt": "hi"},
    "chat": {"messages": MESSAGES},
}


def error_of(server: EchoServer, path: str, content: str | bytes, status: int) -> dict[str, Any]:
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


SAMPLING_CASES = [
    ({"temperature": -0.1}, "temperature", "[0, 100], got -0.1"),
    ({"temperature": float("nan")}, "temperature", "finite number, got nan"),
    ({"top_p": float("inf")}, "top_p", "finite number, got inf"),
    ({"top_p": 0}, "top_p", "(0, 1], got 0"),
    ({"top_p": 1.5}, "top_p", "(0, 1], got 1.5"),
    ({"top_k": -2}, "top_k", "[-1, 2147483647], got -2"),
    ({"top_k": 1.5}, "top_k", "integer, got 1.5"),
    ({"min_p": 2}, "min_p", "[0, 1], got 2"),
    ({"frequency_penalty": 3}, "frequency_penalty", "[-2, 2], got 3"),
    ({"presence_penalty": -3}, "presence_penalty", "[-2, 2], got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0, 10], got 0"),
    ({"n": 0}, "n", "[1, 128], got 0"),
    ({"n": 129}, "n", "[1, 128], got 129"),
    ({"seed": 2**63}, "seed", "got 9223372036854775808"),
    ({"stop": ["a", ""]}, "stop", "non-empty strings, got ['a', '']"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 strings, got 17"),
    ({"stop_token_ids": [BEYOND]}, "stop_token_ids", f"token id {BEYOND}, the vocabulary ends at {VOCAB_SIZE - 1}"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids", "at most 16 ids, got 17"),
    ({"logit_bias": {str(BEYOND): 1}}, "logit_bias", f"token id {BEYOND}"),
    ({"logit_bias": {"65": 101}}, "logit_bias", "[-100, 100], got 101"),
    ({"logit_bias": {"A": 1}}, "logit_bias.A", "got 'A'"),
    ({"logit_bias": {"65": float("-inf")}}, "logit_bias.65", "finite number, got -inf"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean, got 1"),
    ({"json_schema": "{"}, "json_schema", "not JSON"),
    ({"json_schema": 5}, "json_schema", "must be a JSON schema"),
    ({"regex": "a", "guided_json": {}}, "guided_json", "cannot both be given"),
    ({"guided_choice": []}, "guided_choice", "list of non-empty texts"),
    ({"ebnf": "x" * 200_000}, "ebnf", "the limit is 131072"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "fast": True}}, "structured_outputs.fast", "has no field 'fast'"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs a JSON schema"),
]


@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize(("fields", "param", "message"), SAMPLING_CASES)
def test_a_bad_sampling_value_is_refused(
    server: EchoServer, route: str, fields: dict[str, Any], param: str, message: str
) -> None:
    native = route == "generate"
    body = {**GOOD[route], **({"sampling_params": fields} if native else fields)}
    error = error_of(server, PATHS[route], json.dumps(body), 400)
    assert error["param"] in (param, f"sampling_params.{param}")
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


CASES = [
    ("generate", {}, "text", "exactly one of text and input_ids must be given, got neither"),
    ("generate", {"text": "a", "input_ids": [1]}, "text", "got both"),
    ("generate", {"text": ""}, "text", "empty"),
    ("generate", {"text": []}, "text", "empty"),
    ("generate", {"text": ["a", ""]}, "text", "empty"),
    ("generate", {"input_ids": []}, "input_ids", "empty"),
    ("generate", {"input_ids": [[1], []]}, "input_ids", "empty"),
    ("generate", {"text": 5}, "text", "a valid string, or a list of these, got 5"),
    ("generate", {"text": "a", "sampling_params": {"stop": 5}}, "sampling_params.stop", "or a list of these, got 5"),
    ("generate", {"text": ["a", 5]}, "text[1]", "string, got 5"),
    ("generate", {"input_ids": [1, "2"]}, "input_ids[1]", "integer, got '2'"),
    ("generate", {"input_ids": [1, True]}, "input_ids[1]", "integer, got True"),
    ("generate", {"input_ids": [65, BEYOND]}, "input_ids", f"token id {BEYOND} at position 1, ids go from 0 to"),
    ("generate", {"input_ids": [-1]}, "input_ids", "token id -1 at position 0"),
    ("generate", {"input_ids": [2**70]}, "input_ids", "token id 1180591620717411303424"),
    ("generate", {"text": "a" * CONTEXT_LENGTH}, "text", f"{CONTEXT_LENGTH} tokens; the limit is {CONTEXT_LENGTH - 1}"),
    ("generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "got -1"),
    ("generate", {"text": "a", "sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens", "'5'"),
    ("generate", {"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "seed", "differ"),
    ("generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "1 values for 2 prompts"),
    ("generate", {"text": ["a", "b"], "rid": ["x"]}, "rid", "1 ids for 2 prompts"),
    ("generate", {"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "unique"),
    ("generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "[0, 20], got 21"),
    ("generate", {"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len", "got 1"),
    ("generate", {"text": "a", "top_logprobs_num": 1}, "return_logprob", "need return_logprob to be true"),
    ("generate", {"text": "a", "logprob_start_len": 0}, "return_logprob", "need return_logprob to be true"),
    ("generate", {"text": "a", "stream": "yes"}, "stream", "boolean, got 'yes'"),
    ("generate", {"text": "a", "priority": 2**31}, "priority", "less than 2147483648"),
    ("generate", {"text": "a", "image_data": "x.png"}, "image_data", "not supported"),
    ("completion", {}, "prompt", "prompt is required"),
    ("completion", {"prompt": ""}, "prompt", "empty"),
    ("completion", {"prompt": []}, "prompt", "empty"),
    ("completion", {"prompt": [[]]}, "prompt", "empty"),
    ("completion", {"prompt": 5}, "prompt", "string, got 5"),
    ("completion", {"prompt": [1.5]}, "prompt[0]", "integer, got 1.5"),
    ("completion", {"prompt": [BEYOND]}, "prompt", f"token id {BEYOND}"),
    ("completion", {"prompt": "a" * 5000}, "prompt", "prompt has 5000 tokens; the limit is 4095"),
    ("completion", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ("completion", {"prompt": "a", "best_of": 2}, "best_of", "best_of (2) must be 1 or equal n (1)"),
    ("completion", {"prompt": "a", "logprobs": 21}, "logprobs", "logprobs must be in [0, 20], got 21"),
    ("completion", {"prompt": "a", "logprobs": True}, "logprobs", "integer, got True"),
    ("completion", {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens must be an integer in [0, "),
    ("completion", {"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer, got '5'"),
    ("completion", {"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens must be an integer in [0, 16], got 17"),
    ("completion", {"prompt": "a", "rid": 5}, "rid", "string, got 5"),
    ("completion", {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ("chat", {}, "messages", "messages is required"),
    ("chat", {"messages": []}, "messages", "empty"),
    ("chat", {"messages": "hi"}, "messages", "list, got 'hi'"),
    ("chat", {"messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "is required for the role 'user'"),
    ("chat", {"messages": [*MESSAGES, {"role": "alien"}]}, "messages[1].role", "is 'alien'"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string, got 5"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "'image_url'; this model reads text only",
    ),
    ("chat", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages", "messages has 5007 tokens"),
    ("chat", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
    ("chat", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20], got 21"),
    ("chat", {"messages": MESSAGES, "logprobs": 5}, "logprobs", "boolean, got 5"),
    ("chat", {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ("chat", {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1 in a chat, got 0"),
    ("chat", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "in a chat, got 0"),
    ("chat", {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens", "in a chat, got -1"),
    ("chat", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ("completion", {"prompt": "a", "tools": [{"type": "function"}]}, "tools", "not supported"),
    ("chat", {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
    (
        "chat",
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "must be a JSON schema, got None",
    ),
    ("chat", {"messages": MESSAGES, "reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ("chat", {"messages": MESSAGES, "best_of": True}, "best_of", "not supported"),
    ("chat", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message", "with role assistant"),
    ("chat", {"messages": MESSAGES, "max_token": 3}, "max_token", "remove it (got 3); did you mean max_tokens?"),
    ("generate", {"text": "a", "sampling_params": {"max_tokens": 3}}, "max_tokens", "did you mean max_new_tokens?"),
    ("chat", {"messages": MESSAGES, "return_routed_experts": True}, "return_routed_experts", "not supported"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body", "param", "message"), CASES)
def test_a_bad_field_is_refused(
    server: EchoServer, route: str, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    error = error_of(server, PATHS[route], json.dumps({"stream": stream, **body}), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_false_that_would_change_the_prompt_is_not_ignored(server: EchoServer) -> None:
    user, assistant = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    chat: dict[str, Any] = {"messages": [user], "add_generation_prompt": False, "max_tokens": 4}
    assert error_of(server, "/v1/chat/completions", json.dumps(chat), 400)["param"] == "add_generation_prompt"
    continued = {**chat, "messages": [user, assistant], "continue_final_message": True}
    for body in ({**chat, "add_generation_prompt": True}, {**chat, "add_generation_prompt": None}, continued):
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200, body
    text = {"prompt": "a", "add_special_tokens": False}
    assert error_of(server, "/v1/completions", json.dumps(text), 400)["param"] == "add_special_tokens"
    assert server.http.post("/v1/completions", json={**text, "add_special_tokens": True}).status_code == 200


def test_errors_have_openais_codes(server: EchoServer) -> None:
    too_long = error_of(server, "/v1/completions", json.dumps({"prompt": "a" * 5000}), 400)
    assert too_long["code"] == "context_length_exceeded"
    for route, path in PATHS.items():
        error = error_of(server, path, json.dumps({**GOOD[route], "model": "other"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    unsupported = error_of(server, "/v1/completions", json.dumps({"prompt": "a", "suffix": "b"}), 400)
    assert unsupported["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("{", "malformed_json", "not valid JSON"),
        ('{"prompt": "a" 5}', "malformed_json", "character 15"),
        ('{"prompt": "a",}', "malformed_json", "at character 1"),  # 14 up to Python 3.13, 15 before
        ("[]", "malformed_request", "must be a JSON object, got []"),
        ('"hi"', "malformed_request", "must be a JSON object, got 'hi'"),
        ("", "missing_field", "a JSON body is required"),
        (b'{"prompt": "\xff"}', "malformed_json", "not UTF-8 (invalid start byte) at character 12"),
        ("[" * 100_000, "body_too_complex", "100000 levels of nesting; the limit is 64"),
    ],
)
def test_a_malformed_body_is_refused(
    server: EchoServer, path: str, content: str | bytes, code: str, message: str
) -> None:
    error = error_of(server, path, content, 400)
    assert error["code"] == code
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", r'{"prompt": "a\uD800"}'),
        ("/v1/completions", r'{"prompt": "a", "\udc00": 1}'),
        ("/generate", r'{"text": "a", "rid": "\udc00\ud800"}'),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}'),
        ("/tokenize", r'{"prompt": "\ud800"}'),
    ],
)
def test_a_lone_surrogate_is_refused(server: EchoServer, path: str, body: str) -> None:
    error = error_of(server, path, body, 400)
    assert error["code"] == "malformed_json"
    assert "the lone surrogate \\ud" in error["message"]


def test_a_surrogate_pair_is_one_character(server: EchoServer) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/generate", content=r'{"text": "\ud83d\ude00 \\ud800"}', headers=headers)
    assert response.json()["text"] == "😀 \\ud800"


def test_an_error_truncates_a_long_value(server: EchoServer) -> None:
    error = error_of(server, "/v1/completions", json.dumps({"prompt": "a", "max_tokens": "9" * 10_000}), 400)
    assert "(10000 long)" in error["message"]
    assert len(error["message"]) < 300


def test_another_content_type_is_refused(server: EchoServer) -> None:
    response = server.http.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 415
    assert "application/x-www-form-urlencoded" in response.json()["error"]["message"]


def test_unknown_routes_and_methods_are_refused(server: EchoServer) -> None:
    missing = server.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "GET /v1/nothing" in missing.json()["error"]["message"]
    assert missing.json()["error"]["message"].endswith("GET /docs lists them")
    wrong = server.http.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/completions", "POST /v1/completions"),
        ("/v1/files", "sglang-jax batch"),
        ("/v1/batches", "sglang-jax batch"),
        ("/embeddings", "POST /v1/embeddings"),
        ("/v1/filesx", "GET /docs"),
        ("/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean POST /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean POST /tokenize?"),
        ("/healthz", "did you mean GET /health?"),
        ("/" + "tokenize" * 100, "GET /docs"),
    ],
)
def test_the_error_for_another_servers_route_names_ours(server: EchoServer, path: str, use: str) -> None:
    answer = server.http.post(path, json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert message.startswith(f"there is no route POST {cut(path)}: ")
    assert use in message
    for method, route in re.findall(r"(POST|GET) (/v1/[a-z/]+)", message.partition(": ")[2]):
        assert server.http.request(method, route, json={}).status_code != 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_scheduler_keeps_its_status(server: EchoServer, stream: bool) -> None:
    error = error_of(server, "/generate", json.dumps({"input_ids": [CAPACITY_ERROR], "stream": stream}), 500)
    assert (error["code"], error["type"]) == ("kv_capacity_exceeded", "server_error")


def test_a_bad_prompt_fails_only_its_own_batch(server: EchoServer) -> None:
    error_of(server, "/generate", json.dumps({"input_ids": [[65] * 50, [CAPACITY_ERROR]]}), 500)
    assert server.http.post("/generate", json={"text": "a"}).json()["text"] == "a"
    assert server.context.in_flight == {}


def test_a_request_id_in_flight_is_refused(slow_server: EchoServer) -> None:
    body = {"text": "a" * 100, "rid": "taken", "stream": True}
    with slow_server.http.stream("POST", "/generate", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        for again in (body, {"prompt": "a", "rid": "taken"}):
            path = "/generate" if "text" in again else "/v1/completions"
            error = error_of(slow_server, path, json.dumps(again), 400)
            assert (error["param"], "'taken'" in error["message"]) == ("rid", True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_requests(stream: bool) -> None:
    with serve_echo(load_fake_model, max_running_requests=1, max_queued_requests=1) as server:
        body = {"input_ids": [[1, 2, 3]] * 30, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
        response = server.http.post("/generate", json={**body, "stream": stream})
        if stream and response.status_code == 200:  # the first tokens came before the refusal
            error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            error = response.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "service_unavailable")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_refused_by_its_encoding(server: EchoServer, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = server.http.post("/v1/completions", content=zlib.compress(b'{"prompt": "a"}'), headers=headers)
    assert response.status_code == 415
    assert f"Content-Encoding: {encoding}" in response.json()["error"]["message"]
    plain = {**headers, "Content-Encoding": "identity"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=plain).status_code == 200


def test_head_answers_as_get_without_a_body(server: EchoServer) -> None:
    for path, status in (("/", 200), ("/health", 200), ("/v1/models", 200), ("/nowhere", 404), ("/generate", 405)):
        response = server.http.head(path)
        assert (response.status_code, response.content) == (status, b"")


def test_a_trailing_slash_changes_nothing(server: EchoServer) -> None:
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    assert server.http.get("/health/").status_code == server.http.get("/").status_code == 200
    body = {"prompt": "a", "max_tokens": 1}
    for slashes in ("/", "//"):
        answer = server.http.post(f"/v1/completions{slashes}", json=body, follow_redirects=False)
        assert answer.json()["choices"][0]["text"] == "a"
    assert server.http.post("/nowhere/", json=body, follow_redirects=False).status_code == 404

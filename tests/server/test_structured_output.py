"""Grammars over HTTP in the fields of OpenAI, SGLang and vLLM, and refused grammars, on a tiny model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import regex
from helpers.echo_server import EchoServer, serve_echo
from helpers.tiny_models import make_tiny_checkpoint

import sglang_jax
from sglang_jax import Engine
from sglang_jax.config import Backend
from sglang_jax.engine.model_core import load_core, load_text_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "visitors": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "visitors"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a model of random weights would fill it up
}
NAMED = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
BAD = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "intger"}}}}
DOUBLING = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"'
"""Forty rules that expand to a text of 2 to the 40th letters."""

BOMBS = {
    "json_schema": json.dumps({"properties": {f"p{i}": {"pattern": f"^(a|b)*x{i}$"} for i in range(3000)}}),
    "ebnf": "start: r0\n" + "\n".join(f'r{i}: "a" | "b" r{(i + 1) % 4000}' for i in range(4000)),
}
"""One would use up all time, the other the whole stack."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    options: dict[str, Any] = {"backend": Backend.TORCH, "device": "cpu", "dtype": "float32", "max_total_tokens": 2048}
    options |= {"model_path": str(folder), "served_model_name": "tiny", "grammar_timeout": 0.5}
    with serve_echo(load_core, load_text_tokenizer, **options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EchoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **{**GREEDY, **fields})  # type: ignore
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def native(server: EchoServer, prompt: str, **sampling: Any) -> dict[str, Any]:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 60, **sampling}}
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_all_spellings_of_a_schema_give_the_same_answer(server: EchoServer, client: openai.OpenAI) -> None:
    said = chat(client, response_format=NAMED)
    value = json.loads(said)
    assert value["city"] in ("Paris", "Oslo")
    assert 1 <= value["visitors"] <= 99
    for extra in (
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": json.dumps(SCHEMA)},
        {"ebnf": "start: %json " + json.dumps(SCHEMA)},
    ):
        assert chat(client, extra_body=extra) == said, extra
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for sampling in ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}):
        assert native(server, prompt, **sampling)["text"] == said


def test_every_kind_of_grammar_over_every_route(server: EchoServer, client: openai.OpenAI) -> None:
    tags = {"structures": [{"begin": "<a>", "schema": {"enum": [1]}, "end": "</a>"}], "triggers": ["<a>"]}
    for fields, pattern in (
        ({"regex": "[0-9]{3}-x"}, "[0-9]{3}-x"),
        ({"guided_regex": "(ab)+c"}, "(ab)+c"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"ebnf": 'start: "a" "b"'}, "ab"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
        ({"structural_tag": json.dumps({**tags, "type": "structural_tag"})}, "(?s).*"),
    ):
        answer = server.http.post("/v1/completions", json={"prompt": "hi", **GREEDY, **fields}).json()["choices"][0]
        assert re.fullmatch(pattern, answer["text"]) or answer["finish_reason"] == "length", (fields, answer)
        if "response_format" not in fields:
            assert native(server, "hi", **fields)["text"] == answer["text"]
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, response_format=NAMED, **GREEDY) as stream:
        whole = stream.get_final_completion().choices[0].message.content
    assert whole == chat(client, response_format=NAMED)


def test_logprobs_n_stop_and_min_tokens_with_a_grammar(server: EchoServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=NAMED, n=3, seed=4, logprobs=True, top_logprobs=2,
        temperature=1, max_tokens=60,
    )  # fmt: skip
    for choice in answer.choices:
        text = choice.message.content or ""
        assert set(json.loads(text)) == {"city", "visitors"}
        assert choice.logprobs is not None
        spelt = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or [])
        assert spelt.decode() == text
    assert chat(client, extra_body={"regex": "a+ [bc] d+"}, stop=["b", "c"]) in ("a" * k + " " for k in range(60))
    answer_of_least = native(server, "hi", regex="[a-z]*", min_new_tokens=7)
    assert answer_of_least["meta_info"]["completion_tokens"] >= 7


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}},
            "response_format.json_schema.schema",
            "/properties/a/items: Invalid type: intger",
        ),
        ({"guided_regex": "(ab[c"}, "guided_regex", "unclosed character class"),
        ({"structured_outputs": {"grammar": "start: foo\nbar: /x/"}}, "structured_outputs.grammar", "line 1, column 8"),
    ],
)
def test_a_bad_grammar_is_a_400_that_names_the_place(
    server: EchoServer, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        response = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_grammar", "invalid_request_error")
        assert error["param"].startswith(param)
        assert words in error["message"]


def test_a_grammar_bomb_is_refused_and_delays_no_other_request(server: EchoServer) -> None:
    """Other requests are answered while it is checked, also those with a grammar."""
    refused: list[Any] = []

    def bring(fields: dict[str, Any]) -> None:
        refused.append(server.http.post("/generate", json={"text": "hi", "sampling_params": fields}))

    threads = [threading.Thread(target=bring, args=({field: text},)) for field, text in BOMBS.items()]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        assert native(server, "hi", max_new_tokens=4)["meta_info"]["completion_tokens"] == 4
        answered += 1
    for response in refused:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "invalid_grammar"
    assert any("takes more than 0.5 s of processor time" in response.text for response in refused)
    assert answered > len(BOMBS)  # one that waited for a single other would be answered once per ended one
    assert native(server, "hi", regex="ab")["text"] == "ab"


def test_a_grammar_with_an_exponential_expansion_is_accepted(server: EchoServer) -> None:
    """2 to the 40th letters are followed as far as the output reaches."""
    assert set(native(server, "hi", ebnf=DOUBLING, max_new_tokens=9)["text"]) == {"a"}


PAGE = (ROOT / "docs/structured_output.md").read_text()
EXAMPLES = re.findall(r"`POST (\S+)`(?:(?!`POST ).)*?```json\n(.*?)```", PAGE, re.DOTALL)
WANTED = (
    r'(?s)\s*\{\s*"hot"\s*:\s*(true|false)\s*,\s*"degrees"\s*:\s*\d{1,3}\s*\}',
    r'\{"hot":(true|false),"degrees":\d{1,3}\}',
    r'(?s)\s*\[(\s*"(hot|cold)"\s*,?){1,3}\s*\]',
    "yes|no|I would rather not say",
    "[A-Z]{2}-[0-9]{4}",
    r"[0-9]{1,3}( \+ [0-9]{1,3}){1,3}",
    r"(?s).*?(<move>\"(left|right)\"</move>.*)*",
)
"""A pattern that the answer to each of the page's requests matches when it is complete."""


def test_the_requests_of_the_docs_page(server: EchoServer) -> None:
    assert len(EXAMPLES) == PAGE.count("```json") == len(WANTED)
    for (path, body), pattern in zip(EXAMPLES, WANTED, strict=True):
        response = server.http.post(path, json=json.loads(body))
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0] if "choices" in answer else answer
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        reason = choice.get("finish_reason") or choice["meta_info"]["finish_reason"]["type"]
        cut = reason == "length"
        assert regex.fullmatch(pattern, text, partial=cut), (body, text, reason)


def test_the_program_of_the_docs_page(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    folder = server.context.client.model_info.model_path

    def engine(model_path: str) -> Engine:
        assert model_path == "demo"
        return Engine(model_path=folder, backend=Backend.TORCH, device="cpu", max_total_tokens=1024)

    monkeypatch.setattr(sglang_jax, "Engine", engine)
    exec(compile(block, "structured_output.md", "exec"), {})
    assert capsys.readouterr().out in ("Paris\n", "London\n")

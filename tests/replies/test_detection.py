"""Which family a model's templates indicate, and reply formats that checkpoints declare as transformers does."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from replies.test_parser import CODER_REPLIES, HERMES, HERMES_REPLIES, PARIS, Reply, Way, check
from transformers.utils.chat_parsing import parse_response

from sglang_jax.config import ReasoningParser, ServerConfig, ToolCallParser
from sglang_jax.replies import response_template
from sglang_jax.replies.families import CALLS, REASONING, family_of_template, reasoning_of_template
from sglang_jax.server.chat_replies import ReplyFormats

TEMPLATES = {
    "{% if tools %}<tool_call>{% endif %}": ToolCallParser.HERMES,
    "<tool_call>\n<function=x>\n<parameter=y>": ToolCallParser.QWEN3_CODER,
    "{% if tools %}<|python_tag|>": ToolCallParser.LLAMA3,
    '<|start_header_id|>{"name": x, "parameters": {{ a }}}': ToolCallParser.LLAMA3,
    "[AVAILABLE_TOOLS][TOOL_CALLS]": ToolCallParser.MISTRAL,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>": ToolCallParser.DEEPSEEK,
    "<|start|>assistant<|channel|>final<|message|>": ToolCallParser.GPT_OSS,
    "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>": None,
    "{% for m in messages %}": None,
}


@pytest.mark.parametrize(("template", "family"), TEMPLATES.items())
def test_a_template_indicates_its_family(template: str, family: ToolCallParser | None) -> None:
    assert family_of_template(template) is family


def test_a_template_indicates_the_reasoning_format() -> None:
    assert reasoning_of_template("<|im_start|> {{ '</think>' }}") is ReasoningParser.QWEN3
    assert reasoning_of_template("<｜Assistant｜><think>\n{{ x.split('</think>') }}") is ReasoningParser.DEEPSEEK_R1
    assert reasoning_of_template("<|channel|>analysis<|message|>") is ReasoningParser.GPT_OSS
    assert reasoning_of_template("plain") is None


QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
NAMED = {
    **QWEN,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w-]+)\[ARGS\]",
            "close": "[END]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def test_formats_declared_by_checkpoints_are_in_the_table() -> None:
    family = response_template.call_family(QWEN)
    assert family is not None
    for reply in HERMES_REPLIES.values():
        if "<tool_call>[" not in reply.raw:
            check(Way(family), reply)
    reasoning = response_template.reasoning_form(QWEN)
    assert reasoning == REASONING[ReasoningParser.QWEN3]
    named = response_template.call_family(NAMED)
    assert named is not None
    check(Way(named), Reply('so [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[END]', "so", (PARIS,)))
    written = named.forms[0].written
    assert written is not None
    assert (written.begin, written.end) == ("[TOOL_CALLS]{name}[ARGS]", "[END]")


@pytest.mark.parametrize("name", ["good", "two", "around", "escapes", "other order"])
def test_transformers_parses_the_same_replies_the_same(name: str) -> None:
    reply = HERMES_REPLIES[name]
    oracle: dict[str, Any] = parse_response(reply.raw, QWEN, prefix="")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in oracle["tool_calls"]] == list(
        reply.calls
    )
    check(Way(HERMES), reply)


@pytest.mark.parametrize(
    "field",
    [
        {"open_pattern": r"<a>(?P<name>\w+)|<b>", "close": "</a>", "content": "json"},
        {"open_pattern": r"<a.*>", "close": "</a>", "content": "json"},
        {"open": "<a>", "close": "</a>", "content": "xml-inline"},
        {"open": "<a>", "close": "</a>", "content": "json", "content_args": {"unquoted_keys": True}},
        {"open": "<a>", "content": "json"},
        {"open": 5, "close": "</a>", "content": "json"},
    ],
)
def test_declared_formats_outside_the_table_are_ignored(field: dict[str, Any]) -> None:
    assert response_template.call_family({"fields": {"tool_calls": field}}) is None
    assert response_template.call_family({"fields": []}) is None


def formats(template: str = "", own: Any = None, **options: Any) -> ReplyFormats:
    tokenizer: Any = SimpleNamespace(chat_template=template, response_template=own, special_tokens={})
    return ReplyFormats(ServerConfig(**options), tokenizer)


def test_auto_asks_the_checkpoint_then_its_template() -> None:
    assert formats("tools", QWEN).family == response_template.call_family(QWEN)
    assert formats("tools [TOOL_CALLS]").family is CALLS[ToolCallParser.MISTRAL]
    coder = {"fields": {"tool_calls": {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>", "content":
             "xml-inline", "content_args": {"tag_pattern": "<parameter=(?P<key>.)>(?P<value>.)"}}}}  # fmt: skip
    assert formats("tools", coder).family is CALLS[ToolCallParser.QWEN3_CODER]
    assert formats("{{ tools }} unknown").family is None
    assert formats("no such thing").family is CALLS[ToolCallParser.HERMES]
    assert formats("[TOOL_CALLS]", QWEN, tool_call_parser="llama3").family is CALLS[ToolCallParser.LLAMA3]
    assert formats("tools", QWEN, tool_call_parser="none").family is None


def test_reasoning_is_separated_if_asked() -> None:
    assert formats("</think>", QWEN).reasoning is None
    assert formats("</think>", reasoning_parser="auto").reasoning is REASONING[ReasoningParser.QWEN3]
    assert formats("", QWEN, reasoning_parser="auto").reasoning == REASONING[ReasoningParser.QWEN3]
    assert formats("", reasoning_parser="gpt-oss").reasoning is REASONING[ReasoningParser.GPT_OSS]


def test_qwen_coders_replies_are_not_json() -> None:
    """The two families share an opening tag; that they are distinguished is not an accident."""
    raw = CODER_REPLIES["good"].raw
    check(Way(HERMES), Reply(raw, raw))
    assert "json" not in json.dumps(raw)

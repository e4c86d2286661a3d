"""Tools, calls and results in chat templates of several kinds, as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import byte_tokenizer
from helpers.tiny_models import CHAT_TEMPLATE

from sglang_jax.checkpoint import resolve_model
from sglang_jax.checkpoint.chat_tools import ArgumentForm, is_variable, learn_tools
from sglang_jax.checkpoint.tokenizer import Tokenizer, load_tokenizer

TOOL = {"type": "function", "function": {"name": "get", "description": "d<|im_end|>", "parameters": {"type": "object"}}}
ARGUMENTS = '{"key":  "ä"}'
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
]

BODY = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}ARGUMENTS{% endfor %}{% endfor %}"
)
TELLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
AS_OBJECT = TELLS + BODY.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_TEXT = TELLS + BODY.replace("ARGUMENTS", "{{ '```json' + c.function.arguments }}")
PRINTED = TELLS + BODY.replace("ARGUMENTS", "{{ c.function.arguments }}")
NO_TOOLS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + NO_TOOLS


@pytest.mark.parametrize(
    ("template", "shown", "form"),
    [
        (AS_OBJECT, True, ArgumentForm.OBJECT),
        (AS_TEXT, True, ArgumentForm.TEXT),
        (PRINTED, True, ArgumentForm.TEXT),
        (NO_TOOLS, False, ArgumentForm.NONE),
        (CHAT_TEMPLATE, False, ArgumentForm.NONE),
        ("{{ raise_exception('never') }}", False, ArgumentForm.NONE),
    ],
)
def test_how_templates_use_tools_is_detected(tmp_path: Path, template: str, shown: bool, form: ArgumentForm) -> None:
    support = learn_tools(byte_tokenizer(tmp_path, template)._chat.render_probe)
    assert (support.renders_tools, support.arguments) == (shown, form)


def test_arguments_have_the_form_that_the_template_takes(tmp_path: Path) -> None:
    tool = json.dumps({**TOOL, "function": {**TOOL["function"], "description": "d"}})
    tools = [json.loads(tool)]
    said = "<user>a<assistant>b"
    for template, call in (
        (AS_OBJECT, '<call>get {"key": "ä"}'),
        (AS_TEXT, "<call>get ```json" + ARGUMENTS),
        (PRINTED, "<call>get " + ARGUMENTS),
    ):
        text = byte_tokenizer(tmp_path, template).render_chat(TURNS, tools=tools)
        assert text == f"{tool}{said}{call}<tool>7"
        as_object = [dict(turn) for turn in TURNS]
        function = {"name": "get", "arguments": json.loads(ARGUMENTS)}
        as_object[1]["tool_calls"] = [{**CALL, "function": function}]
        again = byte_tokenizer(tmp_path, template).render_chat(as_object, tools=tools)
        assert again == text.replace(ARGUMENTS, '{"key": "ä"}')


def test_a_template_without_tools_gets_a_system_message_about_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, NO_TOOLS)
    text = tokenizer.render_chat(TURNS, tools=[{"type": "function", "function": {"name": "get"}}])
    system, _, rest = text.partition("<user>")
    assert system.startswith("<system>")
    assert '{"type": "function", "function": {"name": "get"}}' in system
    call = '<tool_call>\n{"name": "get", "arguments": {"key":  "ä"}}\n</tool_call>'
    assert rest == f"a<assistant>b\n{call}<tool>7"
    begun = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert tokenizer.render_chat(begun, tools=[TOOL]).startswith("<system>Be brief.\n\nYou may call")
    without = byte_tokenizer(tmp_path, NO_SYSTEM).render_chat(TURNS[:1], tools=[TOOL])
    assert without.startswith("<user>You may call")
    assert without.endswith("\n\na")
    assert tokenizer.render_chat(TURNS[:1]) == "<user>a"


def test_control_tokens_in_tools_calls_and_variables_are_text(tmp_path: Path) -> None:
    """Text in tool descriptions and tool results cannot end a turn."""
    tokenizer = byte_tokenizer(tmp_path, AS_OBJECT + "{{ mood[0] }}<|im_end|>")
    turns = [dict(turn) for turn in TURNS]
    turns[1]["tool_calls"] = [{**CALL, "function": {"name": "get", "arguments": '{"key": "<|im_end|>"}'}}]
    turns[2]["content"] = "<|im_end|>"
    text = tokenizer.render_chat(turns, tools=[TOOL], variables={"mood": ["<|im_end|>"]})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.special_tokens["<|im_end|>"]) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).count("<|im_end|>") == 5


@pytest.mark.parametrize("template", [AS_OBJECT, AS_TEXT, NO_TOOLS])
def test_control_tokens_in_escapes_and_in_names_are_text(tmp_path: Path, template: str) -> None:
    """JSON escapes are decoded before control tokens are marked, and names are treated like other text."""
    tokenizer = byte_tokenizer(tmp_path, template + "<|im_end|>")
    named = {"type": "object", "properties": {"<|im_end|>": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get", "parameters": named}}
    for arguments in (
        '{"key": "\\u003c|im_end|\\u003e<|im_end|>"}',
        '{"\\u003c|im_end|>": "<|im_end|>"}',
        {"<|im_end|>": ["<|im_end|>"]},
        '{"a": ' + "[" * 400 + '"<|im_end|>"' + "]" * 400 + "}",
    ):
        turns = [dict(turn) for turn in TURNS]
        turns[1]["tool_calls"] = [{**CALL, "function": {"name": "get", "arguments": arguments}}]
        text = tokenizer.render_chat(turns, tools=[tool])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.count(tokenizer.special_tokens["<|im_end|>"]) == 1
        assert tokenizer.decode(ids, skip_special_tokens=False).count("<|im_end|>") > 2


def test_variables_of_a_template(tmp_path: Path) -> None:
    template = (
        "{{ 'on' if enable_thinking else 'off' }} {{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(tmp_path, template)
    bos = tokenizer.decode([tokenizer.bos_token_id or 0], skip_special_tokens=False)
    assert tokenizer.render_chat(TURNS[:1]) == f"off {bos}a"
    assert tokenizer.render_chat(TURNS[:1], variables={"enable_thinking": True, "bos_token": "x"}) == f"on {bos}a"
    assert is_variable("enable_thinking")
    for name in ("messages", "tools", "eos_token", "add_generation_prompt", "a-b", "", "1a", "chat_template"):
        assert not is_variable(name)


def test_the_tool_use_template_is_chosen_of_two(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, {"default": NO_TOOLS, "tool_use": AS_OBJECT})
    assert tokenizer.render_chat(TURNS[:1]) == "<user>a"
    assert tokenizer.render_chat(TURNS[:1], tools=[{"type": "function", "function": {"name": "get"}}]).startswith("{")
    assert tokenizer.chat_template == AS_OBJECT


def test_tools_are_in_the_prompt_of_the_embedded_model() -> None:
    tokenizer: Tokenizer = load_tokenizer(resolve_model("demo"))
    text = tokenizer.render_chat(TURNS, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nYou may call")
    assert "<tools>" in text
    assert "<tool_call>\n" in text
    assert text.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")


def test_transformers_renders_the_same(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, AS_OBJECT)
    plain = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    turns = [dict(turn) for turn in TURNS]
    turns[1]["tool_calls"] = [{**CALL, "function": {"name": "get", "arguments": json.loads(ARGUMENTS)}}]
    oracle = tokenizer._files.apply_chat_template(turns, tools=[plain], tokenize=False)
    assert tokenizer.render_chat(TURNS, tools=[plain], add_generation_prompt=False) == oracle

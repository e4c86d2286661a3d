"""Whether a template takes a message's content as text or as a list of parts, and that it gets that form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import chat_templates
from helpers.chat_templates import byte_tokenizer
from helpers.tiny_models import CHAT_TEMPLATE
from transformers import PreTrainedTokenizerFast

from sglang_jax.server.openai_schema import ChatBody
from tests.helpers.chats import rendered

PARTS = "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
EACH = "{% for m in messages %}{{ '<' + m.role + '>' }}"

GUARD = EACH + PARTS + "{% endfor %}"
"""As in Llama Guard 3 and 4."""

GUARD_STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
)
GUARD_STRICT += "{% endif %}{{ '<' + m.role + '>' }}" + PARTS + "{% endfor %}"

FIRST_PART = EACH + "{{ m.content[0].text }}{% endfor %}"

SYSTEM_TEXT = EACH + "{% if m.role == 'system' %}{{ m.content }}{% else %}" + PARTS + "{% endif %}{% endfor %}"

ASSISTANT_TEXT = (
    EACH + "{% if m.role == 'assistant' %}{{ m.content + '' }}{% else %}" + PARTS + "{% endif %}{% endfor %}"
)

EITHER = EACH + "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}{% endfor %}"

OF_PARTS = {
    "guard": (GUARD, {"system", "user", "assistant"}),
    "strict": (GUARD_STRICT, {"user", "assistant"}),
    "first part": (FIRST_PART, {"system", "user", "assistant"}),
    "system's text": (SYSTEM_TEXT, {"user", "assistant"}),
    "assistant's text": (ASSISTANT_TEXT, {"system", "user"}),
    "either": (EITHER, set()),
    "tiny": (CHAT_TEMPLATE, set()),
    "mistral": (chat_templates.MISTRAL, set()),
}


def turns(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"what {role} says"} for role in roles]


CONVERSATIONS = [["user"], ["user", "assistant", "user"], ["system", "user"]]
CASES = [(name, roles) for name in OF_PARTS for roles in CONVERSATIONS if (name, roles[0]) != ("strict", "system")]


@pytest.mark.parametrize(("name", "roles"), CASES)
def test_every_message_is_in_the_prompt(tmp_path: Path, name: str, roles: list[str]) -> None:
    """Transformers renders the same from the form that the template takes."""
    template, of_parts = OF_PARTS[name]
    tokenizer = byte_tokenizer(tmp_path, template)
    conversation = turns(*roles)
    text = tokenizer.render_chat(conversation)
    assert all(message["content"] in text for message in conversation)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    formed = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in of_parts
        else message
        for message in conversation
    ]
    assert text == theirs.apply_chat_template(
        formed, chat_template=template, tokenize=False, add_generation_prompt=True
    )


def asked(tokenizer: Any, content: Any, **fields: Any) -> str:
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": content}], **fields})
    return rendered(tokenizer, body).text


TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(("name", "together"), [("guard", "onetwo"), ("either", "one\ntwo"), ("tiny", "one\ntwo")])
def test_parts_stay_parts_where_the_template_takes_them(tmp_path: Path, name: str, together: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, OF_PARTS[name][0])
    assert together in asked(tokenizer, TWO)
    assert asked(tokenizer, TWO[:1]) == asked(tokenizer, "one")


DEFAULT_OF_TEXT = EACH + "{{ m.content + '' }}{% endfor %}"
NO_WORD_FOR_IT = EACH + "{% for p in m.content %}{{ (p.values() | list)[1] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(("alone", "with_tools"), [(DEFAULT_OF_TEXT, GUARD), (GUARD, DEFAULT_OF_TEXT)])
def test_a_template_for_tools_may_take_another_form(tmp_path: Path, alone: str, with_tools: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, {"default": alone, "tool_use": "{{ tools[0].function.name }}" + with_tools})
    tools = [{"type": "function", "function": {"name": "get"}}]
    conversation = turns("user", "assistant", "user")
    told = "<user>what user says<assistant>what assistant says<user>what user says"
    assert tokenizer.render_chat(conversation) == told
    assert tokenizer.render_chat(conversation, tools=tools) == "get" + told


def test_a_template_may_print_whole_parts(tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path, NO_WORD_FOR_IT).render_chat(turns("user")) == "<user>what user says"


def test_missing_tool_support_is_reported_before_parts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, GUARD_STRICT)  # its template knows neither tools nor a system message
    tools = [{"type": "function", "function": {"name": "get"}}]
    assert tokenizer.render_chat([{"role": "user", "content": TWO}], tools=tools).endswith("</tool_call>\n\none\ntwo")


def test_control_tokens_in_parts_are_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, GUARD)
    ids = tokenizer.encode(asked(tokenizer, [{"type": "text", "text": "a<|im_end|>"}, *TWO]), add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "<user>a<|im_end|>onetwo"


def test_a_message_of_parts_can_be_continued(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, GUARD)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is: "}]
    body = ChatBody.model_validate(
        {"model": "m", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    )
    assert rendered(tokenizer, body).text == "<user>a<assistant>It is: "

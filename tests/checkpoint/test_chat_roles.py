"""Which roles a chat template is found to know, and what is said of the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import chat_templates
from helpers.chat_templates import byte_tokenizer
from helpers.tiny_models import CHAT_TEMPLATE

from sglang_jax.checkpoint import Tokenizer, load_tokenizer, resolve_model
from sglang_jax.checkpoint.chat_roles import OPENAI_ROLES
from sglang_jax.errors import ParameterError, RequestError

ALL = list(OPENAI_ROLES)
PLAIN = ["system", "developer", "user", "assistant"]
TEMPLATES = {
    "tiny": (CHAT_TEMPLATE, PLAIN),
    "prints any": (chat_templates.PRINTS_ANY, ALL),
    "llama": (chat_templates.LLAMA, [*ALL, "ipython"]),
    "gemma": (chat_templates.GEMMA, ["user", "assistant"]),
    "mistral": (chat_templates.MISTRAL, [*PLAIN, "tool"]),
    "drops system": (chat_templates.DROPS_SYSTEM, ["user", "assistant"]),
    "after a call": (chat_templates.AFTER_CALL, [*PLAIN, "tool"]),
    "after a call with an object": (chat_templates.AFTER_OBJECT_CALL, [*PLAIN, "tool"]),
    "spelled": (chat_templates.SPELLED, [*ALL, "chatbot", "narrator"]),
    "parts alone": (chat_templates.PARTS, ALL),
    "not Jinja": ("{% for %}", ALL),
}


@pytest.mark.parametrize(("template", "roles"), TEMPLATES.values(), ids=TEMPLATES)
def test_roles_that_a_template_knows(tmp_path: Path, template: str, roles: list[str]) -> None:
    tokenizer = byte_tokenizer(tmp_path, template)
    tokenizer.check_roles(roles)
    for other in {*ALL, "ipython", "chatbot", "narrator", "model", "alien", "User", ""} - set(roles):
        with pytest.raises(ParameterError) as caught:
            tokenizer.check_roles(["user", "assistant", other])
        assert caught.value.param == "messages[2].role"
        assert caught.value.message == (
            f"messages[2].role is {other!r}, which the model's chat template does not know; it knows "
            + ", ".join(roles)
        )


def test_roles_of_the_embedded_model() -> None:
    tokenizer = load_tokenizer(resolve_model("demo"))
    tokenizer.check_roles(ALL)
    with pytest.raises(ParameterError, match="'alien'"):
        tokenizer.check_roles(["alien"])


def test_rendering_checks_the_roles(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, chat_templates.PRINTS_ANY)
    with pytest.raises(ParameterError, match=re.escape("messages[1].role is 'alien'")):
        tokenizer.render_chat([{"role": "user", "content": "a"}, {"role": "alien", "content": "b"}])


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"content": "a"}, "None"),
        ({"role": 5, "content": "a"}, "5"),
        ({"role": ["user"], "content": "a"}, "['user']"),
        ({"role": "u" * 10_000, "content": "a"}, "'uuuuuuuuuuuu...uuuuuuuuuuuuu'"),
    ],
)
def test_what_is_no_role(tmp_path: Path, message: dict[str, object], seen: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, chat_templates.PRINTS_ANY)
    with pytest.raises(ParameterError, match=re.escape(f"messages[0].role is {seen}, which")):
        tokenizer.render_chat([message])


def rendered(tokenizer: Tokenizer, *turns: tuple[str, str]) -> str:
    return tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])


def test_a_developer_is_the_system_where_the_template_does_not_name_it(tmp_path: Path) -> None:
    turns = (("developer", "be brief"), ("user", "hi"))
    for template in (chat_templates.PRINTS_ANY, chat_templates.LLAMA, chat_templates.MISTRAL, CHAT_TEMPLATE):
        tokenizer = byte_tokenizer(tmp_path, template)
        assert rendered(tokenizer, *turns) == rendered(tokenizer, ("system", "be brief"), turns[1])
        assert "be brief" in rendered(tokenizer, *turns)
    named = byte_tokenizer(tmp_path, chat_templates.AFTER_CALL)
    assert rendered(named, *turns) == "<developer>be brief<user>hi"


@pytest.mark.parametrize("template", [chat_templates.GEMMA, chat_templates.MISTRAL], ids=["gemma", "mistral"])
def test_what_else_a_template_refuses_stays_as_it_was(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, template)
    assert rendered(tokenizer, ("user", "a"), ("assistant", "b"), ("user", "c"))
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: .*must alternate") as caught:
        rendered(tokenizer, ("user", "a"), ("user", "b"))
    assert caught.value.param == "messages"


def test_no_default_among_several_templates(tmp_path: Path) -> None:
    """Such a tokenizer is loaded; a chat is refused with the reason."""
    tokenizer = byte_tokenizer(tmp_path, {"rag": "x", "tool_use": "y"})
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: .*no default"):
        rendered(tokenizer, ("user", "a"))
    one_of_two = byte_tokenizer(tmp_path, {"default": chat_templates.GEMMA, "tool_use": chat_templates.LLAMA})
    with pytest.raises(ParameterError, match=r"it knows user, assistant$"):
        rendered(one_of_two, ("system", "a"))


def test_without_a_template_roles_are_not_the_reason(tmp_path: Path) -> None:
    hugging_face = byte_tokenizer(tmp_path, chat_templates.GEMMA)._hugging_face
    hugging_face.chat_template = None
    tokenizer = Tokenizer(hugging_face, "test")
    tokenizer.check_roles(["alien"])
    with pytest.raises(RequestError, match="no chat template"):
        rendered(tokenizer, ("alien", "a"))

"""Which roles a chat template is found to know, and the errors for other roles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import chat_templates
from helpers.chat_templates import byte_tokenizer
from helpers.tiny_models import CHAT_TEMPLATE

from sglang_jax.checkpoint import resolve_model
from sglang_jax.checkpoint.chat_roles import OPENAI_ROLES
from sglang_jax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sglang_jax.errors import ParameterError, RequestError

ALL = list(OPENAI_ROLES)
PLAIN = ["system", "developer", "user", "assistant"]
OTHERS = {*ALL, "ipython", "chatbot", "narrator", "critic", "judge", "observation", "endoftext", "im_start", "im_end"}
OTHERS |= {"model", "alien", "User", "USER", ""}


def naming(condition: str) -> str:
    """A template that prints any role, and has special text for one."""
    return "{% for m in messages %}" + condition + "!{% endif %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"


def words_as(text: str) -> str:
    """A template that prints only the messages of users and assistants."""
    return "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ " + text + " }}{% endif %}{% endfor %}"


TEMPLATES = {
    "tiny": (CHAT_TEMPLATE, PLAIN),
    "prints any": (chat_templates.PRINTS_ANY, ALL),
    "llama": (chat_templates.LLAMA, [*ALL, "ipython"]),
    "gemma": (chat_templates.GEMMA, ["user", "assistant"]),
    "mistral": (chat_templates.MISTRAL, [*PLAIN, "tool"]),
    "system first": (chat_templates.SYSTEM_FIRST, ALL),
    "answered": (chat_templates.ANSWERED, PLAIN),
    "recurses": (chat_templates.RECURSES, [*PLAIN, "function"]),
    "drops system": (chat_templates.DROPS_SYSTEM, ["user", "assistant"]),
    "after a call": (chat_templates.AFTER_CALL, [*PLAIN, "tool"]),
    "after a call with an object": (chat_templates.AFTER_OBJECT_CALL, [*PLAIN, "tool"]),
    "spelled": (chat_templates.SPELLED, [*ALL, "chatbot", "narrator"]),
    "name first": (naming("{% if 'critic' == m.role or 'judge' != m['role'] %}"), [*ALL, "critic", "judge"]),
    "name first, got": (naming("{% if 'judge' == messages[0].get('role') %}"), [*ALL, "judge"]),
    "got": (naming("{% if m.get('role') == 'judge' or m.get('role', '') in ['critic'] %}"), [*ALL, "judge", "critic"]),
    "kept": (naming("{% set r = m.role %}{% if r == 'critic' %}"), [*ALL, "critic"]),
    "kept key": (naming("{%- set r = m['role'] -%}{% if 'critic' == r %}"), [*ALL, "critic"]),
    "kept, got": (
        naming("{% set r = m.get('role') or '' %}{% if r not in ('critic', 'judge') %}"),
        [*ALL, "critic", "judge"],
    ),
    "another's": (naming("{% set r = m.role %}{% if m.r == 'critic' or m.content == 'judge' and r %}"), ALL),
    "a condition kept": (naming("{% set r = m.role == 'critic' %}{% if r == 'judge' %}"), [*ALL, "critic"]),
    "upper": (naming("{% if m.role|upper == 'USER' or m.role.upper() == 'CRITIC' %}"), [*ALL, "critic"]),
    "upper behind": (naming("{% if 'USER' == (m['role'] | trim) | upper %}"), ALL),
    "upper kept": (naming("{% set r = m.role|upper %}{% if r in ['USER', 'JUDGE'] %}"), [*ALL, "judge"]),
    "lower words": (words_as("m.content|lower"), ["user", "assistant"]),
    "upper words": (words_as("m.content|upper"), ["user", "assistant"]),
    "users alone": (words_as("m.content if m.role == 'user' else ''"), ["user", "assistant"]),
    "parts alone": (chat_templates.PARTS, ALL),
    "not Jinja": ("{% for %}", ALL),
}


@pytest.mark.parametrize(("template", "roles"), TEMPLATES.values(), ids=TEMPLATES)
def test_roles_that_a_template_knows(tmp_path: Path, template: str, roles: list[str]) -> None:
    tokenizer = byte_tokenizer(tmp_path, template)
    tokenizer.check_roles(roles)
    for other in OTHERS - set(roles):
        with pytest.raises(ParameterError) as caught:
            tokenizer.check_roles(["user", "assistant", other])
        assert caught.value.param == "messages[2].role"
        assert caught.value.message == (
            f"messages[2].role is {other!r}, which the model's chat template does not support; supported: "
            + ", ".join(roles)
        )


@pytest.mark.parametrize(
    ("template", "further"),
    [
        (chat_templates.TOKEN_OF_ROLE, ", observation"),
        (chat_templates.TOKEN_BEFORE_ROLE, ""),
        (chat_templates.PRINTS_ANY, ""),
        (words_as("'<|' + m.role + '|>' + m.content"), None),
    ],
    ids=["tokens of roles", "ChatML", "prints any", "tokens of some"],
)
def test_roles_that_are_tokens(tmp_path: Path, template: str, further: str | None) -> None:
    """Where any role is printed as a token. Tokens that end a message or a sequence are not roles."""
    tokenizer = byte_tokenizer(tmp_path, template, ("<|user|>", "<|observation|>", "[MASK]", "<|two words|>"))
    with pytest.raises(ParameterError) as caught:
        tokenizer.check_roles(["alien"])
    listed = "user, assistant" if further is None else ", ".join(ALL) + further
    assert caught.value.message.endswith(f"supported: {listed}")
    if further:
        assert rendered(tokenizer, ("observation", "a")) == "<|im_start|><|observation|>\na<|im_end|>"


def test_a_template_with_infinite_recursion_is_an_error(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, chat_templates.RECURSES)
    assert rendered(tokenizer, ("user", "a")) == "<user>a"
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: maximum recursion") as caught:
        rendered(tokenizer, ("user", "loop"))
    assert caught.value.param == "messages"


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
def test_values_that_are_not_roles_are_refused(tmp_path: Path, message: dict[str, object], seen: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, chat_templates.PRINTS_ANY)
    with pytest.raises(ParameterError, match=re.escape(f"messages[0].role is {seen}, which")):
        tokenizer.render_chat([message])


def rendered(tokenizer: Tokenizer, *turns: tuple[str, str]) -> str:
    return tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])


def test_developer_means_system_where_the_template_does_not_name_it(tmp_path: Path) -> None:
    turns = (("developer", "be brief"), ("user", "hi"))
    for template in (chat_templates.PRINTS_ANY, chat_templates.LLAMA, chat_templates.MISTRAL, CHAT_TEMPLATE):
        tokenizer = byte_tokenizer(tmp_path, template)
        assert rendered(tokenizer, *turns) == rendered(tokenizer, ("system", "be brief"), turns[1])
        assert "be brief" in rendered(tokenizer, *turns)
    named = byte_tokenizer(tmp_path, chat_templates.AFTER_CALL)
    assert rendered(named, *turns) == "<developer>be brief<user>hi"


@pytest.mark.parametrize("template", [chat_templates.GEMMA, chat_templates.MISTRAL], ids=["gemma", "mistral"])
def test_other_errors_of_a_template_are_unchanged(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, template)
    assert rendered(tokenizer, ("user", "a"), ("assistant", "b"), ("user", "c"))
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: .*must alternate") as caught:
        rendered(tokenizer, ("user", "a"), ("user", "b"))
    assert caught.value.param == "messages"


def test_several_templates_without_a_default_refuse_chats(tmp_path: Path) -> None:
    """Such a tokenizer is loaded; a chat is refused with the reason."""
    tokenizer = byte_tokenizer(tmp_path, {"rag": "x", "tool_use": "y"})
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: .*no default"):
        rendered(tokenizer, ("user", "a"))
    one_of_two = byte_tokenizer(tmp_path, {"default": chat_templates.GEMMA, "tool_use": chat_templates.LLAMA})
    with pytest.raises(ParameterError, match=r"supported: user, assistant$"):
        rendered(one_of_two, ("system", "a"))


def test_without_a_template_the_error_does_not_blame_roles(tmp_path: Path) -> None:
    hugging_face = byte_tokenizer(tmp_path, chat_templates.GEMMA)._files
    hugging_face.chat_template = None
    tokenizer = Tokenizer(hugging_face, "test")
    tokenizer.check_roles(["alien"])
    with pytest.raises(RequestError, match="no chat template"):
        rendered(tokenizer, ("alien", "a"))

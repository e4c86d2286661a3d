"""As what a chat template takes the content of a message: text, or a list of parts.

Templates do not say it, so it is found out as roles are (`chat_roles.py`). A template that goes through parts, such as
Llama Guard's, shows nothing of a text; most others fail on a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_jax.checkpoint.chat_roles import OPENAI_ROLES, Message, is_heard

_ROLES = ("user", *(role for role in OPENAI_ROLES if role != "user"))
"""The user's form comes first: most conversations of the others hold messages of a user."""


class JoinedParts(str):
    """The text of a message that its client sent in parts: a line for each of `parts`, which a template may take."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> JoinedParts:
        parts = tuple(parts)
        joined = super().__new__(cls, "\n".join(parts))
        joined.parts = parts
        return joined


@dataclass(frozen=True, slots=True)
class ContentForms:
    """`of_parts`: the roles whose messages are lists of parts; other roles than OpenAI's are like the user."""

    of_parts: frozenset[str] = frozenset()

    def formed(self, message: Message) -> Message:
        """The message in the form that the template takes. Parts that are not text stay as they are."""
        role = message.get("role")
        content = message.get("content")
        takes_parts = (role if role in _ROLES else "user") in self.of_parts
        if isinstance(content, str) and takes_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not takes_parts and _are_texts(content):
            return {**message, "content": text_of(content)}
        return message


def in_parts(message: Message) -> Message:
    """The message with its client's parts as a list of them."""
    content = message.get("content")
    if not isinstance(content, JoinedParts):
        return message
    return {**message, "content": [{"type": "text", "text": text} for text in content.parts]}


def text_of(content: object) -> str:
    """A message's words: its text, or those of its parts in lines of their own."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else str(content)


def _are_texts(parts: list[object]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def learn_contents(render: Callable[[Sequence[Message]], str]) -> ContentForms:
    """Tries texts, then parts, for each of OpenAI's roles.

    **Arguments:** `render` gives the text of a conversation as it is given, or raises `RequestError`.
    """
    forms = ContentForms()
    for role in _ROLES:
        tried = ContentForms(forms.of_parts | {role})
        if not _shows(role, forms, render) and _shows(role, tried, render):
            forms = tried
    return forms


def _shows(role: str, forms: ContentForms, render: Callable[[Sequence[Message]], str]) -> bool:
    return is_heard(role, lambda conversation: render([forms.formed(message) for message in conversation]))

"""Whether a chat template takes the content of a message as text, or as a list of parts.

This is found out by trial renderings, as for roles (`chat_roles.py`). A template that loops over parts, such as Llama
Guard's, renders nothing of a text; most others fail on a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_jax.checkpoint.chat_roles import OPENAI_ROLES, Message, is_heard

_ROLES = ("user", *(role for role in OPENAI_ROLES if role != "user"))
"""`user` is tried first, because most trial conversations for the other roles have a user's message."""


class JoinedParts(str):
    """The text of a message that a client sent as a list of parts, joined by newlines; keeps the `parts` too."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> JoinedParts:
        parts = tuple(parts)
        joined = super().__new__(cls, "\n".join(parts))
        joined.parts = parts
        return joined


@dataclass(frozen=True, slots=True)
class ContentForms:
    """`of_parts`: roles whose content is a list of parts. Roles other than OpenAI's are treated as `user`."""

    of_parts: frozenset[str] = frozenset()

    def formed(self, message: Message) -> Message:
        """Returns the message with its content as the template takes it. Lists with parts that are not text are not
        changed."""
        role = message.get("role")
        content = message.get("content")
        takes_parts = (role if role in _ROLES else "user") in self.of_parts
        if isinstance(content, str) and takes_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not takes_parts and _are_texts(content):
            return {**message, "content": text_of(content)}
        return message


def in_parts(message: Message) -> Message:
    """Returns the message with `JoinedParts` content as a list of parts again."""
    content = message.get("content")
    if not isinstance(content, JoinedParts):
        return message
    return {**message, "content": [{"type": "text", "text": text} for text in content.parts]}


def text_of(content: object) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else str(content)


def _are_texts(parts: list[object]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def learn_contents(render: Callable[[Sequence[Message]], str]) -> ContentForms:
    """Tries text, then parts, for each of OpenAI's roles. `render` returns the text of a conversation, or raises
    `RequestError`."""
    forms = ContentForms()
    for role in _ROLES:
        tried = ContentForms(forms.of_parts | {role})
        if not _shows(role, forms, render) and _shows(role, tried, render):
            forms = tried
    return forms


def _shows(role: str, forms: ContentForms, render: Callable[[Sequence[Message]], str]) -> bool:
    return is_heard(role, lambda conversation: render([forms.formed(message) for message in conversation]))

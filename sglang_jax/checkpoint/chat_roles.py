"""Which roles a chat template knows. Templates do not say it, so it is found out: by rendering conversations that hold
the role, and looking for what it said."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sglang_jax.errors import ParameterError, RequestError

OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's messages, in the order in which errors list them."""

Message = dict[str, object]

_SAID = "Qz7probe"
"""What the role under trial says. Letters and digits alone, so that no template's quoting changes it."""

_CALL_ID = "callprobe"
"""Of nine letters, as Mistral's templates demand."""

_COMPARED = re.compile(
    r"""role['"]?\]?(?:\s*\|\s*\w+)*\s*(?:[=!]=|(?:not\s+)?in\b)\s*[\[(]?((?:\s*['"][\w-]+['"]\s*,?)+)"""
)
"""The names in `message['role'] == 'x'`, `message.role|lower in ["x", "y"]` and the like."""


@dataclass(frozen=True, slots=True)
class ChatRoles:
    """What roles messages may have. With `developer_is_system`, a developer's message is rendered as the system's:
    OpenAI's newer name of it, which few models were trained on."""

    known: tuple[str, ...]
    developer_is_system: bool = False

    def check(self, roles: Sequence[object]) -> None:
        """Raises `ParameterError` for the first role that is not known, naming those that are."""
        for number, role in enumerate(roles):
            if role not in self.known:
                path = f"messages[{number}].role"
                raise ParameterError(
                    f"{path} is {reprlib.repr(role)}, which the model's chat template does not know; it knows "
                    + ", ".join(self.known),
                    param=path,
                )

    def rendered_as(self, role: object) -> object:
        """The role that the template is given."""
        return "system" if role == "developer" and self.developer_is_system else role


def learn_roles(template: str, render: Callable[[Sequence[Message]], str]) -> ChatRoles:
    """Tries OpenAI's roles, and those that the template compares a role with, such as Llama's `ipython`.

    A role is known if some conversation that holds it renders with what the role said. Many templates print any role
    as it is, so others are not tried: the model was not trained on them. For the same reason `developer` is its own
    role only where the template names it.

    **Arguments:** `render` gives a conversation's text, or raises `RequestError` if the template refuses it.
    """
    named = [name for names in _COMPARED.findall(template) for name in re.findall(r"[\w-]+", names)]
    own = [role for role in OPENAI_ROLES if role != "developer" or role in named]
    candidates = list(dict.fromkeys([*own, *named]))
    # A template that shows nobody's words (it takes lists of parts alone, say) tells nothing; let it decide by itself.
    known = {role for role in candidates if _is_known(role, render)} or set(candidates)
    developer_is_system = "developer" not in known and "system" in known
    if developer_is_system:
        known.add("developer")
    in_order = dict.fromkeys([*OPENAI_ROLES, *candidates])
    return ChatRoles(tuple(role for role in in_order if role in known), developer_is_system)


def _is_known(role: str, render: Callable[[Sequence[Message]], str]) -> bool:
    for conversation in _probes(role):
        try:
            if _SAID in render(conversation):
                return True
        except RequestError:
            continue
    return False


def _probes(role: str) -> Iterator[list[Message]]:
    """Conversations that hold the role where it belongs, or anywhere if it is none of OpenAI's. Not elsewhere: Gemma's
    template, which has no system, prints one that stands in the assistant's place."""
    user: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": "b"}
    said: Message = {"role": role, "content": _SAID, "name": "probe", "tool_call_id": _CALL_ID}
    if role not in ("tool", "function"):
        yield [said]
        yield [said, user]
    if role not in ("system", "developer", "user", "tool", "function"):
        yield [user, said]
    if role not in ("system", "developer", "user", "assistant"):
        yield [user, _tool_call({}), said]  # templates take a call's arguments as an object
        yield [user, _tool_call("{}"), said]  # or as text
        yield [user, answer, said]


def _tool_call(arguments: object) -> Message:
    function = {"name": "probe", "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}

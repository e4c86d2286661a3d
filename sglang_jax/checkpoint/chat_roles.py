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

_MADE_UP = "qz7role"
"""A role that no template names."""

_READ = r"""role\b|\[\s*['"]role['"]\s*\]|\bget\(\s*['"]role['"][^()]*\)"""
"""The end of `message.role`, `message['role']` and `message.get('role')`."""

_OWNER = r"\(*\s*[\w.]*(?:\[[^\][]*\][\w.]*)?"
"""What stands before it: `message`, `messages[0]` and the like."""

_FILTERS = r"(?P<filters>(?:\s*\|\s*\w+(?:\([^()]*\))?|\.\w+\(\)|\s*\))*)"
"""What is made of it, such as `|lower`, `.upper()`, and the brackets that close around it."""

_KEPT = re.compile(rf"\bset\s+(?P<variable>[\w.]+)\s*=\s*{_OWNER}(?:{_READ}){_FILTERS}\s*(?:[-+]?%\}}|(?:or|if)\b)")
"""`set r = message.role`."""

_OTHER_CASE = re.compile(r"\b(?:upper|lower|capitalize|title)\b")


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
                    f"{path} is {reprlib.repr(role)}, which the model's chat template does not support; supported: "
                    + ", ".join(self.known),
                    param=path,
                )

    def rendered_as(self, role: object) -> object:
        """The role that the template is given."""
        return "system" if role == "developer" and self.developer_is_system else role


def learn_roles(
    template: str, render: Callable[[Sequence[Message]], str], special_tokens: Sequence[str] = ()
) -> ChatRoles:
    """Tries OpenAI's roles, those that the template compares a role with, such as Llama's `ipython`, and those that it
    prints as one of the special tokens, such as GLM-4's `observation`.

    A role is known if some conversation that holds it renders with what the role said; `user` and `assistant` are in
    any case, for no chat is without. Many templates print any role as it is, so others are not tried: the model was
    not trained on them. For the same reason `developer` is its own role only where the template names it.

    **Arguments:** `render` gives a conversation's text, or raises `RequestError` if the template refuses it;
    `special_tokens` are the texts of those that may stand for a role, so not of the end of a sequence.
    """
    named = [*_compared(template), *_printed_as_token(special_tokens, render)]
    own = [role for role in OPENAI_ROLES if role != "developer" or role in named]
    candidates = list(dict.fromkeys([*own, *named]))
    # A template that shows nobody's words (it takes lists of parts alone, say) tells nothing; let it decide by itself.
    known = {role for role in candidates if is_heard(role, render)} or set(candidates)
    known |= {"user", "assistant"}
    developer_is_system = "developer" not in known and "system" in known
    if developer_is_system:
        known.add("developer")
    in_order = dict.fromkeys([*OPENAI_ROLES, *candidates])
    return ChatRoles(tuple(role for role in in_order if role in known), developer_is_system)


def _compared(template: str) -> list[str]:
    """The names in `message['role'] == 'x'`, `'x' == message.role`, `message.role|lower in ["x", "y"]` and the like."""
    kept = {found["variable"]: found["filters"] for found in _KEPT.finditer(template)}
    variables = "|".join(map(re.escape, kept)) or r"(?!)"
    role = rf"(?:(?P<variable>(?<![\w.])(?:{variables})\b)|{_READ}){_FILTERS}"
    name = r"""\s*['"][\w-]+['"]\s*"""
    behind = rf"{role}\s*(?:[=!]=|(?:not\s+)?in\b)\s*[\[(]?(?P<names>(?:{name},?)+)"
    before = rf"(?P<names>{name})[=!]=\s*{_OWNER}{role}"
    names: list[str] = []
    for found in [*re.finditer(behind, template), *re.finditer(before, template)]:
        # `role|upper == 'USER'` is what a template says of `user`.
        changed = _OTHER_CASE.search(found["filters"] + kept.get(found["variable"], ""))
        names += re.findall(r"[\w-]+", found["names"].lower() if changed else found["names"])
    return names


def _printed_as_token(special_tokens: Sequence[str], render: Callable[[Sequence[Message]], str]) -> list[str]:
    """The roles R that have a special token `<|R|>`, if the template prints any role so. A token that it prints for
    another's words as well is none: it marks the end of a message, say."""
    always = "".join(text for text in _heard(_MADE_UP, render) if f"<|{_MADE_UP}|>" in text)
    if not always:
        return []
    tokens = {token: re.fullmatch(r"<\|([\w-]+)\|>", token) for token in special_tokens if token not in always}
    roles = {token: match[1] for token, match in tokens.items() if match}
    return [role for token, role in roles.items() if any(token in text for text in _heard(role, render))]


def is_heard(role: str, render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether any conversation that holds the role shows what it said."""
    return any(_heard(role, render))


def _heard(role: str, render: Callable[[Sequence[Message]], str]) -> Iterator[str]:
    """The texts of conversations that show what the role said, in whatever case."""
    for conversation in _probes(role):
        try:
            text = render(conversation)
        except RequestError:
            continue
        if _SAID.casefold() in text.casefold():
            yield text


def _probes(role: str) -> Iterator[list[Message]]:
    """Conversations that hold the role, each with a system's message in front as well, which some templates demand."""
    for conversation in _placed(role):
        yield conversation
        if role not in ("system", "developer"):
            yield [{"role": "system", "content": "c"}, *conversation]


def _placed(role: str) -> Iterator[list[Message]]:
    """Conversations that hold the role where it belongs, or anywhere if it is none of OpenAI's. Not elsewhere: Gemma's
    template, which has no system, prints one that stands in the assistant's place."""
    user: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": "b"}
    said: Message = {"role": role, "content": _SAID, "name": "probe", "tool_call_id": _CALL_ID}
    if role not in ("tool", "function"):
        yield [said]
        yield [said, user]
    if role in ("system", "developer"):
        yield [said, user, answer]
    if role == "user":
        yield [said, answer]
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

"""Which roles a chat template knows: found out by rendering conversations with each role, and looking for the content
of its message in the text."""

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
"""Content of the tested role's message. Only letters and digits, so that no template's quoting changes it."""

_CALL_ID = "callprobe"
"""Nine letters, as Mistral's templates require."""

_MADE_UP = "qz7role"
"""A role that no template names."""

_READ = r"""role\b|\[\s*['"]role['"]\s*\]|\bget\(\s*['"]role['"][^()]*\)"""
"""The end of `message.role`, `message['role']` and `message.get('role')`."""

_OWNER = r"\(*\s*[\w.]*(?:\[[^\][]*\][\w.]*)?"
"""The expression before it, such as `message` or `messages[0]`."""

_FILTERS = r"(?P<filters>(?:\s*\|\s*\w+(?:\([^()]*\))?|\.\w+\(\)|\s*\))*)"
"""Filters and methods after it, such as `|lower` and `.upper()`, and closing brackets."""

_KEPT = re.compile(rf"\bset\s+(?P<variable>[\w.]+)\s*=\s*{_OWNER}(?:{_READ}){_FILTERS}\s*(?:[-+]?%\}}|(?:or|if)\b)")
"""`set r = message.role`."""

_OTHER_CASE = re.compile(r"\b(?:upper|lower|capitalize|title)\b")


@dataclass(frozen=True, slots=True)
class ChatRoles:
    """The roles that messages may have. With `developer_is_system`, a `developer` message is rendered as `system`:
    `developer` is OpenAI's newer name for it, which few models were trained on."""

    known: tuple[str, ...]
    developer_is_system: bool = False

    def check(self, roles: Sequence[object]) -> None:
        """Raises `ParameterError` for the first unknown role, with the list of known ones."""
        for number, role in enumerate(roles):
            if role not in self.known:
                path = f"messages[{number}].role"
                raise ParameterError(
                    f"{path} is {reprlib.repr(role)}, which the model's chat template does not support; supported: "
                    + ", ".join(self.known),
                    param=path,
                )

    def rendered_as(self, role: object) -> object:
        return "system" if role == "developer" and self.developer_is_system else role


def learn_roles(
    template: str, render: Callable[[Sequence[Message]], str], special_tokens: Sequence[str] = ()
) -> ChatRoles:
    """Tries OpenAI's roles, roles that the template compares with, such as Llama's `ipython`, and roles that it prints
    as a special token, such as GLM-4's `observation`.

    A role is known if its message appears in some rendered conversation; `user` and `assistant` always are. Many
    templates print any role, so others are not tried: the model was not trained on them. For the same reason
    `developer` is a separate role only if the template names it.

    **Arguments:** `render` returns a conversation's text, or raises `RequestError` if the template refuses it;
    `special_tokens`: texts of the special tokens that may stand for a role (so not the end of a sequence).
    """
    named = [*_compared(template), *_printed_as_token(special_tokens, render)]
    own = [role for role in OPENAI_ROLES if role != "developer" or role in named]
    candidates = list(dict.fromkeys([*own, *named]))
    # If no message appears in any text, nothing was learnt: accept all candidates, and let the template decide.
    known = {role for role in candidates if is_heard(role, render)} or set(candidates)
    known |= {"user", "assistant"}
    developer_is_system = "developer" not in known and "system" in known
    if developer_is_system:
        known.add("developer")
    in_order = dict.fromkeys([*OPENAI_ROLES, *candidates])
    return ChatRoles(tuple(role for role in in_order if role in known), developer_is_system)


def _compared(template: str) -> list[str]:
    """The names in comparisons such as `message['role'] == 'x'`, `'x' == message.role`, `role|lower in ["x", "y"]`."""
    kept = {found["variable"]: found["filters"] for found in _KEPT.finditer(template)}
    variables = "|".join(map(re.escape, kept)) or r"(?!)"
    role = rf"(?:(?P<variable>(?<![\w.])(?:{variables})\b)|{_READ}){_FILTERS}"
    name = r"""\s*['"][\w-]+['"]\s*"""
    behind = rf"{role}\s*(?:[=!]=|(?:not\s+)?in\b)\s*[\[(]?(?P<names>(?:{name},?)+)"
    before = rf"(?P<names>{name})[=!]=\s*{_OWNER}{role}"
    names: list[str] = []
    for found in [*re.finditer(behind, template), *re.finditer(before, template)]:
        # `role|upper == 'USER'` compares with `user`.
        changed = _OTHER_CASE.search(found["filters"] + kept.get(found["variable"], ""))
        names += re.findall(r"[\w-]+", found["names"].lower() if changed else found["names"])
    return names


def _printed_as_token(special_tokens: Sequence[str], render: Callable[[Sequence[Message]], str]) -> list[str]:
    """The roles R with a special token `<|R|>`, if the template prints roles in this way. Tokens that also appear for a
    made-up role, such as the end of a message, do not count."""
    always = "".join(text for text in _heard(_MADE_UP, render) if f"<|{_MADE_UP}|>" in text)
    if not always:
        return []
    tokens = {token: re.fullmatch(r"<\|([\w-]+)\|>", token) for token in special_tokens if token not in always}
    roles = {token: match[1] for token, match in tokens.items() if match}
    return [role for token, role in roles.items() if any(token in text for text in _heard(role, render))]


def is_heard(role: str, render: Callable[[Sequence[Message]], str]) -> bool:
    return any(_heard(role, render))


def _heard(role: str, render: Callable[[Sequence[Message]], str]) -> Iterator[str]:
    """Yields the rendered conversations in which the role's message appears, ignoring case."""
    for conversation in _probes(role):
        try:
            text = render(conversation)
        except RequestError:
            continue
        if _SAID.casefold() in text.casefold():
            yield text


def _probes(role: str) -> Iterator[list[Message]]:
    """Conversations with the role, each also with a system message in front, which some templates require."""
    for conversation in _placed(role):
        yield conversation
        if role not in ("system", "developer"):
            yield [{"role": "system", "content": "c"}, *conversation]


def _placed(role: str) -> Iterator[list[Message]]:
    """Conversations with the role in its usual places, or anywhere if it is not one of OpenAI's. Other places would
    mislead: Gemma's template, which has no system role, prints a system message in the assistant's place."""
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

"""Moves what changes from call to call out of an agent's system prompt, so that the prefix cache finds the rest.

Agents resend their whole conversation with each call. If the system prompt contains something new each time, nothing
after it can be found in the cache. The rule looks only at the request, so equal requests have equal prompts:

- A line `x-anthropic-NAME: ...` is meant for the API, not for the model: it is left out.
- A line with the current time of day, a line `<total_tokens>...</total_tokens>`, and each system block after the last
  one that has `cache_control` (if any has) are moved behind the newest message that is not the assistant's. Of several
  lines `<total_tokens>` only the last is kept.

A date without a time changes once a day and stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_jax.checkpoint.chat_contents import JoinedParts

MAX_CLOCK_LINE = 200
"""Maximum characters of a line that is taken for the current time."""

_FOR_THE_API = re.compile(r"\s*x-anthropic-[a-z0-9-]+:", re.IGNORECASE)
_BUDGET = re.compile(r"\s*<total_tokens>[^<\n]*</total_tokens>\s*")
_ABOUT_NOW = re.compile(
    r"[\s>*#-]*(?:(?:the\s+)?(?:current|local|present)\s+(?:\w+\s+){0,2}?)?(?:date|time|datetime|timestamp|today(?:'s)?|now)\b",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"(?<![\d:])\d{1,2}:\d{2}(?![\d:]*\d:)|T\d{2}:?\d{2}")


@dataclass(frozen=True, slots=True)
class SystemBlock:
    """One part of the system prompt. `cached`: the client marks it with `cache_control`."""

    text: str
    cached: bool = False


@dataclass(frozen=True, slots=True)
class SystemText:
    """`stable`: the parts of the system prompt that stay; `volatile`: what moves behind the newest message."""

    stable: tuple[str, ...]
    volatile: tuple[str, ...]


def separate(blocks: Sequence[SystemBlock]) -> SystemText:
    """Returns the parts of a system prompt by whether they change from call to call."""
    marked = [number for number, block in enumerate(blocks) if block.cached]
    last_stable = marked[-1] if marked else len(blocks)
    stable: list[str] = []
    volatile: list[str] = []
    budget = ""
    for number, block in enumerate(blocks):
        kept: list[str] = []
        for line in block.text.split("\n"):
            if _FOR_THE_API.match(line):
                continue
            if _BUDGET.fullmatch(line):
                budget = line.strip()
            elif number <= last_stable and _tells_the_time(line):
                volatile.append(line.strip())
            else:
                kept.append(line)
        text = "\n".join(kept)
        if text.strip():
            (stable if number <= last_stable else volatile).append(text)
    return SystemText(tuple(stable), (*volatile, budget) if budget else tuple(volatile))


def _tells_the_time(line: str) -> bool:
    return len(line) <= MAX_CLOCK_LINE and bool(_ABOUT_NOW.match(line)) and bool(_CLOCK.search(line))


def reminder(volatile: Sequence[str]) -> str:
    """Returns moved parts as the end of a message."""
    return "\n".join(("<system-reminder>", *volatile, "</system-reminder>"))


def with_reminder(messages: list[dict[str, object]], volatile: Sequence[str]) -> list[dict[str, object]]:
    """Returns the messages with the moved parts at the end of the newest message that is not the assistant's; unchanged
    if there is none, or nothing moves."""
    newest = next((at for at in reversed(range(len(messages))) if messages[at]["role"] != "assistant"), None)
    if not volatile or newest is None:
        return messages
    message = messages[newest]
    content = message["content"]
    parts = content.parts if isinstance(content, JoinedParts) else (str(content),)
    changed = {**message, "content": JoinedParts((*parts, reminder(volatile)))}
    return [*messages[:newest], changed, *messages[newest + 1 :]]

"""What the outputs of a stream have in common: it is kept once, and put together when somebody reads it.

Each output of a stream has all of the text, token ids and logprobs so far. Most callers read what is new and no more,
so copies of the whole for each token would be in vain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_jax.engine.types import OutputDelta, TokenLogprob


class SoFar:
    """All of one completion. It only grows, so an output needs to know no more than how much of it is its own.

    One thread adds while others read: a reader takes what was there before its output was made.
    """

    __slots__ = ("_characters", "_ids", "_joined", "_logprobs", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._joined = ("", 0)  # the text of the first pieces, and how many these are: replaced together
        self._characters = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, delta: OutputDelta) -> Part:
        """All there is now, which ends with the delta."""
        self._pieces.append(delta.text)
        self._characters += len(delta.text)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        return self, self._characters, len(self._ids), len(self._logprobs)

    def text(self, characters: int) -> str:
        """The first so many characters."""
        text, count = self._joined
        new = self._pieces[count:]
        if new:
            text += "".join(new)
            self._joined = text, count + len(new)
        return text[:characters]

    def ids(self, count: int) -> list[int]:
        """The first so many token ids, in a list of the caller's own."""
        return self._ids[:count]

    def logprobs(self, count: int) -> list[TokenLogprob]:
        """Those of the first so many tokens, in a list of the caller's own."""
        return self._logprobs[:count]


Part = tuple[SoFar, int, int, int]
"""The first characters, token ids and logprobs of a completion: how many of each."""


class PutTogether:
    """Base of an output whose `text`, `output_ids` and `logprobs` may be left out where it has a `_part` of `SoFar`:
    they are put together when they are first read, and are the output's own from then on."""

    __slots__ = ("_part",)

    _part: Part

    def part_of(self, part: Part) -> None:
        """What was left out is this, once it is read."""
        self._part = part

    if not TYPE_CHECKING:  # or each misspelt name would pass for a field

        def __getattr__(self, name: str) -> object:
            """A field that was left out, and that nobody has read yet."""
            if name not in ("text", "output_ids", "logprobs"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            so_far, characters, ids, logprobs = self._part
            self.text = so_far.text(characters)
            self.output_ids = so_far.ids(ids)
            self.logprobs = so_far.logprobs(logprobs)
            return object.__getattribute__(self, name)

"""Storage that all outputs of a stream share. Each output has all text, token ids and logprobs so far, but most callers
read only the new part, so an output is assembled only when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_jax.engine.types import OutputDelta, TokenLogprob


class OutputBuffer:
    """All text, token ids and logprobs of one completion. It only grows, so an output stores only its lengths. One
    thread appends while others read: a reader reads only data that was there before its output was made."""

    __slots__ = ("_characters", "_ids", "_joined", "_logprobs", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._joined = ("", 0)  # text of the first pieces, and their number: replaced together
        self._characters = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, delta: OutputDelta) -> BufferPrefix:
        self._pieces.append(delta.text)
        self._characters += len(delta.text)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        return self, self._characters, len(self._ids), len(self._logprobs)

    def text(self, characters: int) -> str:
        text, count = self._joined
        new = self._pieces[count:]
        if new:
            text += "".join(new)
            self._joined = text, count + len(new)
        return text[:characters]

    def ids(self, count: int) -> list[int]:
        return self._ids[:count]

    def logprobs(self, count: int) -> list[TokenLogprob]:
        return self._logprobs[:count]


BufferPrefix = tuple[OutputBuffer, int, int, int]
"""A buffer, and how many of its characters, token ids and logprobs belong to the prefix."""


class LazyOutput:
    """Base of an output whose `text`, `output_ids` and `logprobs` may be left out if a prefix of a buffer is set: the
    first read of one of them assembles them, and then the output owns them."""

    __slots__ = ("_prefix",)

    _prefix: BufferPrefix

    def set_prefix(self, prefix: BufferPrefix) -> None:
        self._prefix = prefix

    if not TYPE_CHECKING:  # otherwise type checkers accept misspelt fields

        def __getattr__(self, name: str) -> object:
            if name not in ("text", "output_ids", "logprobs"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            buffer, characters, ids, logprobs = self._prefix
            self.text = buffer.text(characters)
            self.output_ids = buffer.ids(ids)
            self.logprobs = buffer.logprobs(logprobs)
            return object.__getattribute__(self, name)

"""Blocks of a reply: consecutive text, consecutive reasoning, or one tool call. Several APIs send replies as blocks,
each with a beginning, parts and an end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang_jax.replies.parser import CallArguments, CallBegin, Piece, Reasoning, Text


class BlockKind(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """One block. `text`: its text so far; for a call, its arguments, the text of a JSON object; `name`: the called
    function."""

    kind: BlockKind
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class More:
    """The last block has grown by `text`."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The last block is complete."""

    block: Block


Step = Begin | More | End


class Blocks:
    """Joins the pieces of one reply to blocks as they arrive. White space between blocks is left out: text begins with
    the first character that is not a space, unless that follows white space of the same block."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._spaces = ""

    def add(self, pieces: Sequence[Piece]) -> Iterator[Step]:
        """Adds pieces; yields what changes."""
        for piece in pieces:
            match piece:
                case Text(text):
                    yield from self._grow(BlockKind.TEXT, text)
                case Reasoning(text):
                    yield from self._grow(BlockKind.REASONING, text)
                case CallBegin(name=name):
                    yield from self.finish()
                    self._open = Block(BlockKind.CALL, name)
                    yield Begin(self._open)
                case CallArguments(text=text):
                    assert self._open is not None, "arguments follow the beginning of their call"
                    self._open.text += text
                    yield More(self._open, text)

    def finish(self) -> Iterator[Step]:
        """Ends the last block."""
        self._spaces = ""
        if self._open is not None:
            ended, self._open = self._open, None
            yield End(ended)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            if not text.strip():  # no block of only white space
                self._spaces += text
                return
            text = self._spaces + text
            yield from self.finish()
            self._open = Block(kind)
            yield Begin(self._open)
        self._open.text += text
        yield More(self._open, text)

"""The interface between the scheduler and a grammar library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.sampling.grammar import Grammar

Int32 = NDArray[np.int32]


class MatchState(Enum):
    """The state of an output in its grammar: more may follow; nothing can follow; or it took too much work."""

    CONTINUES = auto()
    COMPLETE = auto()
    FAILED = auto()


class Matcher(Protocol):
    """Matches one output to its grammar, by the tokens that it was given. It belongs to the request, not to its row: a
    request that loses its row keeps it. For one thread."""

    @property
    def failure(self) -> str:
        """The error, after it has failed."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by the requests that use it. Its memory is freed with it and its last matcher."""

    @property
    def exhausted(self) -> bool:
        """Whether its outputs have used up what they share, so that the next request must compile it again."""
        ...

    def matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    """A grammar library, for one vocabulary. All methods except `build` are for one thread."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the tokens that are not text, by name."""
        ...

    def build(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        """Compiles a grammar from the text `lark` that the sandbox returned. Called on threads of a pool. Raises
        `GrammarError`."""
        ...

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[MatchState]:
        """Gives each matcher the next token of its output, which its mask allowed."""
        ...

    def fill(self, matchers: Sequence[Matcher], words: Int32) -> list[MatchState]:
        """Writes masks of the allowed next tokens: `words` `[matchers, mask_words]`, C-contiguous (see `TokenMasks`).
        The mask of a complete or failed matcher is undefined. End-of-sequence tokens are allowed at possible ends."""
        ...

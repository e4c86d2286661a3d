"""What the scheduler asks of a library of grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.sampling.grammar import Grammar

Int32 = NDArray[np.int32]


class Progress(Enum):
    """Where an output is in its grammar: more may follow; complete, and nothing can follow; or the grammar took more
    work than one request may."""

    GOES_ON = auto()
    COMPLETE = auto()
    FAILED = auto()


class Matcher(Protocol):
    """Where one output is in its grammar. It knows the output's tokens that it was told, and belongs to the request,
    not to its row: a request that loses its row keeps both. For one thread."""

    @property
    def failure(self) -> str:
        """What went wrong, once it has failed."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that outputs can be followed in; shared by the requests that bring it. What it takes in memory stays
    while it, or a matcher of it, does."""

    @property
    def spoiled(self) -> bool:
        """Its outputs have used up what they share: who brings it again is to have it compiled again."""
        ...

    def matcher(self) -> Matcher:
        """A matcher of an empty output."""
        ...


class GrammarBackend(Protocol):
    """A library of grammars, for one vocabulary. All but `build` is for one thread."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Names and ids of the tokens that are not text."""
        ...

    def build(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        """Makes a grammar of which the sandbox gave the text `lark`. Called on threads of a pool. Raises
        `GrammarError`."""
        ...

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[Progress]:
        """Tells each matcher the token that its output got, one that its mask allowed."""
        ...

    def fill(self, matchers: Sequence[Matcher], words: Int32) -> list[Progress]:
        """Writes which tokens may come next: `words` `[matchers, mask_words]`, C-contiguous (see `TokenMasks`).

        The mask of one that has failed, or is complete, means nothing. End-of-sequence tokens are allowed where the
        output may end.
        """
        ...

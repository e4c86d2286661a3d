"""Grammars without a library: the allowed tokens are a hash of the grammar and of all tokens before.

So a mask that is late by a token, of another row, or of an output that was not kept, changes an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_jax.errors import GrammarError
from sglang_jax.grammar.compile_queue import Compilation
from sglang_jax.grammar.interface import MatchState
from sglang_jax.runner.plan import MASK_WORD
from sglang_jax.sampling.grammar import Grammar, GrammarKind
from sglang_jax.sampling.params import SamplingParams

REFUSED = 13
"""The key of a grammar that cannot be compiled."""

FAILING = 7
"""Keys that are multiples of it belong to grammars that fail after some tokens."""


def grammar(key: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(key), "regex")


def _mix(*values: int) -> int:
    state = 0x1234567
    for value in values:
        state = (state ^ value) * 0x9E3779B97F4A7C15 % 2**64
        state ^= state >> 31
    return state


def _state(key: int, output: Sequence[int]) -> int:
    return _mix(key, *[token + 1 for token in output])


def complete(key: int, output: Sequence[int]) -> bool:
    """Whether nothing can follow."""
    return len(output) > 2 and _state(key, output) % 8 == 0


def fails(key: int, output: Sequence[int]) -> bool:
    return key % FAILING == 0 and len(output) == 4 and not complete(key, output)


def allowed(key: int, output: Sequence[int], vocab: int, eos: int) -> list[int]:
    """Tokens that the grammar allows; at some places the end."""
    state = _state(key, output)
    tokens = [token for token in range(vocab) if token != eos and _mix(state, token) % 3 == 0]
    if state % 5 == 0:
        tokens.append(eos)
    if state % 11 == 0 or not tokens:
        tokens = [eos]
    return sorted(tokens)


def choice(sampling: SamplingParams, output: Sequence[int], vocab: int, eos: int) -> list[int]:
    """Tokens that a request may sample after its output: none where it has ended."""
    assert sampling.grammar is not None
    key = int(sampling.grammar.text)
    if complete(key, output) or fails(key, output) or key == REFUSED:
        return []
    tokens = allowed(key, output, vocab, eos)
    early = len(output) < sampling.min_new_tokens
    if early or sampling.ignore_eos:
        ends = {eos, *(sampling.stop_token_ids if early else ())}
        return [token for token in tokens if token not in ends] or tokens
    return sorted({*tokens, *sampling.stop_token_ids}) if eos in tokens else tokens


@dataclass
class FakeMatcher:
    key: int
    late: bool
    output: list[int] = field(default_factory=list)
    failure: str = "too much"


@dataclass(frozen=True)
class FakeGrammar:
    key: int
    exhausted: bool = False

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self.key, late=self.key % 2 == 0)


class FakeGrammars:
    """`GrammarBackend`. The end of an output is detected when it occurs, or not before the next mask."""

    specials: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, vocab: int, eos: int) -> None:
        self._vocab = vocab
        self._eos = eos

    def build(self, source: Grammar, lark: str) -> FakeGrammar:
        key = int(source.text)
        if key == REFUSED:
            raise GrammarError(f"{source.field}: refused", param=source.field)
        return FakeGrammar(key)

    def accept(self, matchers: Sequence[FakeMatcher], tokens: Sequence[int]) -> list[MatchState]:
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.output.append(token)
        return [MatchState.CONTINUES if matcher.late else self._progress(matcher) for matcher in matchers]

    def fill(self, matchers: Sequence[FakeMatcher], words: np.ndarray) -> list[MatchState]:
        words[:] = 0
        for matcher, line in zip(matchers, words, strict=True):
            for token in allowed(matcher.key, matcher.output, self._vocab, self._eos):
                line.view(np.uint32)[token // MASK_WORD] |= np.uint32(1 << token % MASK_WORD)
        return [self._progress(matcher) for matcher in matchers]

    @staticmethod
    def _progress(matcher: FakeMatcher) -> MatchState:
        if complete(matcher.key, matcher.output):
            return MatchState.COMPLETE
        return MatchState.FAILED if fails(matcher.key, matcher.output) else MatchState.CONTINUES


class FakeCompiler:
    """Replaces `GrammarCompiler`: the key of a grammar determines after how many checks it is compiled."""

    def __init__(self, backend: FakeGrammars) -> None:
        self.backend = backend
        self._looks: dict[int, int] = {}

    def start(self, source: Grammar, flow_key: tuple[str, str] = ("", "")) -> Compilation:
        compilation = Compilation(source, waiting=1)
        self._looks[id(compilation)] = int(source.text) % 4
        return compilation

    def settled(self, compilation: Compilation) -> bool:
        if self._looks[id(compilation)]:
            self._looks[id(compilation)] -= 1
            return False
        try:
            compilation.grammar = self.backend.build(compilation.source, "")
        except GrammarError as error:
            compilation.error = error
        return True

    def leave(self, compilation: Compilation) -> None:
        """Only a request that still waits may leave, and only once."""
        assert not compilation.done, "who has been told leaves no more"
        del self._looks[id(compilation)]

    def wait(self, seconds: float) -> None:
        """Every check is a step."""

"""Grammars by llguidance, a library in Rust (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.errors import GrammarError
from sglang_jax.grammar.interface import CompiledGrammar, Int32, Matcher, Progress
from sglang_jax.grammar.llguidance_trial import LIMITS, brief
from sglang_jax.sampling.grammar import Grammar

MASK_THREADS = 4
"""Most threads that a step's masks are computed on."""

MOST_CHARACTERS_BUILT_AGAIN = 16 << 10
"""Longest grammar that is built again for one output, between two steps: tens of milliseconds at most."""

MOST_PARTED = 32
"""Outputs that have states of their own at once, of up to 60 MB each: 1.9 GB."""

_OF_THE_LEXER = "lexer error"
"""How errors begin that all who share its states get: too many of them, or too much work on one mask."""


class _Vocabulary:
    """A vocabulary as llguidance asks for it. It never asks for a text's tokens, as no grammar here forces any."""

    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokens = [*table.tokens[:vocab_size], *[b""] * (vocab_size - len(table.tokens))]
        self.special_token_ids = sorted({*table.special, *eos_ids} & set(range(vocab_size)))
        self.eos_token_id = eos_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("the engine core has no tokenizer")


class LlguidanceMatcher:
    """See `Matcher`. `tokens`: what it was told; None once its states are its own."""

    __slots__ = ("__weakref__", "grammar", "inner", "tokens")

    def __init__(self, inner: LLMatcher, grammar: LlguidanceGrammar) -> None:
        self.inner = inner
        self.grammar = grammar
        self.tokens: list[int] | None = [] if grammar.can_part else None

    @property
    def failure(self) -> str:
        return brief(self.inner.get_error())

    def part(self) -> bool:
        """Whether it goes on with states of its own: where the shared ones are full, which others may have filled."""
        if not self.failure.startswith(_OF_THE_LEXER):
            return False
        self.grammar.spoiled = True
        if self.tokens is None or len(self.grammar.parted) >= MOST_PARTED:
            return False
        self.grammar.parted.add(self)
        told, self.tokens = self.tokens, None
        self.inner = self.grammar.build()
        self.inner.consume_tokens(told)
        return not self.inner.is_error()


class LlguidanceGrammar:
    """See `CompiledGrammar`. Matchers share the states of the lexer that they have met, up to a limit, at which the
    library fails all of them, whosever output it was. They part then.

    **Arguments:** `build`: makes a matcher of an empty output that shares nothing; `can_part`: it is quick to;
    `parted`: matchers of all grammars that have parted.
    """

    def __init__(
        self,
        prototype: LLMatcher,
        build: Callable[[], LLMatcher],
        parted: WeakSet[LlguidanceMatcher],
        *,
        can_part: bool,
    ) -> None:
        self._prototype = prototype
        self.build = build
        self.parted = parted
        self.can_part = can_part
        self.spoiled = False

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._prototype.deep_copy(), self)


class LlguidanceBackend:
    """See `GrammarBackend`.

    Made in some 0.2 s for 50,000 tokens, in which no other thread of Python runs: before anything is served.

    **Arguments:** `table`: what tokens spell; `vocab_size`: tokens of the model, which may have more than have a text;
    `eos_ids`: those that end an output, one at least.
    """

    def __init__(self, table: TokenTable, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(table, vocab_size, eos_ids)), eos_token=list(eos_ids)
        )
        self.specials = {
            table.tokens[token].decode(errors="replace"): token for token in table.special if token < vocab_size
        }
        self._executor = LLExecutor(MASK_THREADS)
        self._parted: WeakSet[LlguidanceMatcher] = WeakSet()

    def build(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        """See `GrammarBackend`. Other threads run meanwhile."""
        text = LLMatcher.grammar_from_lark(lark)

        def build() -> LLMatcher:
            return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

        prototype = build()
        if not prototype.is_error():
            prototype.deep_copy().compute_bitmask()  # the first mask of a grammar is the dearest
        if prototype.is_error():
            raise GrammarError(f"{grammar.field}: {brief(prototype.get_error())}", param=grammar.field)
        return LlguidanceGrammar(prototype, build, self._parted, can_part=len(lark) <= MOST_CHARACTERS_BUILT_AGAIN)

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[Progress]:
        own = _own(matchers)
        for matcher, token in zip(own, tokens, strict=True):
            if matcher.tokens is not None:
                matcher.tokens.append(token)
        if len(own) == 1:
            own[0].inner.consume_token(tokens[0])
        else:
            self._executor.consume_token_par([(one.inner, token) for one, token in zip(own, tokens, strict=True)])
        for matcher in own:
            if matcher.inner.is_error():
                matcher.part()
        return [_progress(matcher.inner) for matcher in own]

    def fill(self, matchers: Sequence[Matcher], words: Int32) -> list[Progress]:
        own = _own(matchers)
        row_bytes = words.shape[1] * words.itemsize
        if len(own) == 1:
            own[0].inner.unsafe_compute_mask_ptr(words.ctypes.data, row_bytes)
        else:
            pairs = [(matcher.inner, line) for line, matcher in enumerate(own)]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, row_bytes, len(own))
        for line, matcher in enumerate(own):
            if matcher.inner.is_error() and matcher.part():
                matcher.inner.unsafe_compute_mask_ptr(words[line].ctypes.data, row_bytes)
        return [_progress(matcher.inner) for matcher in own]


def _own(matchers: Sequence[Matcher]) -> list[LlguidanceMatcher]:
    own = []
    for matcher in matchers:
        assert isinstance(matcher, LlguidanceMatcher)
        own.append(matcher)
    return own


def _progress(matcher: LLMatcher) -> Progress:
    if not matcher.is_stopped():
        return Progress.GOES_ON
    return Progress.FAILED if matcher.is_error() else Progress.COMPLETE

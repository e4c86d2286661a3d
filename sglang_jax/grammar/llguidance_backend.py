"""Grammars compiled by llguidance, a library in Rust (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.errors import GrammarError
from sglang_jax.grammar.interface import CompiledGrammar, Int32, Matcher, MatchState
from sglang_jax.grammar.llguidance_trial import LIMITS, brief
from sglang_jax.sampling.grammar import Grammar

MASK_THREADS = 4
"""Maximum threads that compute a step's masks."""

MAX_REBUILT_CHARACTERS = 16 << 10
"""Maximum characters of a grammar that is rebuilt for one output between two steps: tens of milliseconds."""

MAX_DETACHED = 32
"""Maximum outputs with separate states, of up to 60 MB each: 1.9 GB."""

_LEXER_ERROR = "lexer error"
"""Start of errors that all matchers with the same states get: too many states, or too much work on one mask."""


class _Vocabulary:
    """A vocabulary in llguidance's interface. No grammar here forces tokens, so it never tokenizes a text."""

    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokens = [*table.tokens[:vocab_size], *[b""] * (vocab_size - len(table.tokens))]
        self.special_token_ids = sorted({*table.special, *eos_ids} & set(range(vocab_size)))
        self.eos_token_id = eos_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("the engine core has no tokenizer")


class LlguidanceMatcher:
    """See `Matcher`. `tokens`: its tokens so far; None once it is detached, or if it cannot be."""

    __slots__ = ("__weakref__", "grammar", "inner", "tokens")

    def __init__(self, inner: LLMatcher, grammar: LlguidanceGrammar) -> None:
        self.inner = inner
        self.grammar = grammar
        self.tokens: list[int] | None = [] if grammar.can_detach else None

    @property
    def failure(self) -> str:
        return brief(self.inner.get_error())

    def detach(self) -> bool:
        """Detaches it from the shared states if these are full, maybe due to others. False if it cannot continue."""
        if not self.failure.startswith(_LEXER_ERROR):
            return False
        self.grammar.exhausted = True
        if self.tokens is None or len(self.grammar.detached) >= MAX_DETACHED:
            return False
        self.grammar.detached.add(self)
        consumed, self.tokens = self.tokens, None
        self.inner = self.grammar.build()
        self.inner.consume_tokens(consumed)
        return not self.inner.is_error()


class LlguidanceGrammar:
    """See `CompiledGrammar`. Matchers share the lexer states that they have met. At a limit of states, the library
    fails all matchers, whichever caused it; then each is detached. `build`: creates a matcher of an empty output that
    shares nothing; `can_detach`: whether `build` is fast; `detached`: detached matchers of all grammars."""

    def __init__(
        self,
        prototype: LLMatcher,
        build: Callable[[], LLMatcher],
        detached: WeakSet[LlguidanceMatcher],
        *,
        can_detach: bool,
    ) -> None:
        self._prototype = prototype
        self.build = build
        self.detached = detached
        self.can_detach = can_detach
        self.exhausted = False

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._prototype.deep_copy(), self)


class LlguidanceBackend:
    """See `GrammarBackend`. Created before anything is served: it takes 0.2 s for 50,000 tokens, and no other Python
    thread runs meanwhile. `table`: the bytes of tokens; `vocab_size`: tokens of the model, some of which may have no
    text; `eos_ids`: the tokens that end an output, at least one."""

    def __init__(self, table: TokenTable, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(table, vocab_size, eos_ids)), eos_token=list(eos_ids)
        )
        self.specials = {
            table.tokens[token].decode(errors="replace"): token for token in table.special if token < vocab_size
        }
        self._executor = LLExecutor(MASK_THREADS)
        self._detached: WeakSet[LlguidanceMatcher] = WeakSet()

    def build(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        """Releases Python's lock."""
        text = LLMatcher.grammar_from_lark(lark)

        def build() -> LLMatcher:
            return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

        prototype = build()
        if not prototype.is_error():
            prototype.deep_copy().compute_bitmask()  # the first mask of a grammar is the most expensive
        if prototype.is_error():
            raise GrammarError(f"{grammar.field}: {brief(prototype.get_error())}", param=grammar.field)
        return LlguidanceGrammar(prototype, build, self._detached, can_detach=len(lark) <= MAX_REBUILT_CHARACTERS)

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[MatchState]:
        own = _llguidance_matchers(matchers)
        for matcher, token in zip(own, tokens, strict=True):
            if matcher.tokens is not None:
                matcher.tokens.append(token)
        if len(own) == 1:
            own[0].inner.consume_token(tokens[0])
        else:
            self._executor.consume_token_par([(one.inner, token) for one, token in zip(own, tokens, strict=True)])
        for matcher in own:
            if matcher.inner.is_error():
                matcher.detach()
        return [_state_of(matcher.inner) for matcher in own]

    def fill(self, matchers: Sequence[Matcher], words: Int32) -> list[MatchState]:
        own = _llguidance_matchers(matchers)
        row_bytes = words.shape[1] * words.itemsize
        if len(own) == 1:
            own[0].inner.unsafe_compute_mask_ptr(words.ctypes.data, row_bytes)
        else:
            pairs = [(matcher.inner, line) for line, matcher in enumerate(own)]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, row_bytes, len(own))
        for line, matcher in enumerate(own):
            if matcher.inner.is_error() and matcher.detach():
                matcher.inner.unsafe_compute_mask_ptr(words[line].ctypes.data, row_bytes)
        return [_state_of(matcher.inner) for matcher in own]


def _llguidance_matchers(matchers: Sequence[Matcher]) -> list[LlguidanceMatcher]:
    own = []
    for matcher in matchers:
        assert isinstance(matcher, LlguidanceMatcher)
        own.append(matcher)
    return own


def _state_of(matcher: LLMatcher) -> MatchState:
    if not matcher.is_stopped():
        return MatchState.CONTINUES
    return MatchState.FAILED if matcher.is_error() else MatchState.COMPLETE

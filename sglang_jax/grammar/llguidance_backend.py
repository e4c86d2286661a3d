"""Grammars by llguidance, a library in Rust (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.errors import GrammarError
from sglang_jax.grammar.interface import CompiledGrammar, Int32, Matcher, Progress
from sglang_jax.grammar.llguidance_trial import LIMITS, brief
from sglang_jax.sampling.grammar import Grammar

MASK_THREADS = 4
"""Most threads that a step's masks are computed on."""


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
    """See `Matcher`."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    @property
    def failure(self) -> str:
        return brief(self.inner.get_error())


class LlguidanceGrammar:
    """See `CompiledGrammar`. Copies share the states of the lexer that they have met."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._prototype.deep_copy())


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

    def build(self, grammar: Grammar, lark: str) -> CompiledGrammar:
        """See `GrammarBackend`. Other threads run meanwhile."""
        text = LLMatcher.grammar_from_lark(lark)
        prototype = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not prototype.is_error():
            prototype.deep_copy().compute_bitmask()  # the first mask of a grammar is the dearest
        if prototype.is_error():
            raise GrammarError(f"{grammar.field}: {brief(prototype.get_error())}", param=grammar.field)
        return LlguidanceGrammar(prototype)

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[Progress]:
        inner = _inner(matchers)
        if len(inner) == 1:
            inner[0].consume_token(tokens[0])
        else:
            self._executor.consume_token_par(list(zip(inner, tokens, strict=True)))
        return [_progress(matcher) for matcher in inner]

    def fill(self, matchers: Sequence[Matcher], words: Int32) -> list[Progress]:
        inner = _inner(matchers)
        row_bytes = words.shape[1] * words.itemsize
        if len(inner) == 1:
            inner[0].unsafe_compute_mask_ptr(words.ctypes.data, row_bytes)
        else:
            pairs = list(zip(inner, range(len(inner)), strict=True))
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, row_bytes, len(inner))
        return [_progress(matcher) for matcher in inner]


def _inner(matchers: Sequence[Matcher]) -> list[LLMatcher]:
    inner = []
    for matcher in matchers:
        assert isinstance(matcher, LlguidanceMatcher)
        inner.append(matcher.inner)
    return inner


def _progress(matcher: LLMatcher) -> Progress:
    if not matcher.is_stopped():
        return Progress.GOES_ON
    return Progress.FAILED if matcher.is_error() else Progress.COMPLETE

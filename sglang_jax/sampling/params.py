"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling.grammar import Grammar
from sglang_jax.spellings import SAMPLING_ELSEWHERE, SAMPLING_FIELDS

MAX_LOGIT_BIAS = 320
"""Maximum entries of one request's `logit_bias` (OpenAI documents 300)."""

MAX_STOP_TOKEN_IDS = 16
"""Maximum token ids that may end one request, the model's end-of-sequence ids included."""

MAX_STOP_CHARACTERS = 65_536
"""Maximum characters of all stop strings of a request, whatever a server allows: that much text is held back and
searched at each token."""

MAX_TOP_LOGPROBS = 20
"""Maximum alternatives reported per position."""

SEED_LIMIT = 2**63


def unknown_field(where: str, name: str) -> str:
    known = SAMPLING_FIELDS.get(name)
    if known is not None:
        return f"{where} has no field {name!r}: it is called {known} here"
    if name in SAMPLING_ELSEWHERE:
        return f"{where} has no field {name!r}: it is {SAMPLING_ELSEWHERE[name]}"
    return f"{where} has no field {name!r}; there are {', '.join(sorted(SamplingParams.__dataclass_fields__))}"


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(f"{name} must be a number, got {quote(value)}", param=name)
    within = low < value <= high if open_low else low <= value <= high
    if not within:  # NaN is not within any range
        bracket = "(" if open_low else "["
        raise ParameterError(f"{name} must be in {bracket}{low:g}, {high:g}], got {quote(value)}", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(f"{name} must be an integer in [{low}, {high}], got {quote(value)}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are sampled, and when its output ends.

    Applied in this order: logit bias, penalties, temperature, top-k, top-p, min-p. Reported logprobs are those of the
    raw logits. Raises `ParameterError` naming the field and its range.

    - `max_new_tokens`: maximum tokens generated; None means up to the context length. 0 computes only the prompt, for
      its logprobs or for the prefix cache.
    - `min_new_tokens`: end-of-sequence and stop tokens are masked until this many tokens were sampled, and stop strings
      are not looked for in the text of those tokens.
    - `temperature`: 0 is greedy.
    - `top_k`: keep the k most likely tokens; -1 keeps all.
    - `top_p`: keep the smallest set with at least this probability (nucleus sampling, Holtzman et al. 2019).
    - `min_p`: keep tokens with at least this fraction of the most likely one's probability.
    - `frequency_penalty`, `presence_penalty`: OpenAI's, over output tokens.
    - `repetition_penalty`: over prompt and output tokens (CTRL, Keskar et al. 2019); 1 is off.
    - `logit_bias`: token id to the value added to its logit.
    - `stop`: strings that end the output; the output is cut before the match unless `include_stop`.
    - `stop_token_ids`: further token ids that end the output; `ignore_eos`: continue past the model's own.
    - `seed`: makes sampling a function of only (seed, position).
    - `n`: number of independent completions; `skip_special_tokens`: leave special tokens out of the text.
    - `grammar`: a constraint on the output; tokens that violate it are never sampled. The output ends once the grammar
      is complete and nothing can follow. It takes precedence over `min_new_tokens` and `ignore_eos`: where it allows
      only the end, the output ends.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    include_stop: bool = False
    grammar: Grammar | None = None

    def __new__(cls, **fields: object) -> Self:
        """Refuses unknown fields; names the equivalent field for names of other engines."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise TypeError(unknown_field("SamplingParams", name))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        most = 2**31 - 1
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 0, most)
            most = self.max_new_tokens
        _integer("min_new_tokens", self.min_new_tokens, 0, most)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == 0:
            raise ParameterError("top_k must be -1 (all tokens) or at least 1, got 0", param="top_k")
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _integer("n", self.n, 1, 128)
        if self.seed is not None:
            _integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        self._check_sequences()

    def _check_sequences(self) -> None:
        # Thousands of requests may arrive at once, and most of them have none of these.
        if self.stop or isinstance(self.stop, str):
            self._check_stop()
        if self.stop_token_ids:
            self._check_stop_token_ids()
        if self.logit_bias:
            self._check_logit_bias()

    def _check_stop(self) -> None:
        listed = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not listed or not all(isinstance(s, str) and s for s in self.stop):
            stop = list(self.stop) if listed else self.stop
            raise ParameterError(f"stop must be a list of non-empty strings, got {quote(stop)}", param="stop")
        characters = sum(map(len, self.stop))
        if characters > MAX_STOP_CHARACTERS:
            raise ParameterError(
                f"stop may hold at most {MAX_STOP_CHARACTERS} characters together, got {characters}", param="stop"
            )

    def _check_stop_token_ids(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(
                f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `ParameterError` for a token id at or above `vocab_size`."""
        if not self.logit_bias and not self.stop_token_ids:
            return
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(
                        f"{name} holds token id {quote(token)}, the vocabulary ends at {vocab_size - 1}", param=name
                    )

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs counts of the request's tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

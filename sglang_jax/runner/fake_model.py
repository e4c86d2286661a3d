"""The model of `FakeRunner`: hashes instead of keys, values, states and logits; and an oracle of samples from the
tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.runner.plan import Float64

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    state = 0x243F6A8885A308D3
    for value in values:
        state = (state ^ (value & _MASK)) * _MULTIPLIER & _MASK
        state ^= state >> 29
    return state


NOT_FINITE = -1
"""The content that a spoilt step writes, and the hash of every query that sees it."""


def begin(namespace: str | None) -> int:
    """The hash of a query before it has seen any slot."""
    return 0 if namespace is None else mix(*namespace.encode(), 0xA11CE)


def _see(seen: int, value: int) -> int:
    if seen == NOT_FINITE or value == NOT_FINITE:
        return NOT_FINITE
    return (seen * 0x100000001B3 + value) & _MASK


def write(seen: int, token: int, position: int) -> int:
    return NOT_FINITE if seen == NOT_FINITE else mix(seen, token, position)


def sample(seen: int, seed: int, prompt_len: int, tokens: Sequence[int]) -> int:
    return tokens[mix(seen, seed, prompt_len) % len(tokens)]


def logprob(seen: int, token: int) -> float:
    if seen == NOT_FINITE:
        return float("nan")
    return -float(mix(seen, token) % 10007) / 1000.0


def from_place(seen: int, position: int) -> int:
    """What a query at `position` has seen of a whole prompt, of which all see the same."""
    return NOT_FINITE if seen == NOT_FINITE else mix(seen, position)


def vector(seen: int, width: int) -> Float64:
    """A query's hidden state, `[width]`, whose sums are exact."""
    if seen == NOT_FINITE:
        return np.full(width, np.nan)
    return np.array([mix(seen, place) % 4001 - 2000 for place in range(width)], np.float64)


def pooled(seen: Sequence[int], pooling: Pooling, width: int) -> Float64:
    """The part of a prompt's vector of the queries `seen`, in order: for a mean, their sum."""
    if pooling is Pooling.MEAN:
        found: Float64 = np.array([vector(each, width) for each in seen]).sum(axis=0)
        return found
    return vector(seen[0 if pooling is Pooling.CLS else -1], width)


class Sight:
    """The hashes of the queries of one row, at successive positions, from the slots of each group that they see.
    `windows`: of each group, None if it sees all; `begin`: the hash before any slot; `read(group, position)`: the
    content of a slot; `states`: by group, the state after the first `start` positions, which are not read again."""

    def __init__(
        self,
        windows: tuple[int | None, ...],
        begin: int,
        read: Callable[[int, int], int],
        start: int = 0,
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._windows = windows
        self._begin = begin
        self._read = read
        self._known = [states.get(group, begin) for group in range(len(windows))]
        self._seen = [start if group in states else 0 for group in range(len(windows))]

    def state(self, group: int) -> int:
        return self._known[group]

    def of(self, position: int, end: int) -> int:
        """The hash of the query at `position` over the slots before `end`."""
        for group, window in enumerate(self._windows):
            if window is not None:
                self._known[group] = self._begin
                self._seen[group] = max(position - window + 1, 0)
            for place in range(self._seen[group], end):
                self._known[group] = _see(self._known[group], self._read(group, place))
            self._seen[group] = end
        if len(self._known) == 1:
            return self._known[0]
        return NOT_FINITE if NOT_FINITE in self._known else mix(*self._known)


def content(value: int, group: int) -> int:
    """The content that a query writes for a group, different for each group."""
    return mix(value, group) if group and value != NOT_FINITE else value


@dataclass(frozen=True, slots=True)
class Oracle:
    """The samples that `FakeRunner` must return, computed from the tokens only. `windows`: of each group, None if it
    sees all; also None for states, which have seen all tokens in order."""

    vocab_size: int
    windows: tuple[int | None, ...] = (None,)

    def output(
        self,
        prompt: Sequence[int],
        seed: int,
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        namespace: str | None = None,
        allowed: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> list[int]:
        """Output tokens of a request, including the stop token. `allowed`: the tokens that may follow an output, none
        if it ends there; if None, all tokens."""
        stops = set(stop_ids)
        tokens, output = list(prompt), list[int]()
        queries = self._queries(tokens, namespace)
        seen = [next(queries) for _ in prompt][-1]
        while len(output) < max_new_tokens:
            choice = range(self.vocab_size) if allowed is None else allowed(output)
            if not choice:
                break
            token = sample(seen, seed, len(prompt), choice)
            output.append(token)
            if token in stops:
                break
            tokens.append(token)
            seen = next(queries)
        return output

    def prompt_logprobs(self, prompt: Sequence[int], namespace: str | None = None) -> list[float]:
        """Logprob of each prompt token except the first, float32."""
        queries = self._queries(prompt, namespace)
        return [float(np.float32(logprob(next(queries), token))) for token in prompt[1:]]

    def pooled(
        self, prompt: Sequence[int], pooling: Pooling, width: int, namespace: str | None = None, *, whole: bool = False
    ) -> list[float]:
        """The vector of a prompt, float32. `whole`: queries see all of it."""
        queries = self._queries(prompt, namespace)
        seen = [next(queries) for _ in prompt]
        if whole:
            seen = [from_place(seen[-1], position) for position in range(len(prompt))]
        found = pooled(seen, pooling, width)
        parts = len(prompt) if pooling is Pooling.MEAN else 1
        return [float(np.float32(number / parts)) for number in found]

    def token_scores(
        self, prompt: Sequence[int], token_ids: Sequence[int], namespace: str | None = None
    ) -> list[float]:
        """Logits of tokens after a prompt, float32."""
        queries = self._queries(prompt, namespace)
        last = [next(queries) for _ in prompt][-1]
        return [float(np.float32(logprob(last, token))) for token in token_ids]

    def _queries(self, tokens: Sequence[int], namespace: str | None) -> Iterator[int]:
        """The hash of each token's query. Tokens may be appended while this iterates."""
        written: list[list[int]] = [[] for _ in self.windows]
        sight = Sight(self.windows, begin(namespace), lambda group, place: written[group][place])
        position = 0
        while True:
            value = write(sight.of(position, position), tokens[position], position)
            for group, slots in enumerate(written):
                slots.append(content(value, group))
            yield sight.of(position, position + 1)
            position += 1

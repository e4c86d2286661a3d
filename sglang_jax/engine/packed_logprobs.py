"""Logprobs while they wait for who writes them: small."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import overload

from sglang_jax.engine.types import TokenLogprob
from sglang_jax.scheduler.messages import WireLogprob


def token_logprob(wire: WireLogprob) -> TokenLogprob:
    """A position's logprobs as clients see them."""
    return TokenLogprob(wire.token_id, wire.logprob, tuple(zip(wire.top_logprobs, wire.top_ids, strict=True)))


class PackedLogprob:
    """A token's logprobs until somebody takes them: twenty alternatives as tuples would be 2.4 kB for as long as a
    reader lets them wait, and are 0.4 kB so."""

    __slots__ = ("_alternatives", "_count", "_logprob", "_token_id")

    def __init__(self, wire: WireLogprob) -> None:
        self._token_id = wire.token_id
        self._logprob = wire.logprob
        self._count = len(wire.top_ids)
        self._alternatives = _form(self._count).pack(*wire.top_logprobs, *wire.top_ids)

    def unpacked(self) -> TokenLogprob:
        """As clients see it."""
        values = _form(self._count).unpack(self._alternatives)
        return TokenLogprob(
            self._token_id, self._logprob, tuple(zip(values[: self._count], values[self._count :], strict=True))
        )


@lru_cache
def _form(count: int) -> struct.Struct:
    """Of so many alternatives: their logprobs, then their tokens."""
    return struct.Struct(f"<{count}d{count}i")


def packed(wire: WireLogprob) -> TokenLogprob | PackedLogprob:
    """A position's logprobs, in the smaller of both forms."""
    return PackedLogprob(wire) if wire.top_ids else token_logprob(wire)


def unpacked(one: TokenLogprob | PackedLogprob) -> TokenLogprob:
    """As clients see it."""
    return one.unpacked() if isinstance(one, PackedLogprob) else one


class PackedLogprobs(Sequence[TokenLogprob]):
    """The logprobs of many positions, each unpacked when it is looked at: whoever writes an answer has one of them at a
    time, and an answer of a thousand prompts all of theirs."""

    def __init__(self, entries: Iterable[TokenLogprob | PackedLogprob] = ()) -> None:
        self._entries = list(entries)

    def add(self, entries: Iterable[TokenLogprob | PackedLogprob]) -> None:
        """Appends further positions."""
        self._entries += entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(unpacked, self._entries)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(place, slice):
            return [unpacked(one) for one in self._entries[place]]
        return unpacked(self._entries[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

"""A compact form of logprobs that wait to be written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import overload

from sglang_jax.engine.types import TokenLogprob
from sglang_jax.scheduler.messages import WireLogprob


def token_logprob(wire: WireLogprob) -> TokenLogprob:
    """Converts a position's logprobs to the type that clients see."""
    return TokenLogprob(wire.token_id, wire.logprob, tuple(zip(wire.top_logprobs, wire.top_ids, strict=True)))


class PackedLogprob:
    """A token's logprobs until they are taken: twenty alternatives take 0.4 kB here, and 2.4 kB as tuples."""

    __slots__ = ("_alternatives", "_count", "_logprob", "_token_id")

    def __init__(self, wire: WireLogprob) -> None:
        self._token_id = wire.token_id
        self._logprob = wire.logprob
        self._count = len(wire.top_ids)
        self._alternatives = _layout(self._count).pack(*wire.top_logprobs, *wire.top_ids)

    def unpack(self) -> TokenLogprob:
        values = _layout(self._count).unpack(self._alternatives)
        return TokenLogprob(
            self._token_id, self._logprob, tuple(zip(values[: self._count], values[self._count :], strict=True))
        )


@lru_cache
def _layout(count: int) -> struct.Struct:
    """Binary layout of `count` alternatives: their logprobs, then their token ids."""
    return struct.Struct(f"<{count}d{count}i")


def pack(wire: WireLogprob) -> TokenLogprob | PackedLogprob:
    """Returns a position's logprobs in the smaller of the two forms."""
    return PackedLogprob(wire) if wire.top_ids else token_logprob(wire)


def unpack(one: TokenLogprob | PackedLogprob) -> TokenLogprob:
    return one.unpack() if isinstance(one, PackedLogprob) else one


class PackedLogprobs(Sequence[TokenLogprob]):
    """The logprobs of many positions, each unpacked when it is read, so that a large answer is never unpacked whole."""

    def __init__(self, entries: Iterable[TokenLogprob | PackedLogprob] = ()) -> None:
        self._entries = list(entries)

    def add(self, entries: Iterable[TokenLogprob | PackedLogprob]) -> None:
        self._entries += entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(unpack, self._entries)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprob]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(place, slice):
            return [unpack(one) for one in self._entries[place]]
        return unpack(self._entries[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

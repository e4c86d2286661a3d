"""Repeated output in streams: by default, each event of `/generate` has all output so far."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import msgspec

from sglang_jax.errors import RequestError
from sglang_jax.logs import OnceASecond
from sglang_jax.server.errors import BusyError
from sglang_jax.server.streaming import RESPONSE_SLICE

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MAX_HELD_BYTES = 128 * 2**20
"""Maximum bytes that all streams hold for repetition. A token takes about 11 bytes, so a few hundred long outputs fit;
with twenty alternatives it takes 700."""

REPEATED_BYTES = 32 * 2**20
"""Bytes per second of repeating events in all streams together: about a tenth of a core."""

SHORT_EVENT = 16_384
"""After an event of at most this many bytes, a stream does not pause: some thousand tokens without logprobs."""

LONGEST_PAUSE = 1.0
"""Seconds after which a pausing stream counts again how many others pause."""

_encoder = msgspec.json.Encoder()

GAP = b"\0"
"""A byte that does not occur in JSON."""

_GAP_LIST = msgspec.Raw(b"[%b]" % GAP)


class RepeatedAnswer:
    """The answers of one completion in a stream whose events repeat all output so far; `num_bytes`: its size as JSON.
    Repeated output is encoded once and copied from then on. The answers of `add` have a `GAP` in place of each repeated
    text or list, which `pieces` fills in: a long event is not copied as a whole while a slow client reads it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._text = bytearray()
        self._lists: dict[str, bytearray] = {}
        self._in_order: list[bytearray] = []

    def add(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Adds the answer of the next delta, and returns it with gaps for all output so far."""
        self._in_order = [self._text, self._lists.setdefault("output_ids", bytearray())]
        self._text += _encoder.encode(answer["text"])[1:-1]
        meta = {
            name: self._list(name, value) if isinstance(value, (list, msgspec.Raw)) else value
            for name, value in answer["meta_info"].items()
        }
        self._write("output_ids", answer["output_ids"])
        self.num_bytes = sum(map(len, self._in_order))
        return {"text": msgspec.Raw(b'"%b"' % GAP), "output_ids": _GAP_LIST, "meta_info": meta}

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields an event with its gaps filled: in one piece, or slices if it is long. Call `add` after the last."""
        around = data.split(GAP)
        parts = [part for pair in zip_longest(around, self._in_order, fillvalue=b"") for part in pair]
        if sum(map(len, parts)) <= RESPONSE_SLICE:
            yield b"".join(parts)
            return
        for part in parts:
            for start in range(0, len(part), RESPONSE_SLICE):
                yield bytes(part[start : start + RESPONSE_SLICE])

    def forget(self) -> None:
        """Frees the repeated output, even while an event with it waits for its client."""
        for written in (self._text, *self._lists.values()):
            written.clear()

    def _list(self, name: str, items: list[Any] | msgspec.Raw) -> msgspec.Raw:
        self._in_order.append(self._lists.setdefault(name, bytearray()))
        self._write(name, items)
        return _GAP_LIST

    def _write(self, name: str, items: list[Any] | msgspec.Raw) -> None:
        written = self._lists[name]
        new = memoryview(items if isinstance(items, msgspec.Raw) else _encoder.encode(items))[1:-1]
        if new:
            written += b"," if written else b""
            written += new


class RepeatShare:
    """The unfinished completions of one stream. `refusal`: the error with which the stream has to end, if any."""

    def __init__(self, held: HeldRepeats) -> None:
        self.num_bytes = 0
        self.refusal: RequestError | None = None
        self._held = held
        self._answers: dict[int, RepeatedAnswer] = {}

    def add(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        """See `RepeatedAnswer.add`. Raises `BusyError` if the stream has to end, also to make room for others."""
        if self.refusal is None:
            so_far = self._answers.setdefault(index, RepeatedAnswer())
            before = so_far.num_bytes
            answer = so_far.add(answer)
            self._held.grow(self, so_far.num_bytes - before)
        if self.refusal is not None:
            raise self.refusal
        return answer

    def pieces(self, index: int, data: bytes) -> Iterator[bytes]:
        return self._answers[index].pieces(data)

    def drop(self, index: int) -> None:
        self._held.grow(self, -self._answers.pop(index).num_bytes)

    def refuse(self, error: RequestError) -> None:
        """Ends the stream, and frees its output at once, because its client may be slow to read."""
        self.refusal = error
        for answer in self._answers.values():
            answer.forget()
        self._answers.clear()
        self._held.grow(self, -self.num_bytes)


class HeldRepeats:
    """The repeated output of a server's streams, on one event loop. Above `MAX_HELD_BYTES`, ends the largest."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._shares: set[RepeatShare] = set()

    @contextmanager
    def share(self) -> Iterator[RepeatShare]:
        share = RepeatShare(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            self.num_bytes -= share.num_bytes

    def grow(self, share: RepeatShare, size: int) -> None:
        """Changes the bytes of a share by `size`, and ends streams above the limit."""
        share.num_bytes += size
        self.num_bytes += size
        while self.num_bytes > MAX_HELD_BYTES:
            largest = max(self._shares, key=lambda one: one.num_bytes)
            logger.warning(
                "Ended a stream that repeats %d bytes in its events; all streams repeat %d",
                largest.num_bytes,
                self.num_bytes,
            )
            largest.refuse(
                BusyError(
                    f"this stream repeats {largest.num_bytes} bytes in its events, and all streams {self.num_bytes}; "
                    f"the limit of all is {MAX_HELD_BYTES}. Ask for incremental_output, which repeats nothing, or for "
                    "fewer logprobs"
                )
            )


class RepeatPace:
    """Limits the rate at which all streams of a server together repeat output.

    A repeating event is as long as the output so far, so the total grows with its square: 600 tokens with 20
    alternatives each took 106 MiB. A stream that pauses after a long event has more tokens in its next one, and so
    repeats less often. Its final output is the same, and its last event is not delayed.

    Callers with pausing streams share `REPEATED_BYTES` equally, and so do the streams of each. A stream with short
    events pauses little, however long the events of others are.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._waiting: Counter[str] = Counter()

    async def after(self, size: int, caller: str) -> None:
        """Pauses after an event of `size` bytes. Not for the last event of an output."""
        if size <= SHORT_EVENT:
            return
        self._waiting[caller] += 1
        try:
            left = float(size)
            while left >= 1.0:
                rate = REPEATED_BYTES / (len(self._waiting) * self._waiting[caller])
                pause = min(left / rate, LONGEST_PAUSE)
                await self._sleep(pause)
                left -= pause * rate
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

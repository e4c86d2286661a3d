"""What streams repeat: each event of `/generate` says all that was said before it, unless asked for what is new."""

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

MOST_HELD_BYTES = 128 * 2**20
"""What all streams may hold to repeat it. About 11 bytes a token, so that a few hundred long outputs fit; with twenty
alternatives for each token it is 700."""

REPEATED_BYTES = 32 * 2**20
"""Bytes a second of events that repeat all so far, in all streams together: about a tenth of a core."""

SHORT_EVENT = 16_384
"""Events of so many bytes wait for nothing: some thousand tokens without logprobs."""

LONGEST_PAUSE = 1.0
"""Seconds after which a stream that waits looks again how many others do."""

_encoder = msgspec.json.Encoder()

GAP = b"\0"
"""A byte that no JSON has."""

_GAP_LIST = msgspec.Raw(b"[%b]" % GAP)


class RepeatedAnswer:
    """The answers of one completion in a stream whose events repeat all that was said before.

    What is repeated is written once, as JSON, and copied from then on: an event costs what copying its bytes does. In
    the answers of `add` a `GAP` stands for each, which `pieces` fills: a client that reads slowly has a long event wait
    for it in no further copy. `num_bytes`: of what is repeated.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._text = bytearray()
        self._lists: dict[str, bytearray] = {}
        self._in_order: list[bytearray] = []

    def add(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer of the next delta, with all that was said before."""
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
        """An event that carries the answer, in one piece, or a slice at a time if it is long. Nothing may be added
        before the last is taken."""
        around = data.split(GAP)
        parts = [part for pair in zip_longest(around, self._in_order, fillvalue=b"") for part in pair]
        if sum(map(len, parts)) <= RESPONSE_SLICE:
            yield b"".join(parts)
            return
        for part in parts:
            for start in range(0, len(part), RESPONSE_SLICE):
                yield bytes(part[start : start + RESPONSE_SLICE])

    def forget(self) -> None:
        """Frees what is repeated, also where an event that repeats it waits for its client."""
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
    """The completions of one stream that have begun and not ended. `num_bytes`: what they hold; `refusal`: why the
    stream has to end."""

    def __init__(self, held: HeldRepeats) -> None:
        self.num_bytes = 0
        self.refusal: RequestError | None = None
        self._held = held
        self._answers: dict[int, RepeatedAnswer] = {}

    def add(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        """See `RepeatedAnswer.add`. Raises `BusyError` if the stream has to end, be it for others' sake."""
        if self.refusal is None:
            so_far = self._answers.setdefault(index, RepeatedAnswer())
            before = so_far.num_bytes
            answer = so_far.add(answer)
            self._held.grow(self, so_far.num_bytes - before)
        if self.refusal is not None:
            raise self.refusal
        return answer

    def pieces(self, index: int, data: bytes) -> Iterator[bytes]:
        """See `RepeatedAnswer.pieces`."""
        return self._answers[index].pieces(data)

    def drop(self, index: int) -> None:
        """A completion ended: nothing of it is repeated any more."""
        self._held.grow(self, -self._answers.pop(index).num_bytes)

    def refuse(self, error: RequestError) -> None:
        """Ends the stream, and frees what it holds at once: its client may be slow to read."""
        self.refusal = error
        for answer in self._answers.values():
            answer.forget()
        self._answers.clear()
        self._held.grow(self, -self.num_bytes)


class HeldRepeats:
    """What the streams of a server hold. Beyond `MOST_HELD_BYTES` the one that holds most is ended. All methods run on
    one event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._shares: set[RepeatShare] = set()

    @contextmanager
    def share(self) -> Iterator[RepeatShare]:
        """One stream's."""
        share = RepeatShare(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            self.num_bytes -= share.num_bytes

    def grow(self, share: RepeatShare, size: int) -> None:
        """A share has so many bytes more, or fewer."""
        share.num_bytes += size
        self.num_bytes += size
        while self.num_bytes > MOST_HELD_BYTES:
            largest = max(self._shares, key=lambda one: one.num_bytes)
            logger.warning(
                "Ended a stream that repeats %d bytes in its events; all streams repeat %d",
                largest.num_bytes,
                self.num_bytes,
            )
            largest.refuse(
                BusyError(
                    f"this stream repeats {largest.num_bytes} bytes in its events, and all streams {self.num_bytes}; "
                    f"the limit of all is {MOST_HELD_BYTES}. Ask for incremental_output, which repeats nothing, or for "
                    "fewer logprobs"
                )
            )


class RepeatPace:
    """How fast the streams of a server may repeat what they have said, all together.

    An event that repeats is as long as the output so far, so a stream is as long as its square: 600 tokens with 20
    alternatives each made 106 MiB. A stream that waits after a long event finds more tokens in its next one, and
    repeats less often; what it says in the end is the same, and waits for nothing.

    Callers that wait have even shares of `REPEATED_BYTES`, and so have the streams of each: whose events are short
    waits little, however long those of others are.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._waiting: Counter[str] = Counter()

    async def after(self, size: int, whose: str) -> None:
        """Waits for as long as an event of `size` bytes has to be waited for. Not for the last of an output."""
        if size <= SHORT_EVENT:
            return
        self._waiting[whose] += 1
        try:
            left = float(size)
            while left >= 1.0:
                rate = REPEATED_BYTES / (len(self._waiting) * self._waiting[whose])
                pause = min(left / rate, LONGEST_PAUSE)
                await self._sleep(pause)
                left -= pause * rate
        finally:
            self._waiting[whose] -= 1
            if not self._waiting[whose]:
                del self._waiting[whose]

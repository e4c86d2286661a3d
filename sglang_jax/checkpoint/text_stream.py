"""Tokens one at a time → text, without ever showing a part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection


class TextStream:
    """Text of a growing run of tokens, in pieces.

    A character split over tokens is held back until its last byte is there, so U+FFFD appears only where the bytes are
    not UTF-8 at all. The pieces, joined, equal the decoding of all tokens at once; each token costs the same, however
    long the run.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped: Collection[int],
        leading_spaces_stripped: int,
    ) -> None:
        """`skipped` tokens have no text; of the spaces that the text begins with, the given number is left out."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._spaces_to_strip = leading_spaces_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False

    def push(self, token_id: int) -> str:
        """What one more token adds; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if data.isascii() and not self._holds_bytes:
            text = data.decode("ascii")  # most tokens are, and the decoder takes ten times as long
        else:
            text = self._decoder.decode(data)
            self._holds_bytes = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """What was held back, once there are no more tokens: U+FFFD for a character that never became whole."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._spaces_to_strip and text.startswith(" "):
            text = text[1:]
            self._spaces_to_strip -= 1
        if text:
            self._spaces_to_strip = 0
        return text

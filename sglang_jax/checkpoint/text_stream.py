"""Decodes tokens to text one at a time, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection


class TextStream:
    """Decodes a growing sequence of tokens in pieces.

    A character split over tokens is held back until its last byte, so U+FFFD appears only for bytes that are not UTF-8.
    The joined pieces equal the decoding of all tokens at once; each token costs the same, whatever the length.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped: Collection[int],
        leading_spaces_stripped: int,
    ) -> None:
        """`skipped`: tokens without text; `leading_spaces_stripped`: maximum leading spaces to remove."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._spaces_to_strip = leading_spaces_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False

    def push(self, token_id: int) -> str:
        """The text that a token adds; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if data.isascii() and not self._holds_bytes:
            text = data.decode("ascii")  # most tokens; the decoder takes ten times as long
        else:
            text = self._decoder.decode(data)
            self._holds_bytes = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """Ends the text: returns U+FFFD if the last character is incomplete."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._spaces_to_strip and text.startswith(" "):
            text = text[1:]
            self._spaces_to_strip -= 1
        if text:
            self._spaces_to_strip = 0
        return text

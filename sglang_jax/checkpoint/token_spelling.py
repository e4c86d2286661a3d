"""How a vocabulary spells bytes: GPT-2's byte alphabet, sentencepiece's `▁` and `<0xNN>`, or WordPiece's `##`."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

from sglang_jax.errors import CheckpointError

SENTENCEPIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CONTINUING = 3
"""Maximum bytes of a UTF-8 character after its first."""
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How tokens spell bytes. `byte_level`: in GPT-2's alphabet (Radford et al. 2019), one character per byte;
    otherwise as in sentencepiece, or, with `continuing`, as in WordPiece (Wu et al. 2016): a token without this prefix
    begins a word. `leading_spaces_stripped` spaces are removed from the start of a decoded text."""

    byte_level: bool
    leading_spaces_stripped: int = 0
    continuing: str | None = None

    def bytes_of(self, token: str) -> bytes:
        if self.continuing is not None:
            begins = not token.startswith(self.continuing)
            return (f" {token}" if begins else token.removeprefix(self.continuing)).encode("utf-8")
        if self.byte_level:
            alphabet = byte_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode("utf-8")
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        return token.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8")

    def bytes_of_added(self, token: str, *, is_piece: bool) -> bytes:
        """The bytes of a token that was added to a vocabulary; in byte-level tokenizers, its plain text.

        `is_piece`: the merged vocabulary has the same token, such as `Ġa`. Then it stands for the piece's bytes,
        unless UTF-8 cannot have them: `õ` is GPT-2's character for 0xF5, which UTF-8 does not use.
        """
        piece = self.bytes_of(token)
        return piece if not self.byte_level or (is_piece and _is_part_of_text(piece)) else token.encode("utf-8")


def _is_part_of_text(data: bytes) -> bool:
    """Whether bytes may be a part of UTF-8 text; characters may be cut at both ends."""
    whole = data.lstrip(bytes(range(0x80, 0xC0)))
    try:
        codecs.getincrementaldecoder("utf-8")().decode(whole)
    except UnicodeDecodeError:
        return False
    return len(data) - len(whole) <= _MAX_CONTINUING


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 characters for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def spelling_of(backend: Backend, source: str) -> TokenSpelling:
    """The spelling that `backend`'s decoder reads. Raises `CheckpointError` naming `source` for an unknown decoder."""
    return spelling_of_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()), source)


def spelling_of_steps(decoder: dict[str, Any] | None, source: str) -> TokenSpelling:
    """As `spelling_of`, for the decoder in a tokenizer.json."""
    steps = _decoder_steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenSpelling(byte_level=True)
    if kinds == ["WordPiece"]:
        return TokenSpelling(byte_level=False, leading_spaces_stripped=1, continuing=steps[0]["prefix"])
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SENTENCEPIECE_SPACE:
        stripped = int(steps[0].get("prepend_scheme", "always") != "never")
        return TokenSpelling(byte_level=False, leading_spaces_stripped=stripped)
    if steps and set(kinds) <= _SENTENCEPIECE_STEPS:
        stripped = sum(step["start"] for step in steps if step["type"] == "Strip" and step["content"] == " ")
        return TokenSpelling(byte_level=False, leading_spaces_stripped=stripped)
    raise CheckpointError(
        f"the tokenizer of {source} decodes by {kinds or 'nothing'}; supported: ByteLevel, WordPiece, "
        f"Metaspace, or sentencepiece's {', '.join(sorted(_SENTENCEPIECE_STEPS))}"
    )


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        parts: list[dict[str, Any]] = decoder["decoders"]
        return parts
    return [decoder]

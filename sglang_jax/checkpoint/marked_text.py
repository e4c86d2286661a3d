"""Tokenizes a rendered conversation with marks for control tokens that messages spell (see `ControlTokens`).

Spellings are tokenized separately from the text around them. Sentencepiece puts a space before each text, so pieces
that follow other text are tokenized by a copy of the tokenizer that does not.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from sglang_jax.checkpoint.control_tokens import ControlTokens
from sglang_jax.errors import ParameterError

_PREFIX: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}
"""Steps that may put a space before a text, and the settings that prevent it. `Prepend` is removed."""


class MarkedText:
    """Tokenizes text with marks. Thread-safe; concurrent first uses only repeat work."""

    def __init__(self, backend: Backend, control: ControlTokens) -> None:
        self._backend = backend
        self._control = control
        added = backend.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._takes_spaces = {token.content for token in added.values() if token.special and token.lstrip}
        self._takes_spaces_behind = {token.content for token in added.values() if token.special and token.rstrip}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text with marks; special tokens are added only to its first piece. Raises `ParameterError` for a
        control token that the vocabulary cannot spell as text."""
        ids: list[int] = []
        follows_text = False
        for number, (piece, is_marked) in enumerate(self._control.pieces(text)):
            joined = follows_text or (number > 0 and self._prefixes_only_first)
            if is_marked:
                ids += self._spell(piece, joined)
                follows_text = True
                continue
            head, rest = self._control.before_first(piece, self._takes_spaces) if joined else ("", piece)
            if head:
                ids += self._ids(self._joining, head)
            if rest:
                ids += self._ids(self._backend, rest, add_special_tokens and number == 0)
            follows_text = not self._control.ends(piece, self._takes_spaces_behind)
        return ids

    @staticmethod
    def _ids(backend: Backend, text: str, add_special_tokens: bool = False) -> list[int]:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _spell(self, token: str, joined: bool) -> list[int]:
        """Ids of a control token's spelling as text: it is cut into two pieces that have no control token."""
        first = self._joining if joined else self._backend
        for place in range(1, len(token)):
            ids = [*self._ids(first, token[:place]), *self._ids(self._joining, token[place:])]
            if not self._special_ids.intersection(ids):
                return ids
        raise ParameterError(
            f"the model cannot read {token!r} as text, because it is a control token", param="messages"
        )

    @cached_property
    def _joining(self) -> Backend:
        if not any(map(_puts_space, self._steps)):
            return self._backend
        stored = json.loads(self._backend.to_str())
        stored |= {name: _without_prefix(stored[name]) for name in ("normalizer", "pre_tokenizer")}
        return Backend.from_str(json.dumps(stored))

    @cached_property
    def _prefixes_only_first(self) -> bool:
        """Whether a space is put only before the first words of a text, not after control tokens."""
        return any(step.get("prepend_scheme") == "first" for step in self._steps)

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        parts = [part for part in (self._backend.normalizer, self._backend.pre_tokenizer) if part is not None]
        return [step for part in parts for step in _steps_of(json.loads(part.__getstate__()))]


def _steps_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part.get("normalizers") or part.get("pretokenizers") or () for step in _steps_of(inner)]


def _puts_space(step: dict[str, Any]) -> bool:
    never = _PREFIX.get(step["type"], {})
    return step["type"] == "Prepend" or any(step.get(name) != value for name, value in never.items())


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Changes a normalizer or pre-tokenizer of tokenizer.json so that it puts no space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] != "Sequence":
        return part | _PREFIX.get(part["type"], {})
    name = "normalizers" if "normalizers" in part else "pretokenizers"
    return part | {name: [step for inner in part[name] if (step := _without_prefix(inner)) is not None]}

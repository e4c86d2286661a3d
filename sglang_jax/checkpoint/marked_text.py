"""Token ids of a rendered conversation in which messages spell control tokens (see `ControlTokens`).

What is spelt is tokenized apart from the text around it. Sentencepiece puts a space before each text that it is given,
so whatever goes on from other text is given to a tokenizer that puts none there.
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
"""Steps that may put a space before a text, and what keeps them from it. `Prepend` does nothing else."""


class MarkedText:
    """Reads marks. Thread-safe but for the first use, which does no harm twice."""

    def __init__(self, backend: Backend, control: ControlTokens) -> None:
        self._backend = backend
        self._control = control
        added = backend.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._takes_spaces = {token.content for token in added.values() if token.special and token.lstrip}
        self._takes_spaces_behind = {token.content for token in added.values() if token.special and token.rstrip}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text with marks. Special tokens, if any are added, go with its first part: chats have their own.

        **Raises:** `ParameterError` for a control token that the vocabulary cannot spell as text.
        """
        ids: list[int] = []
        follows_text = False
        for number, (piece, is_marked) in enumerate(self._control.pieces(text)):
            joined = follows_text or (number > 0 and self._prefixes_first_alone)
            if is_marked:
                ids += self._spelt(piece, joined)
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

    def _spelt(self, token: str, joined: bool) -> list[int]:
        """A control token's spelling as text: of two parts, neither of which holds one."""
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
        """The tokenizer of text that goes on from other text."""
        if not any(map(_puts_space, self._steps)):
            return self._backend
        stored = json.loads(self._backend.to_str())
        stored |= {name: _without_prefix(stored[name]) for name in ("normalizer", "pre_tokenizer")}
        return Backend.from_str(json.dumps(stored))

    @cached_property
    def _prefixes_first_alone(self) -> bool:
        """Whether a space comes before the first words of a text alone, and not after control tokens."""
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
    """A normalizer or pre-tokenizer, as tokenizer.json has it, that puts no space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] != "Sequence":
        return part | _PREFIX.get(part["type"], {})
    name = "normalizers" if "normalizers" in part else "pretokenizers"
    return part | {name: [step for inner in part[name] if (step := _without_prefix(inner)) is not None]}

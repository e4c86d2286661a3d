"""Reads the bytes of each token from a checkpoint without building its tokenizer, for masks of grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglang_jax.architectures.files import read_file
from sglang_jax.checkpoint.gguf_file import GgufFile, open_gguf
from sglang_jax.checkpoint.gguf_tokenizer import added_tokens, control_tokens, token_spelling
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.checkpoint.token_spelling import spelling_of_steps
from sglang_jax.errors import CheckpointError, cut

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAX_BYTES = 256 << 20
"""Size limit of each file of a tokenizer."""

_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Exceptions when reading a malformed file."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of the tokens of a vocabulary.

    - `tokens`: by id; empty for an id without text.
    - `special`: ids of tokens that are not text, such as the end of a turn; their bytes are their names.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]


def load_token_table(source: ModelSource) -> TokenTable:
    """The table of a tokenizer (see `resolve_tokenizer`). Raises `CheckpointError` for a missing or unsupported one."""
    if source.kind is SourceKind.GGUF:
        return _of_gguf(open_gguf(source.path))
    return _of_folder(source.path)


def _of_gguf(file: GgufFile) -> TokenTable:
    tokens, spelling = token_spelling(file)
    added = added_tokens(file)
    spelt = (
        spelling.bytes_of_added(token, is_piece=False) if token_id in added else spelling.bytes_of(token)
        for token_id, token in enumerate(tokens)
    )
    return TokenTable(tuple(spelt), control_tokens(file))


def _of_folder(folder: Path) -> TokenTable:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER_FILE}; give --tokenizer-path with a folder that has one")
    try:
        stored = json.loads(read_file(path, MAX_BYTES))
        spelling = spelling_of_steps(stored.get("decoder"), str(path))
        pieces = _vocabulary(stored["model"]["vocab"])
        spelt = {token_id: spelling.bytes_of(piece) for piece, token_id in pieces.items()}
        added = _added(stored, folder)
        for token_id, token in added:
            spelt[token_id] = spelling.bytes_of_added(token["content"], is_piece=token["content"] in pieces)
        special = frozenset(token_id for token_id, token in added if token.get("special"))
        return TokenTable(tuple(spelt.get(token_id, b"") for token_id in range(max(spelt, default=-1) + 1)), special)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def token_id_of(folder: Path, token: str) -> int | None:
    """The id of a token by its name in tokenizer.json or tokenizer_config.json; None if neither has it. Raises
    `CheckpointError` for a damaged file."""
    path = folder / TOKENIZER_FILE
    stored = read_file(path, MAX_BYTES) if path.is_file() else b"{}"
    try:
        # Decodes only the added tokens of a file of many MB.
        added = msgspec.json.decode(stored, type=_AddedTokens).added_tokens or ()
        found: Any = next((each.id for each in added if each.content == token), None)
        if found is None:
            further = (token_id for token_id, each in _added({}, folder) if each["content"] == token)
            found = next(further, None)
        if found is None:
            found = _vocabulary(json.loads(stored)["model"]["vocab"]).get(token, -1) if path.is_file() else -1
        if type(found) is not int:
            raise TypeError(f"the id of {token!r} is {found!r}, it must be an integer")
    except (*_DAMAGED, msgspec.DecodeError) as error:
        raise _unreadable(path, error) from error
    return found if found >= 0 else None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] | None = None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the vocabulary of {path} cannot be read: {type(error).__name__}: {cut(str(error))}")


def _vocabulary(vocabulary: Any) -> dict[str, int]:
    """Ids by token. BPE has a mapping to ids, and unigram models a list of tokens with scores."""
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    return {token: token_id for token_id, (token, _) in enumerate(vocabulary)}


def _added(stored: Mapping[str, Any], folder: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """Added tokens of tokenizer.json, and those that only tokenizer_config.json has."""
    added = {int(token["id"]): token for token in stored.get("added_tokens") or ()}
    config = folder / CONFIG_FILE
    if config.is_file():
        further = json.loads(read_file(config, MAX_BYTES)).get("added_tokens_decoder") or {}
        added = {int(token_id): token for token_id, token in further.items()} | added
    return list(added.items())

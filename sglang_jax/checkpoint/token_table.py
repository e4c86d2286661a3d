"""The bytes that each token stands for, read from a checkpoint without building its tokenizer.

Whoever must know what tokens spell, and need not cut text into them, gets this: masks of grammars are made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_jax.architectures.files import read_file
from sglang_jax.checkpoint.gguf_file import GgufFile, open_gguf
from sglang_jax.checkpoint.gguf_tokenizer import control_tokens, token_spelling
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.checkpoint.token_spelling import TokenSpelling, spelling_of_steps
from sglang_jax.errors import CheckpointError, cut

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What the tokens of a vocabulary stand for.

    - `tokens`: by id; empty for an id without a text.
    - `special`: ids of tokens that are not text, such as those that end a turn. Their bytes are their names.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]


def load_token_table(source: ModelSource) -> TokenTable:
    """The table of a checkpoint's tokenizer (see `resolve_tokenizer`).

    **Raises:** `CheckpointError` if there is none, or one of an unknown kind.
    """
    if source.kind is SourceKind.GGUF:
        return _of_gguf(open_gguf(source.path))
    return _of_folder(source.path)


def _of_gguf(file: GgufFile) -> TokenTable:
    tokens, spelling = token_spelling(file)
    special = control_tokens(file)
    return TokenTable(tuple(map(spelling.bytes_of, tokens)), special)


def _of_folder(folder: Path) -> TokenTable:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TOKENIZER_FILE}; give --tokenizer-path with a folder that has one")
    try:
        stored = json.loads(read_file(path, _MAX_BYTES))
        spelling = spelling_of_steps(stored.get("decoder"), str(path))
        ids = _vocabulary(stored["model"]["vocab"])
        special: set[int] = set()
        for token_id, token in _added(stored, folder):
            ids[token["content"]] = token_id
            if token.get("special"):
                special.add(token_id)
        return TokenTable(_by_id(ids, spelling), frozenset(special))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {cut(str(error))}"
        raise CheckpointError(f"the vocabulary of {path} cannot be read: {reason}") from error


def _vocabulary(vocabulary: Any) -> dict[str, int]:
    """Of BPE a mapping to ids; of a unigram model a list of tokens with their scores."""
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    return {token: token_id for token_id, (token, _) in enumerate(vocabulary)}


def _added(stored: Mapping[str, Any], folder: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """Added tokens of tokenizer.json, and those that tokenizer_config.json alone has."""
    added = {int(token["id"]): token for token in stored.get("added_tokens") or ()}
    config = folder / CONFIG_FILE
    if config.is_file():
        further = json.loads(read_file(config, _MAX_BYTES)).get("added_tokens_decoder") or {}
        added = {int(token_id): token for token_id, token in further.items()} | added
    return list(added.items())


def _by_id(ids: Mapping[str, int], spelling: TokenSpelling) -> tuple[bytes, ...]:
    tokens = [b""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = spelling.bytes_of(token)
    return tuple(tokens)

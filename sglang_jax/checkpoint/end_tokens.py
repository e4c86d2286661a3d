"""Tokens with a role from a checkpoint's tokenizer. The config of a chat model often keeps the end token of its base
model, while its tokenizer has the end of a turn as `eos_token`; a config never has the separator of texts."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_jax.architectures.files import read_file
from sglang_jax.checkpoint.gguf_end_tokens import gguf_end_token_ids
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.checkpoint.token_table import CONFIG_FILE, MAX_BYTES, token_id_of
from sglang_jax.errors import CheckpointError, quote

_FILES = (CONFIG_FILE, "special_tokens_map.json")
"""Files that may name tokens with a role."""

_SEPARATOR = "[SEP]"


def end_token_ids(source: ModelSource) -> tuple[int, ...]:
    """The end tokens of a tokenizer (see `resolve_tokenizer`), if it names any. Raises `CheckpointError` for damaged
    files."""
    if source.kind is SourceKind.GGUF:
        return gguf_end_token_ids(open_gguf(source.path))
    token = _token(source.path, "eos_token")
    found = None if token is None else token_id_of(source.path, token)
    return () if found is None else (found,)


def separator_id(source: ModelSource) -> int:
    """The token between the texts of a pair: `sep_token` of a tokenizer, or BERT's `[SEP]`. Raises `CheckpointError` if
    it has none, and for damaged files."""
    token = _token(source.path, "sep_token") or _SEPARATOR
    found = token_id_of(source.path, token)
    if found is None:
        raise CheckpointError(
            f"the tokenizer of {source.address} has no {quote(token)}, which separates the texts of a pair"
        )
    return found


def _token(folder: Path, role: str) -> str | None:
    return next(filter(None, (_token_in(folder / name, role) for name in _FILES)), None)


def _token_in(file: Path, role: str) -> str | None:
    """Reads the token with a role, a string or an object with `content`. None if there is no such file."""
    if not file.is_file():
        return None
    try:
        token = json.loads(read_file(file, MAX_BYTES)).get(role)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} must contain a JSON object: {error}") from error
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{file}: {role} is {token!r:.80}, it must be a string")
    return text

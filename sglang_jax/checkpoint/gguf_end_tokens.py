"""End tokens of GGUF files."""

from __future__ import annotations

from sglang_jax.checkpoint.gguf_file import GgufFile

TEXT_ENDS = frozenset(("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"))
TURN_ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<turn|>", "<end_of_utterance>", "<EOT>", "▁<EOT>", "< EOT >"),
    )
)
END_NAMES = TEXT_ENDS | TURN_ENDS
"""Tokens that end a text or a turn in published vocabularies."""

_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

TOKENS = "tokenizer.ggml.tokens"


def gguf_end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids from the file's keys, and of vocabulary entries in `TURN_ENDS`; those in `TEXT_ENDS` count only if the file
    has no `eos_token_id`."""
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in _KEYS]
    tokens: list[object] = file.get(TOKENS, list) or []
    names = {token for token in tokens if isinstance(token, str)} & (END_NAMES if ids[0] is None else TURN_ENDS)
    if {"<|return|>", "<|call|>"} <= names:
        names -= {"<|end|>"}  # ends a message in OpenAI's harmony format; an answer has several
    by_name = [number for number, token in enumerate(tokens) if token in names]
    return tuple(dict.fromkeys(token for token in (*ids, *by_name) if token is not None))

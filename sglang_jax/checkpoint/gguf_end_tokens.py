"""The tokens that end an output, as GGUF files know them."""

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
"""Names of tokens that end a text or a turn, in published vocabularies."""

_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

TOKENS = "tokenizer.ggml.tokens"


def gguf_end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Those that the file's keys give, and those that its vocabulary has by a name of `TURN_ENDS`; by one of
    `TEXT_ENDS` only if no key says what ends a text."""
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in _KEYS]
    tokens: list[object] = file.get(TOKENS, list) or []
    names = {token for token in tokens if isinstance(token, str)} & (END_NAMES if ids[0] is None else TURN_ENDS)
    if {"<|return|>", "<|call|>"} <= names:
        names -= {"<|end|>"}  # in OpenAI's harmony format it ends a message, and an answer has several
    by_name = [number for number, token in enumerate(tokens) if token in names]
    return tuple(dict.fromkeys(token for token in (*ids, *by_name) if token is not None))

"""Builds a `tokenizers` pipeline from the metadata of a GGUF file.

Supported `tokenizer.ggml.model`: `gpt2` (byte-level BPE, words split by `tokenizer.ggml.pre`), `llama` (sentencepiece
BPE).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sglang_jax.checkpoint.gguf_end_tokens import END_NAMES, TOKENS, gguf_end_token_ids
from sglang_jax.checkpoint.gguf_file import GgufFile
from sglang_jax.checkpoint.token_spelling import SENTENCEPIECE_SPACE, TokenSpelling
from sglang_jax.errors import CheckpointError, quote

logger = logging.getLogger(__name__)

_LONGEST_TOKEN = 512
"""Maximum characters of a merged token: finding merges tries every cut of each token."""


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Roles of special tokens: transformers' names to GGUF names."""


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is split before merging. `pattern` None: GPT-2's pattern."""

    pattern: str | None = None
    single_digits: bool = False
    compose: bool = False
    whole_tokens_first: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_PATTERN = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Split(_LLAMA3_PATTERN, whole_tokens_first=True, add_bos=True)
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Split(_QWEN2_PATTERN, compose=True),
    "deepseek-r1-qwen": _Split(_QWEN2_PATTERN),
    "tekken": _Split(_TEKKEN_PATTERN, whole_tokens_first=True, add_bos=True),
}


@dataclass(slots=True)
class GgufTokenizer:
    """A `TokenizerFiles` (see `checkpoint.tokenizer`) without transformers, whose import takes longer than building
    this.

    - `special_tokens_map`: tokens with a role, by transformers' name of it, such as `bos_token`.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    response_template: Mapping[str, Any] | None = None

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of("pad_token")

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template, with tools or without. Raises `ValueError` if the file has none."""
        template = chat_template or self.chat_template
        if not isinstance(template, str):
            raise ValueError("the file has no chat template")
        return template

    def save_pretrained(self, folder: str | Path) -> None:
        from transformers import PreTrainedTokenizerFast

        written = PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer, clean_up_tokenization_spaces=False, **self.special_tokens_map
        )
        written.chat_template = self.chat_template
        written.save_pretrained(folder)

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Builds the tokenizer that the file describes. Raises `CheckpointError` naming an unsupported kind or split; users
    can then give another tokenizer."""
    model = file.require("tokenizer.ggml.model", str)
    tokens = _strings(file, TOKENS)
    if model == "gpt2":
        split = _split(file)
        backend, add_bos = _byte_level(file, tokens, split), split.add_bos
    elif model == "llama":
        backend, add_bos = _sentencepiece(file, tokens), True
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer {model!r} is not supported (supported: gpt2, llama); give --tokenizer-path"
        )
    named = {name: token for name, role in _ROLES.items() if (token := _token(file, tokens, role)) is not None}
    _add_special_tokens(backend, tokens, _token_types(file, tokens), named)
    stated_bos = file.get("tokenizer.ggml.add_bos_token", bool)
    add_eos = file.get("tokenizer.ggml.add_eos_token", bool) or False
    backend.post_processor = _around_text(
        backend,
        named.get("bos_token") if (add_bos if stated_bos is None else stated_bos) else None,
        named.get("eos_token") if add_eos else None,
    )
    return GgufTokenizer(backend, named, file.get("tokenizer.chat_template", str))


def _around_text(backend: Tokenizer, first: str | None, last: str | None) -> processors.TemplateProcessing:
    parts = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
    tokens = {token: backend.token_to_id(token) for token in (first, last) if token}
    return processors.TemplateProcessing(single=parts, special_tokens=list(tokens.items()))


def token_spelling(file: GgufFile) -> tuple[list[str], TokenSpelling]:
    """The vocabulary, and how its entries spell bytes. Raises `CheckpointError` for an unsupported kind of
    tokenizer."""
    model = file.require("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path}: tokenizer {model!r} is not supported (supported: gpt2, llama)")
    return _strings(file, TOKENS), TokenSpelling(byte_level=model == "gpt2")


def control_tokens(file: GgufFile) -> frozenset[int]:
    return _of_types(file, {_TokenType.CONTROL})


def added_tokens(file: GgufFile) -> frozenset[int]:
    """Ids of the tokens that merges do not make; their text is not encoded."""
    return _of_types(file, {_TokenType.CONTROL, _TokenType.USER_DEFINED})


def _of_types(file: GgufFile, wanted: Set[int]) -> frozenset[int]:
    types = _token_types(file, _strings(file, TOKENS))
    return frozenset(token for token, kind in enumerate(types) if kind in wanted)


def _split(file: GgufFile) -> _Split:
    name = file.get("tokenizer.ggml.pre", str)
    if name not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}, an unsupported way of splitting text into words; "
            f"supported: {', '.join(_SPLITS)}; give --tokenizer-path"
        )
    return _SPLITS[name]


def _byte_level(file: GgufFile, tokens: list[str], split: _Split) -> Tokenizer:
    merges = [_merge_pair(file, merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=split.whole_tokens_first))
    if split.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge_pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is not two tokens")
    return left, right


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    scores: list[float] | None = file.get("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores must give one score for each of {len(tokens)} tokens"
        )
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, _token_types(file, tokens), strict=True)
        if kind == _TokenType.NORMAL
    }
    longest = max(mergeable, key=len, default="")
    if len(longest) > _LONGEST_TOKEN:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens holds a token of {len(longest)} characters, the limit is "
            f"{_LONGEST_TOKEN}: {quote(longest)}"
        )
    unknown = _token(file, tokens, "unknown")
    model = models.BPE(
        vocab=_vocabulary(tokens),
        merges=_merges_of_scores(mergeable),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool)
    prepends = prefix is None or prefix
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SENTENCEPIECE_SPACE, prepend_scheme="first" if prepends else "never", split=False
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(SENTENCEPIECE_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepends else steps)
    return backend


def _merges_of_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Converts sentencepiece scores to merges, highest score first. For equal scores, the longer left part comes first,
    as in Hugging Face's conversions."""
    merges = [
        (-score, -cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(token[:-negated], token[-negated:]) for _, negated, token in sorted(merges)]


def _add_special_tokens(backend: Tokenizer, tokens: list[str], types: list[int], named: Mapping[str, str]) -> None:
    """Adds control tokens and tokens with a role as special tokens, and user-defined ones as text that is never
    split."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _TokenType.CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    others = [token for token in named.values() if token not in {*control, *defined}]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in others])


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _token(file: GgufFile, tokens: list[str], role: str) -> str | None:
    index = file.get(f"tokenizer.ggml.{role}_token_id", int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        logger.warning(
            "Ignoring tokenizer.ggml.%s_token_id %d of %s: the vocabulary has %d tokens",
            role,
            index,
            file.path,
            len(tokens),
        )
        return None
    return tokens[index]


def _token_types(file: GgufFile, tokens: list[str]) -> list[int]:
    """The types in the file, except that end tokens are always control tokens."""
    types: list[int] | None = file.get("tokenizer.ggml.token_type", list)
    if types is None:
        types = [_TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type must give one type for each of {len(tokens)} tokens"
        )
    ends = {number for number, token in enumerate(tokens) if token in END_NAMES}.union(gguf_end_token_ids(file))
    return [_TokenType.CONTROL if number in ends else kind for number, kind in enumerate(types)]


def _strings(file: GgufFile, key: str) -> list[str]:
    value: list[object] = file.require(key, list)
    strings = [item for item in value if isinstance(item, str)]
    if len(strings) != len(value):
        raise CheckpointError(f"{file.path}: metadata {key} should be a list of strings")
    return strings

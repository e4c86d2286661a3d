"""The bytes of tokens, read without a tokenizer, against the tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.gguf_files import byte_level_metadata, write_gguf
from helpers.tiny_models import make_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint import ModelSource, SourceKind, resolve_model
from sglang_jax.checkpoint.token_table import load_token_table
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.errors import CheckpointError

TEXTS = ["the fox 12", "  two  spaces\n\n\tand tabs  ", "naïve café, 東京 🙂👩‍👩‍👧", '{"a": [1, "\\"x"]}', "x"]

PIECES = [*"▁abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "fo", "fox", "▁fox", "▁▁", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox"), ("▁", "▁")]


def byte_level_folder(folder: Path) -> ModelSource:
    make_tiny_tokenizer(folder)
    return ModelSource(SourceKind.SAFETENSORS, folder, "tiny")


def byte_level_gguf(folder: Path) -> ModelSource:
    path = write_gguf(folder / "x.gguf", "llama", byte_level_metadata(make_tiny_tokenizer(folder)), {})
    return ModelSource(SourceKind.GGUF, path, "tiny")


def sentencepiece_folder(folder: Path) -> ModelSource:
    """As in Llama 2's tokenizer.json."""
    ids = {token: number for number, token in enumerate(SENTENCEPIECE)}
    backend = Backend(models.BPE(ids, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return ModelSource(SourceKind.SAFETENSORS, folder, "tiny")


def sentencepiece_gguf(folder: Path) -> ModelSource:
    kinds = [2, 3, 3, *[6] * len(BYTES), *[1] * len(PIECES)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(SENTENCEPIECE))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return ModelSource(SourceKind.GGUF, write_gguf(folder / "x.gguf", "llama", metadata, {}), "tiny")


@pytest.mark.parametrize("make", [byte_level_folder, byte_level_gguf, sentencepiece_folder, sentencepiece_gguf])
def test_token_bytes_equal_the_tokenizers(tmp_path: Path, make: object) -> None:
    source = make(tmp_path)  # type: ignore[operator]
    check(source, leading_space="sentencepiece" in make.__name__)  # type: ignore[attr-defined]


def test_tokens_of_the_embedded_model() -> None:
    check(resolve_model("demo"), leading_space=False)


def check(source: ModelSource, *, leading_space: bool) -> None:
    table, tokenizer = load_token_table(source), load_tokenizer(source)
    assert len(table.tokens) == tokenizer.vocab_size
    assert table.special >= tokenizer.special_token_ids - {0}  # `<unk>` is text to some files
    for token, spelt in enumerate(table.tokens):
        assert spelt == tokenizer.token_bytes(token), token
    for text in TEXTS:
        joined = b"".join(table.tokens[token] for token in tokenizer.encode(text, add_special_tokens=False))
        # Sentencepiece adds a space before a text; some do not if the text starts with one.
        before = b" " if leading_space and not (source.kind is SourceKind.GGUF and text.startswith(" ")) else b""
        assert joined == before + text.encode()


def test_bytes_of_added_tokens(tmp_path: Path) -> None:
    source = byte_level_folder(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    first = len(load_token_table(source).tokens)
    stored["added_tokens"] += [
        {"id": first + 3, "content": "<|call|>", "special": True},
        {"id": first + 4, "content": "Ġpiece é", "special": False},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    table = load_token_table(source)
    assert table.tokens[first : first + 3] == (b"", b"", b"")
    assert table.tokens[first + 3] == b"<|call|>"
    assert first + 3 in table.special
    assert table.tokens[first + 4] == "Ġpiece é".encode(), "added tokens are written as they are"
    assert first + 4 not in table.special


LATIN = ["õ", "Größe", "đem", "čaj", "Ġzq", "<|größe|>"]
"""Their letters are also GPT-2's spellings of bytes."""


@pytest.mark.parametrize("make", [byte_level_folder, byte_level_gguf])
def test_added_tokens_with_latin_letters_are_spelled_literally(tmp_path: Path, make: object) -> None:
    if make is byte_level_folder:
        source = byte_level_folder(tmp_path)
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        theirs.add_tokens(LATIN[:-1])
        theirs.add_tokens(LATIN[-1:], special_tokens=True)
        theirs.add_tokens(["Ġthe"])  # which is a piece, and stays one
        theirs.save_pretrained(tmp_path)
    else:
        metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path))
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        kinds[tokens.index(LATIN[0])] = 4
        tokens += LATIN[1:]
        kinds += [4, 4, 4, 4, 3]
        source = ModelSource(SourceKind.GGUF, write_gguf(tmp_path / "x.gguf", "llama", metadata, {}), "tiny")
    check(source, leading_space=False)
    tokenizer = load_tokenizer(source)
    text = f"the {' fox '.join(LATIN)} é"
    ids = tokenizer.encode(text)
    vocabulary = load_token_table(source).tokens
    assert [vocabulary[token].decode() for token in ids if vocabulary[token].decode(errors="replace") in LATIN] == LATIN
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|größe|>", "")
    stream = tokenizer.stream_decoder(skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
    source = byte_level_folder(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="BPEDecoder"):
        load_token_table(source)

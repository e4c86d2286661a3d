"""Which tokens end an output, where the model's config is incomplete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.gguf_files import byte_level_metadata, write_gguf
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer

from sglang_jax.checkpoint import ModelSource, SourceKind, open_checkpoint, resolve_tokenizer
from sglang_jax.checkpoint.end_tokens import end_token_ids
from sglang_jax.checkpoint.gguf_end_tokens import gguf_end_token_ids
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.config import EngineConfig
from sglang_jax.engine import model_core
from sglang_jax.errors import CheckpointError

BEGIN, START, END = range(3)
"""Ids of `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`."""


def change(file: Path, values: dict[str, Any]) -> None:
    """Changes fields of a JSON file; removes those that are None."""
    stored = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))


def folder_source(folder: Path) -> ModelSource:
    return ModelSource(SourceKind.SAFETENSORS, folder, "tiny")


@pytest.mark.parametrize("name", ["<|im_end|>", {"content": "<|im_end|>", "__type": "AddedToken"}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_folder_ends_texts_with_the_eos_token(tmp_path: Path, file: str, name: object) -> None:
    make_tiny_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", {"eos_token": None, "added_tokens_decoder": None})
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert end_token_ids(folder_source(tmp_path)) == ()
    change(tmp_path / file, {"eos_token": name})
    assert end_token_ids(folder_source(tmp_path)) == (END,)


def test_the_eos_token_may_be_a_word_of_the_vocabulary_or_unknown(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", {"eos_token": "a"})
    [letter] = end_token_ids(folder_source(tmp_path))
    assert load_tokenizer(folder_source(tmp_path)).encode("a") == [letter]
    change(tmp_path / "tokenizer_config.json", {"eos_token": "<|nowhere|>"})
    assert end_token_ids(folder_source(tmp_path)) == ()
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    for odd in (1.5, True, "5", None):
        stored["model"]["vocab"]["a"] = odd
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
        change(tmp_path / "tokenizer_config.json", {"eos_token": "a"})
        with pytest.raises(CheckpointError, match="the id of 'a' is"):
            end_token_ids(folder_source(tmp_path))
    make_tiny_tokenizer(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    end = next(added for added in stored["added_tokens"] if added["content"] == "<|im_end|>")
    change(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"3": end}, "eos_token": "<|im_end|>"})
    assert end_token_ids(folder_source(tmp_path)) == (end["id"],) != (3,)  # one of two ids: that of the tokenizer
    assert load_tokenizer(folder_source(tmp_path)).eos_token_id == end["id"]
    for damaged in ("[]", '{"eos_token": 7}', "{"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            end_token_ids(folder_source(tmp_path))


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        (CHATML, {"eos": BEGIN}, (BEGIN, END)),
        (CHATML, {"eos": END}, (END,)),
        (CHATML, {}, (BEGIN, END)),
        (["<s>", "</s>", "<|end|>"], {"eos": 1}, (1, 2)),
        (["<s>", "</s>", "<end_of_turn>"], {"eos": 1}, (1, 2)),
        (["<s>", "</s>", "<other>"], {"eos": 1, "eot": 2}, (1, 2)),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, (1, 2)),  # ends a message, but not the answer
    ],
)
def test_a_gguf_file_names_end_tokens_by_key_and_by_spelling(
    tmp_path: Path, names: list[str], keys: dict[str, int], ends: tuple[int, ...]
) -> None:
    metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path))
    metadata = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}
    metadata["tokenizer.ggml.tokens"] = [*names, *metadata["tokenizer.ggml.tokens"][3:]]
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    metadata |= {f"tokenizer.ggml.{key}_token_id": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "x.gguf", "llama", metadata, {})
    assert gguf_end_token_ids(open_gguf(path)) == ends
    source = ModelSource(SourceKind.GGUF, path, "x")
    assert end_token_ids(source) == ends
    # whatever the file says, they cannot be spelled in text
    tokenizer = load_tokenizer(source)
    assert tokenizer.special_token_ids >= set(ends)
    assert tokenizer.encode(f"a{names[ends[-1]]}")[-1] == ends[-1]


class StartedError(Exception):
    """Raised instead of creating a runner."""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_engine_uses_the_tokenizers_end_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    model = make_tiny_checkpoint(tmp_path / "model")
    change(model / "config.json", {"eos_token_id": 9})
    change(model / "generation_config.json", {"eos_token_id": [8]})
    tokenizer = make_tiny_checkpoint(tmp_path / "other") if elsewhere else model
    if elsewhere:
        change(tokenizer / "tokenizer_config.json", {"eos_token": "<|im_start|>"})
    seen = []

    def create_runner(config: EngineConfig, checkpoint: Any) -> NoReturn:
        seen.append(checkpoint.config.eos_token_ids)
        raise StartedError

    monkeypatch.setattr(model_core, "load_backend", lambda config: create_runner)
    config = EngineConfig(model_path=str(model), tokenizer_path=str(tokenizer) if elsewhere else None)
    with pytest.raises(StartedError):
        model_core.load_core(config, channel=None)  # type: ignore[arg-type]
    assert seen == [(9, 8, START if elsewhere else END)]
    assert open_checkpoint(str(model)).config.eos_token_ids == (9, 8)
    assert end_token_ids(resolve_tokenizer(str(model))) == (END,)

"""Checkpoints damaged by accident or on purpose: each loads, or is refused by name, quickly."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from helpers.gguf_files import byte_level_metadata, make_tiny_gguf, model_metadata, model_tensors, write_gguf
from helpers.hostile_files import spoil_bytes, spoil_json
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind, resolve_model
from sglang_jax.checkpoint.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from sglang_jax.checkpoint.tokenizer import TOKENIZER_FILE, load_tokenizer
from sglang_jax.errors import CheckpointError, RequestError

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}

SECONDS = 2.0
MEGABYTES = 200


@dataclass(frozen=True)
class Good:
    """Checkpoints of one tiny model: a folder with one file of weights, one with several, and a GGUF file."""

    single: Path
    several: Path
    gguf: Path
    gguf_parts: tuple[dict[str, Any], dict[str, Any]]
    originals: dict[Path, bytes] = field(default_factory=dict)

    def original(self, file: Path) -> bytes:
        return self.originals.setdefault(file, file.read_bytes())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    single = make_tiny_checkpoint(folder / "single", **SMALL)
    several = make_tiny_checkpoint(folder / "several", max_shard_size="20KB", **SMALL)
    model, tokenizer = make_tiny_model("llama", **SMALL), make_tiny_tokenizer(folder / "tokenizer")
    gguf = make_tiny_gguf(folder / "model.gguf", model, tokenizer)
    metadata = model_metadata(model, "llama") | byte_level_metadata(tokenizer)
    return Good(single, several, gguf, (metadata, model_tensors(model, GGMLQuantizationType.F32)))


def read_all(reader: Any) -> None:
    for name in sorted(reader.names()):
        reader.read(name)


def spoil_config(good: Good, numbers: random.Random) -> None:
    file = good.single / "config.json"
    file.write_bytes(spoil_json(json.loads(good.original(file)), numbers))
    open_checkpoint(str(good.single))


def spoil_index(good: Good, numbers: random.Random) -> None:
    file = good.several / INDEX_FILE
    file.write_bytes(spoil_json(json.loads(good.original(file)), numbers))
    read_all(SafetensorsReader(good.several))


def spoil_header(good: Good, numbers: random.Random) -> None:
    file = good.single / SINGLE_FILE
    whole = good.original(file)
    end = 8 + int.from_bytes(whole[:8], "little")
    if numbers.random() < 0.5:
        header = spoil_json(json.loads(whole[8:end]), numbers)
        file.write_bytes(len(header).to_bytes(8, "little") + header + whole[end:])
    else:
        file.write_bytes(spoil_bytes(whole[:end], numbers) + whole[end:])
    read_all(SafetensorsReader(good.single))


def spoil_tokenizer(good: Good, numbers: random.Random) -> None:
    file = good.single / numbers.choice((TOKENIZER_FILE, "tokenizer_config.json"))
    file.write_bytes(spoil_json(json.loads(good.original(file)), numbers))
    load_tokenizer(resolve_model(str(good.single))).encode("Hello wörld")


def spoil_gguf(good: Good, numbers: random.Random) -> None:
    file = good.gguf.with_name("spoilt.gguf")
    file.write_bytes(spoil_bytes(good.original(good.gguf), numbers))
    _open_gguf(file)


def spoil_gguf_values(good: Good, numbers: random.Random) -> None:
    """The container is valid, its metadata is not."""
    odd: tuple[Any, ...] = (0, 1, 7, 2**31, 2**32 - 1, 0.0, -1.0, 1e30, float("nan"), "", "x", "gpt2", True, [1], ["a"])
    metadata, tensors = dict(good.gguf_parts[0]), dict(good.gguf_parts[1])
    for _ in range(numbers.randint(1, 3)):
        key = numbers.choice(list(metadata))
        value = metadata[key]
        if isinstance(value, list) and numbers.random() < 0.7:
            place = numbers.randrange(len(value))
            other = [*value[:place], value[place - 1], *value[place + 1 :]]
            metadata[key] = other if numbers.random() < 0.7 else value[:-1]
        else:
            metadata[key] = numbers.choice(odd)
    if numbers.random() < 0.3:
        del tensors[numbers.choice(list(tensors))]
    file = good.gguf.with_name("odd.gguf")
    file.unlink(missing_ok=True)
    _open_gguf(write_gguf(file, "llama", metadata, tensors))


def _open_gguf(file: Path) -> None:
    checkpoint = open_checkpoint(str(file))
    assert checkpoint.reader is not None
    read_all(checkpoint.reader)
    load_tokenizer(checkpoint.tokenizer_source).encode("Hello <|im_start|>")


SPOILERS = (spoil_config, spoil_index, spoil_header, spoil_tokenizer, spoil_gguf, spoil_gguf_values)


def spoil(good: Good, spoiler: Callable[[Good, random.Random], None], count: int) -> Counter[bool]:
    """Returns how many loaded. Raises any error that is not a `CheckpointError`."""
    loaded: Counter[bool] = Counter()
    longest = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for number in range(count):
            start = time.process_time()
            try:
                spoiler(good, random.Random(number))
                loaded[True] += 1
            except CheckpointError as error:
                loaded[False] += 1
                longest = max(longest, len(str(error)))
            assert time.process_time() - start < SECONDS, f"file {number} took too long"
    finally:
        for file, data in good.originals.items():
            file.write_bytes(data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MiB more memory"
    assert longest < 4000, "an error repeats what it refuses"
    return loaded


@pytest.mark.parametrize("spoiler", SPOILERS, ids=lambda spoiler: spoiler.__name__)
def test_a_damaged_file_loads_or_is_refused_by_name(good: Good, spoiler: Callable[[Good, random.Random], None]) -> None:
    loaded = spoil(good, spoiler, 100)
    assert min(loaded[True], loaded[False]) > 0, loaded


@pytest.mark.soak
@pytest.mark.parametrize("spoiler", SPOILERS, ids=lambda spoiler: spoiler.__name__)
def test_ten_thousand_damaged_files(good: Good, spoiler: Callable[[Good, random.Random], None]) -> None:
    spoil(good, spoiler, 10_000)


class PanicException(BaseException):
    """As the tokenizers package raises it, without exporting the class: not an `Exception`."""


def test_a_tokenizer_that_panics_is_an_error(good: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it loads or encodes a text: the process survives both."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("range end index 18446744073709551318 out of range")

    source = resolve_model(str(good.single))
    tokenizer = load_tokenizer(source)
    monkeypatch.setattr(tokenizer, "_backend", SimpleNamespace(encode=panic))
    with pytest.raises(RequestError, match="the model's tokenizer cannot read this text"):
        tokenizer.encode("a")
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", panic)
    with pytest.raises(CheckpointError, match="cannot be read: PanicException: range end index"):
        load_tokenizer(source)


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


def _make_device(path: Path) -> None:
    """A device without end."""
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_make_pipe, _make_device])
@pytest.mark.parametrize("name", ["config.json", TOKENIZER_FILE, "tokenizer_config.json", SINGLE_FILE, INDEX_FILE])
def test_a_pipe_or_a_device_is_not_read(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", **SMALL)
    (folder / (SINGLE_FILE if name == INDEX_FILE else name)).unlink()
    make(folder / name)
    load = load_tokenizer if "token" in name else lambda source: open_checkpoint(str(source.path))
    source = ModelSource(SourceKind.SAFETENSORS, folder, "model")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(source)


@pytest.mark.parametrize("make", [_make_pipe, _make_device])
def test_a_pipe_or_a_device_is_refused_as_gguf_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.gguf")
    for path in (tmp_path / "model.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            open_checkpoint(str(path))


ELSEWHERE = ("../other/model.safetensors", "/etc/passwd", "a/../../b.safetensors", "", "x" * 300, "a\x00b")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_weights_of_another_folder_are_not_read(good: Good, tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("offsets", [[-64, 0], [64, 0], [-(2**62), -(2**62) + 64], [0, 2**63]])
def test_offsets_outside_of_the_data_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": offsets}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("num_hidden_layers", 10**9, "1024"),
        ("hidden_size", 10**12, "16777216"),
        ("vocab_size", -1, "at least 1"),
        ("num_key_value_heads", -1, "at least 1"),
        ("max_position_embeddings", 10**15, "at most 16777216"),
        ("rms_norm_eps", float("nan"), "a finite number"),
    ],
)
def test_numbers_beyond_any_model_are_refused_before_anything_is_built(
    good: Good, tmp_path: Path, name: str, value: Any, limit: str
) -> None:
    config = json.loads((good.single / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    start = time.process_time()
    with pytest.raises(CheckpointError, match=f"config.json: {name} is .*{limit}"):
        open_checkpoint(str(tmp_path))
    assert time.process_time() - start < 0.5


def test_a_long_token_of_sentencepiece_is_refused(tmp_path: Path) -> None:
    tokens = ["<unk>", "a" * 100_000]
    metadata = {
        "llama.block_count": 1,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, -1.0],
        "tokenizer.ggml.token_type": [2, 1],
    }
    file = write_gguf(tmp_path / "long.gguf", "llama", metadata, {})
    with pytest.raises(CheckpointError, match="a token of 100000 characters, the limit is 512"):
        load_tokenizer(resolve_model(str(file)))

"""Writes tensors to the safetensors files of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sglang_jax.checkpoint.reader import Array
from sglang_jax.checkpoint.safetensors_reader import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 2 << 30
_METADATA = {"format": "pt"}
"""transformers reads no file without it."""


def write_safetensors(folder: Path, tensors: Iterable[tuple[str, Array]], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes tensors with their names, in order, to one file, or to several of at most `shard_bytes` with an index; a
    larger tensor has a file to itself. Only one file's tensors are in memory. Until all are written, the files have
    names that no reader takes for weights."""
    shards: list[list[str]] = []
    held: dict[str, Array] = {}
    size = total = 0

    def write() -> None:
        file = _incomplete(folder, len(shards))
        file.touch()
        mode = file.stat().st_mode
        save_file(held, file, metadata=_METADATA)
        file.chmod(mode)  # `save_file` replaces the file by one that only its owner may read
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        held[name] = np.ascontiguousarray(tensor).reshape(tensor.shape)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [SINGLE_FILE]
    for number, file in enumerate(files):
        _incomplete(folder, number).rename(folder / file)
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _incomplete(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.incomplete"

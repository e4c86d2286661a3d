"""The headers of well-known quantised repositories fit the models that are made of their configs: no tensor is missing
or left over, and quantised matrices are those that the tool quantised."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.published_checkpoints import REPOSITORIES, Headers, Repository

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import Checkpoint, ParameterReader, open_checkpoint
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.reader import Role
from sglang_jax.config import KVCacheDtype, LoadFormat
from sglang_jax.errors import CheckpointError

PLAIN = {Part.EMBEDDING, Part.HEAD, Part.ROUTER}
EXPERTS = {Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN}


def check_opened(repository: Repository, opened: Checkpoint) -> None:
    """Every matrix has the encoding that its repository says."""
    assert opened.reader is not None
    reader = ParameterReader(opened.reader, opened.config)
    for name, spec in manifest_of(opened.config).specs.items():
        if spec.is_matrix:
            quantised = name.part in EXPERTS if repository.only_experts else name.part not in PLAIN
            assert reader.encoding(name) == (repository.kept if quantised else None), name
    assert opened.kv_scales_made_for() == (KVCacheDtype.FLOAT8_E4M3 if repository.scales_of_keys else None)


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda each: each.name)
def test_a_repository_is_read(repository: Repository, tmp_path: Path) -> None:
    check_opened(repository, open_checkpoint(str(repository.write(tmp_path / "model"))))


def without_scales(encoding: Encoding | None) -> Encoding | None:
    """With scales in bfloat16, if the matrix is in groups; MXFP4 has only one dtype."""
    if encoding is None or not isinstance(encoding.values, GroupType) or encoding.values.levels is Levels.FLOAT4_E2M1:
        return encoding
    return Encoding(replace(encoding.values, scales=Scales.BFLOAT16))


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda each: each.name)
def test_the_config_tells_the_encodings(repository: Repository, tmp_path: Path) -> None:
    """Random weights have those of the repository, except for the dtype of scales, which is not in the config."""
    repository.write_config(tmp_path / "model")
    opened = open_checkpoint(str(tmp_path / "model"), LoadFormat.DUMMY)
    check_opened(replace(repository, kept=without_scales(repository.kept)), opened)


def test_layers_that_the_config_leaves_plain_are_plain(tmp_path: Path) -> None:
    repository = next(each for each in REPOSITORIES if each.name == "Qwen/Qwen3-8B-FP8").cut(2)
    plain = {"modules_to_not_convert": ["model.layers.0.mlp"]}
    assert repository.quantization is not None
    replace(repository, quantization=repository.quantization | plain).write_config(tmp_path / "model")
    opened = open_checkpoint(str(tmp_path / "model"), LoadFormat.DUMMY)
    assert opened.reader is not None
    for layer, part, kept in ((0, "mlp.up", False), (0, "self_attn.q", True), (1, "mlp.up", True)):
        found = opened.reader.encoding(f"model.layers.{layer}.{part}_proj.weight")
        assert found == (without_scales(repository.kept) if kept else None)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"])
def test_random_weights_are_near_those_before_they_are_quantised(name: str, tmp_path: Path) -> None:
    """With zeros and without. Of a group's largest weights, which are cut, up to 2.5 of 9.5 levels are lost."""
    next(each for each in REPOSITORIES if each.name == name).cut(1).write_config(tmp_path / "model")
    opened = open_checkpoint(str(tmp_path / "model"), LoadFormat.DUMMY)
    assert opened.reader is not None
    tensor, rows = "model.layers.0.mlp.up_proj.weight", (slice(8, 16),)
    encoding = opened.reader.encoding(tensor)
    assert encoding is not None
    found = Stored(encoding, {Role.VALUES: opened.reader.read_array(tensor, Role.VALUES, rows)}).widened()
    expected = opened.reader.read(tensor, rows).astype(np.float32)
    largest = np.abs(expected).reshape(8, -1, 128).max(2).repeat(128, 1)
    assert (np.abs(found - expected) < 0.27 * largest).all()


def examples(headers: Headers) -> list[str]:
    """A tensor of each kind: the last of those whose names differ only in numbers."""
    return list({re.sub(r"\.\d+\.", ".0.", name): name for name in headers}.values())


def damaged(headers: Headers, name: str) -> list[tuple[str, Headers]]:
    """Headers in which a tensor is missing, left over, under another name, or misshapen."""
    dtype, shape = headers[name]
    stem, dot, ending = name.rpartition(".")
    missing = {other: stored for other, stored in headers.items() if other != name}
    further = {f"{stem}_further{dot}{ending}": (dtype, shape)}
    wrong = (*shape[:-1], shape[-1] + 8) if shape else (7,)
    return [
        ("missing", missing),
        ("left over", headers | further),
        ("renamed", missing | further),
        ("misshapen", headers | {name: (dtype, wrong)}),
    ]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("number", range(len(REPOSITORIES)), ids=[each.name for each in REPOSITORIES])
def test_damage_to_any_tensor_is_noticed(number: int, every: bool, tmp_path: Path) -> None:
    """One tensor of each kind has one fault, in a model of two layers, or `every` fault in turn. Layers that are not
    used may have any tensors."""
    repository = REPOSITORIES[number].cut(2, experts=16)
    headers, unread = repository.headers(), repository.unquantised().unread
    for at, name in enumerate(examples(headers), start=number):
        faults = damaged(headers, name)
        for fault, wrong in faults if every else [faults[at % len(faults)]]:
            folder = repository.write(tmp_path / f"{at} {fault}", wrong)
            if name.startswith(unread) or (fault == "missing" and name.endswith(repository.optional)):
                assert open_checkpoint(str(folder)).reader is not None
                continue
            # The message has the tensor, or the weight that was made of it.
            with pytest.raises(CheckpointError, match=re.escape(name.rpartition(".")[0])):
                open_checkpoint(str(folder))

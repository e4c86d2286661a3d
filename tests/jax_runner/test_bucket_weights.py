"""Weights of a bucket on the JAX backend: the loaded values, and which bytes are fetched for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bucket import Bucket, serve_bucket
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.resolve import ORBAX_MARKER
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax, save_orbax
from sglang_jax.jax_runner.weights import _contains, _runs, load_weights
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, Transformer, build_model
from sglang_jax.models.parameters import parameters_of


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("local"), "qwen3")


@pytest.fixture
def served(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(local, tmp_path / "bucket/qwen3")
    with serve_bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


def empty(checkpoint: Checkpoint) -> Transformer:
    return build_model(
        checkpoint.config, dtype=jnp.dtype("bfloat16"), attention=AttentionImplementation.XLA, platform="cpu"
    )


def loaded(checkpoint: Checkpoint) -> Transformer:
    assert checkpoint.reader is not None
    model = empty(checkpoint)
    load_weights(model, checkpoint.reader, checkpoint.config, make_mesh(jax.devices("cpu")[:1]))
    return model


def same(one: Transformer, other: Transformer) -> bool:
    return all(
        np.array_equal(*(np.asarray(each.value.get_value()).view(np.uint16) for each in pair))
        for pair in zip(parameters_of(one), parameters_of(other), strict=True)
    )


def test_weights_are_those_of_a_folder_and_each_is_fetched_once(local: Path, served: Bucket) -> None:
    there = open_checkpoint("gs://models/qwen3")
    served.sent.clear()
    assert same(loaded(there), loaded(open_checkpoint(str(local))))
    [file] = local.glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert served.bytes_of(".safetensors") == file.stat().st_size - header


def test_orbax_restores_from_a_bucket(local: Path, served: Bucket) -> None:
    here = open_checkpoint(str(local))
    model = loaded(here)
    save_orbax(served.root / "orbax", here.config, model, [local / "config.json"])
    there = open_checkpoint("gs://models/orbax")
    restored = empty(there)
    restore_orbax(there.source.path, restored, there.config, make_mesh(jax.devices("cpu")[:1]), there.source.remote)
    assert same(restored, model)
    assert any(name.startswith("orbax/weights/") for name, _, _ in served.sent)
    shutil.rmtree(served.root / "orbax/weights")
    assert (served.root / "orbax" / ORBAX_MARKER).exists()
    source, mesh = open_checkpoint("gs://models/orbax").source, make_mesh(jax.devices("cpu")[:1])
    with pytest.raises(CheckpointError, match="gs://models/orbax/weights is missing: the conversion did not finish"):
        restore_orbax(source.path, restored, there.config, mesh, source.remote)


WHOLE = slice(None)


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        # [8, 12] on all devices, on two of four, on two that are not neighbours, by columns, in one axis
        ([(WHOLE, WHOLE)] * 4, [((0, 8), (0, 12))]),
        ([(slice(4, 6), WHOLE), (slice(2, 4), WHOLE)], [((2, 6), (0, 12))]),
        ([(slice(0, 2), WHOLE), (slice(6, 8), WHOLE)], [((0, 2), (0, 12)), ((6, 8), (0, 12))]),
        ([(WHOLE, slice(3, 6)), (WHOLE, slice(6, 9)), (WHOLE, slice(9, None))], [((0, 8), (3, 12))]),
    ],
)
def test_parts_of_neighbouring_devices_are_read_together(
    indices: list[tuple[slice, ...]], runs: list[tuple[tuple[int, int], ...]]
) -> None:
    found = _runs(indices, (8, 12))
    assert [tuple((each.start, each.stop) for each in run) for run in found] == runs
    for index in indices:
        bounded = tuple(slice(*each.indices(length)[:2]) for each, length in zip(index, (8, 12), strict=True))
        assert sum(_contains(run, bounded) for run in found) == 1

"""The sharding table on several devices: the same logits as on one, and no device reads or holds another's part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.family_cases import FAMILIES, HYBRIDS, LATENT
from helpers.parity_cases import prompts, transformers_logits
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]

_BEGIN = """
import re
import sys
from pathlib import Path

import jax
import numpy as np
from helpers.paged_model import PagedModel
from helpers.parity_steps import check_resumed
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS, Quantization
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.sharding import make_mesh

assert len(jax.devices()) == 4


def check_sums(model, mesh, count, *case):
    batch = model.batch([np.arange(9)] * 4, [0] * 4, {row: 1 for row in range(4)})
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
    assert collectives == ["all-reduce"] * count, (*case, collectives)
"""

_TRANSFORMERS = """
two, four = make_mesh(jax.devices()[:2]), make_mesh(jax.devices())
stored = np.load(Path(sys.argv[1], "logits.npz"))
sequences = [stored["tokens 0"], stored["tokens 1"]]
steps = ({0: 10, 1: 20}, {0: 1, 1: 1}, {0: 1})


def compare(model, expected, *case):
    for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
        assert logits.shape == wanted.shape
        assert np.abs(logits - wanted).max() < 2e-4, case


def loaded(name, mesh, **options):
    \"""The model, after a comparison of its logits with transformers'.\"""
    model = PagedModel(Path(sys.argv[1], name), mesh=mesh, **options)
    found = [stored[f"{name} {number}"][:length] for number, length in enumerate((12, 21))]
    compare(model, found, name, mesh, options)
    return model


# Each device has its part of every matrix and of the pages.
for mesh in (four, make_mesh(jax.devices(), data=2)):
    model = loaded("qwen3", mesh)
    shards = mesh.shape["tensor"]
    cut = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim > 1]
    assert len(cut) == 2 * 4 + 2
    for leaf in cut:
        assert leaf.addressable_shards[0].data.size * shards == leaf.size, leaf.shape
    for memory in model.kv_caches:
        cache = memory.pages
        assert cache.addressable_shards[0].data.shape[1] * shards == cache.shape[1]

# Norms over all heads together, which lie on several devices.
for mesh in (two, four):
    loaded("olmo2", mesh)

# Layers with 2 kv heads and with 1, of which four devices have copies.
loaded("gemma4", four)

# Experts, each of which four devices share, or two; one with biases, also as shards whose sum has one order, and one
# with a shared expert and dense layers.
for name, layers in (("gpt_oss", 2), ("qwen2_moe", 1)):
    for parts, fixed in [(1, False), (2, False)] + [(2, True)] * (name == "gpt_oss"):
        shards = {"attention": AttentionImplementation.XLA_FIXED, "num_shards": 4} if fixed else {}
        model = loaded(name, make_mesh(jax.devices(), expert=parts), **shards)
        experts = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim == 3 and leaf.shape[0] == 6]
        assert len(experts) >= 3 * layers
        for own in (leaf.addressable_shards[1].data for leaf in experts):
            assert (own.shape[0], own.size) == (6 // parts, experts[0].size // 4)

# Latent attention: heads lie on four devices, of which each has all latent vectors.
model = loaded("deepseek_v3", four)
assert all(leaf.addressable_shards[0].data.shape == leaf.shape for leaf in jax.tree.leaves(model.kv_caches))
# One of embeddings, and two of a layer.
check_sums(model, four, 1 + 2 * len(model.kv_caches), "deepseek_v3")

# Matrices of 8 bits, of which each device has its part with the scales of its rows; two kv heads, and experts, of
# which two devices have the values with the scales of rows of whole experts. The same as on one device. Scales come
# before the sums, which are as many as without them.
for name, kind, mesh in (
    ("qwen3 in 8 bits", INT8_ROWS, four),
    ("qwen2_moe in 8 bits", FLOAT8_ROWS, make_mesh(jax.devices(), expert=2)),
):
    folder = Path(sys.argv[1], name)
    expected = PagedModel(folder, quantization=Quantization(kind)).run(sequences, steps)
    model = PagedModel(folder, mesh=mesh, quantization=Quantization(kind))
    values = [leaf for leaf in jax.tree.leaves(model.state) if leaf.dtype.itemsize == 1]
    assert len(values) >= 8
    assert all(leaf.addressable_shards[0].data.size * 4 == leaf.size for leaf in values)
    compare(model, expected, name)
    check_sums(model, mesh, 1 + 2 * len(model.kv_caches), name)
"""


def write_models(folder: Path) -> None:
    """Checkpoints, and what transformers computes from them, for the first program: it need not import torch. Layers
    that are like earlier ones of their model are left out."""
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    two: dict[str, Any] = {"num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3": ("qwen3", heads),
        "olmo2": ("olmo2", heads),
        "gemma4": ("gemma4_text", {**FAMILIES["gemma4"].changes, **layers}),
        "gpt_oss": ("gpt_oss", {**FAMILIES["gpt_oss"].changes, **layers}),
        "qwen2_moe": ("qwen2_moe", {**FAMILIES["qwen2_moe"].changes, **layers}),
        "deepseek_v3": ("deepseek_v3", {**LATENT["deepseek_v3"].changes, **two}),
    }
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 384, length) for length in (12, 21)]
    stored = {f"tokens {number}": tokens for number, tokens in enumerate(sequences)}
    for name, (architecture, changes) in models.items():
        make_tiny_checkpoint(folder / name, architecture, **changes)
        for number, tokens in enumerate(sequences):
            stored[f"{name} {number}"] = transformers_logits(architecture, tokens, **changes)
    for name in ("qwen3", "qwen2_moe"):
        make_tiny_checkpoint(folder / f"{name} in 8 bits", name, num_attention_heads=4)
    np.savez(folder / "logits.npz", **stored)


_EXPERTS = """
import re
import sys
from pathlib import Path

import jax
import numpy as np
from helpers.family_cases import EXPERTS
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, TOLERANCE, prompts, transformers_logits
from helpers.tiny_models import make_tiny_checkpoint
from sglang_jax.layers.sharding import make_mesh

# Each device has its part of every expert. There is one sum for embeddings, two for a layer, and one more where norms
# are over heads of all devices.
for name in sys.argv[2:]:
    case, sequences = EXPERTS[name], prompts()
    folder = make_tiny_checkpoint(Path(sys.argv[1], name), case.architecture, **case.changes)
    expected = [transformers_logits(case.architecture, tokens, **case.changes) for tokens in sequences]
    for size, parts in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
        model = PagedModel(folder, mesh=make_mesh(jax.devices()[:size], expert=parts))
        experts = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim == 3 and leaf.shape[0] == 6]
        assert len(experts) >= 6
        assert all(leaf.addressable_shards[0].data.size * size == leaf.size for leaf in experts)
        for logits, wanted in zip(model.run(sequences, STEPS), expected, strict=True):
            assert np.abs(logits - wanted).max() < TOLERANCE, (name, size, parts)
        if size > 1:
            batch = model.batch([np.arange(9)] * 4, [0] * 4, {row: 1 for row in range(4)})
            with jax.sharding.use_abstract_mesh(model._mesh):
                program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
            collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
            sums = 1 + (2 + (name == "olmoe")) * len(model.kv_caches)
            assert collectives == ["all-reduce"] * sums, (name, size, collectives)
"""

_STATES = """
# Fewer key heads and groups than devices, of which neighbours have the same; a norm over heads of two devices; both
# kinds of mixer side by side. A sum over devices for embeddings, of each mixer and of each feed-forward part, or norm.
for name in sys.argv[2:]:
    size = 2 if name == "falcon_h1" else 4
    mesh = make_mesh(jax.devices()[:size])
    stored = np.load(Path(sys.argv[1], name, "logits.npz"))
    page_size = int(stored["page size"])
    model = PagedModel(Path(sys.argv[1], name), mesh=mesh, page_size=page_size, columns=-(-64 // page_size))
    # Against transformers, chunks and cache hits among it.
    check_resumed(model, [stored[f"{number}"] for number in range(4)])
    assert all(leaf.addressable_shards[0].data.size * size == leaf.size for leaf in jax.tree.leaves(model.kv_caches))
    check_sums(model, mesh, {"nemotron_h": 8}.get(name, 5), name)
"""


def write_states(folder: Path, names: Sequence[str]) -> None:
    """As `write_models`, for the program of models with states."""
    for name in names:
        case = HYBRIDS[name]
        make_tiny_checkpoint(folder / name, case.architecture, **case.changes)
        logits = {
            f"{number}": transformers_logits(case.architecture, tokens, **case.changes)
            for number, tokens in enumerate(prompts())
        }
        np.savez(folder / name / "logits.npz", **logits, **{"page size": np.array(case.page_size)})


@pytest.mark.parametrize(
    ("program", "names"),
    [
        pytest.param(_BEGIN + _TRANSFORMERS + _STATES, ("qwen3_5", "mamba2"), id="heads, experts, 8 bits and states"),
        pytest.param(_EXPERTS, ("qwen3_moe", "mixtral", "olmoe"), id="experts", marks=pytest.mark.soak),
        pytest.param(_EXPERTS, ("qwen2_moe", "gpt_oss", "granitemoe"), id="other experts", marks=pytest.mark.soak),
        pytest.param(
            _BEGIN + _STATES,
            ("lfm2", "qwen3_next", "falcon_h1", "nemotron_h"),
            id="other layers with states",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_logits_on_four_devices(program: str, names: tuple[str, ...], tmp_path: Path) -> None:
    if _TRANSFORMERS in program:
        write_models(tmp_path)
    if _STATES in program:
        write_states(tmp_path, names)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=4"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr

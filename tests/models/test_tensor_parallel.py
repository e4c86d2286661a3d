"""The sharding table on several devices: the same logits as on one, and no device reads or holds another's part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.quick_programs import xla_flags

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import sys
from pathlib import Path

import jax
import numpy as np
from helpers.paged_model import PagedModel
from helpers.tiny_models import make_tiny_checkpoint
from sglang_jax.layers.sharding import make_mesh

assert len(jax.devices()) == 4
folder = make_tiny_checkpoint(Path(sys.argv[1]), "qwen3", num_attention_heads=8, num_key_value_heads=4)
rng = np.random.default_rng(0)
sequences = [rng.integers(0, 384, length) for length in (12, 21)]
steps = ({0: 10, 1: 20}, {0: 1, 1: 1}, {0: 1})
expected = PagedModel(folder).run(sequences, steps)
for mesh in (make_mesh(jax.devices()), make_mesh(jax.devices(), data=2)):
    model = PagedModel(folder, mesh=mesh)
    shards = mesh.shape["tensor"]
    leaves = jax.tree.leaves(model.state)
    cut = [leaf for leaf in leaves if leaf.ndim > 1]
    assert len(cut) == 2 * 4 + 2
    for leaf in cut:
        assert leaf.addressable_shards[0].data.size * shards == leaf.size, leaf.shape
    for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
        assert np.abs(logits - wanted).max() < 2e-4
    for memory in model.kv_caches:
        cache = memory.pages
        assert cache.addressable_shards[0].data.shape[1] * shards == cache.shape[1]
"""

_OTHER_HEADS = """
import re
import sys
from pathlib import Path

import jax
import numpy as np
from helpers.family_cases import FAMILIES, LATENT
from helpers.paged_model import PagedModel
from helpers.tiny_models import make_tiny_checkpoint
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS, Quantization
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.sharding import make_mesh

rng = np.random.default_rng(0)
sequences = [rng.integers(0, 384, length) for length in (12, 21)]
steps = ({0: 10, 1: 20}, {0: 1, 1: 1}, {0: 1})

# Norms over all heads together, which lie on several devices.
folder = make_tiny_checkpoint(Path(sys.argv[1], "olmo2"), "olmo2", num_attention_heads=8, num_key_value_heads=4)
expected = PagedModel(folder).run(sequences, steps)
for mesh in (make_mesh(jax.devices()[:2]), make_mesh(jax.devices())):
    for logits, wanted in zip(PagedModel(folder, mesh=mesh).run(sequences, steps), expected, strict=True):
        assert np.abs(logits - wanted).max() < 2e-4

# Layers with 2 kv heads and with 1, of which four devices have copies.
case = FAMILIES["gemma4"]
folder = make_tiny_checkpoint(Path(sys.argv[1], "gemma4"), case.architecture, **case.changes)
expected = PagedModel(folder).run(sequences, steps)
for logits, wanted in zip(PagedModel(folder, mesh=mesh).run(sequences, steps), expected, strict=True):
    assert np.abs(logits - wanted).max() < 2e-4

# Experts, each of which four devices share, or two; one with biases, also as shards whose sum has one order, and one
# with a shared expert and dense layers.
for name in ("gpt_oss", "qwen2_moe"):
    case = FAMILIES[name]
    folder = make_tiny_checkpoint(Path(sys.argv[1], name), case.architecture, **case.changes)
    expected = PagedModel(folder).run(sequences, steps)
    for parts, fixed in [(1, False), (2, False)] + [(2, True)] * (name == "gpt_oss"):
        mesh = make_mesh(jax.devices(), expert=parts)
        shards = {"attention": AttentionImplementation.XLA_FIXED, "num_shards": 4} if fixed else {}
        model = PagedModel(folder, mesh=mesh, **shards)
        experts = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim == 3 and leaf.shape[0] == 6]
        assert len(experts) >= 6
        for own in (leaf.addressable_shards[1].data for leaf in experts):
            assert (own.shape[0], own.size) == (6 // parts, experts[0].size // 4)
        for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
            assert np.abs(logits - wanted).max() < 2e-4
mesh = make_mesh(jax.devices())

# Latent attention: heads lie on four devices, of which each has all latent vectors. Sums over devices: of embeddings,
# and two in each layer.
case = LATENT["deepseek_v3"]
folder = make_tiny_checkpoint(Path(sys.argv[1], "latent"), case.architecture, **case.changes)
expected = PagedModel(folder).run(sequences, steps)
model = PagedModel(folder, mesh=mesh)
for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
    assert np.abs(logits - wanted).max() < 2e-4
assert all(leaf.addressable_shards[0].data.shape == leaf.shape for leaf in jax.tree.leaves(model.kv_caches))
batch = model.batch([np.arange(9)] * 4, [0] * 4, {row: 1 for row in range(4)})
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
assert collectives == ["all-reduce"] * (1 + 2 * len(model.kv_caches)), collectives

# Matrices of 8 bits, of which each device has its part with the scales of its rows; two kv heads, and experts.
for name, kind in (("qwen3", INT8_ROWS), ("qwen2_moe", FLOAT8_ROWS)):
    folder = make_tiny_checkpoint(Path(sys.argv[1], name + "_8_bits"), name, num_attention_heads=4)
    expected = PagedModel(folder, quantization=Quantization(kind)).run(sequences, steps)
    if name == "qwen2_moe":  # the values of two devices, with the scales of rows of whole experts
        mesh = make_mesh(jax.devices(), expert=2)
    model = PagedModel(folder, mesh=mesh, quantization=Quantization(kind))
    values = [leaf for leaf in jax.tree.leaves(model.state) if leaf.dtype.itemsize == 1]
    assert len(values) >= 8
    assert all(leaf.addressable_shards[0].data.size * 4 == leaf.size for leaf in values)
    for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
        assert np.abs(logits - wanted).max() < 2e-4
    # Scales come before the sums, which are as many as without them.
    batch = model.batch([np.arange(9)] * 4, [0] * 4, {row: 1 for row in range(4)})
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
    assert collectives == ["all-reduce"] * (1 + 2 * len(model.kv_caches)), (name, collectives)
"""

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
import re
import sys
from pathlib import Path

import jax
import numpy as np
from helpers.family_cases import HYBRIDS, check_hybrid
from helpers.paged_model import PagedModel
from sglang_jax.layers.sharding import make_mesh

# Fewer key heads and groups than devices, of which neighbours have the same; a norm over heads of two devices; both
# kinds of mixer side by side. A sum over devices for embeddings, of each mixer and of each feed-forward part, or norm.
for name in sys.argv[2:]:
    size = 2 if name == "falcon_h1" else 4
    mesh = make_mesh(jax.devices()[:size])
    models = []

    def load(folder, page_size, columns):
        models.append(PagedModel(folder, mesh=mesh, page_size=page_size, columns=columns))
        return models[-1]

    # Against transformers, chunks and cache hits among it.
    check_hybrid(HYBRIDS[name], Path(sys.argv[1], name), load)
    (model,) = models
    assert all(leaf.addressable_shards[0].data.size * size == leaf.size for leaf in jax.tree.leaves(model.kv_caches))
    batch = model.batch([np.arange(9)] * 4, [0] * 4, {row: 1 for row in range(4)})
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
    assert collectives == ["all-reduce"] * {"nemotron_h": 8}.get(name, 5), (name, collectives)
"""


@pytest.mark.parametrize(
    ("program", "names"),
    [
        pytest.param(_PROGRAM, (), id="alike"),
        pytest.param(_OTHER_HEADS, (), id="other heads"),
        pytest.param(_EXPERTS, ("qwen3_moe", "mixtral", "olmoe"), id="experts", marks=pytest.mark.soak),
        pytest.param(_EXPERTS, ("qwen2_moe", "gpt_oss", "granitemoe"), id="other experts", marks=pytest.mark.soak),
        pytest.param(_STATES, ("qwen3_5", "mamba2"), id="heads with states"),
        pytest.param(
            _STATES,
            ("lfm2", "qwen3_next", "falcon_h1", "nemotron_h"),
            id="other layers with states",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_logits_on_four_devices(program: str, names: tuple[str, ...], tmp_path: Path) -> None:
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

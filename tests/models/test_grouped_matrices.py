"""Matrices in groups by the TPU kernel, in Pallas' interpreter: their products are those of the dequantised weights."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import grouped_checkpoints
from helpers.gguf_blocks import GROUPS, make_gguf_in_groups
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, prompts
from helpers.quick_programs import xla_flags

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.parallelism import ONE_DEVICE, Parallelism
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.reader import Role
from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.building import JaxBackend
from sglang_jax.kernels import group_product_pallas
from sglang_jax.kernels.group_product_pallas import Float4
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip
from sglang_jax.layers.grouped_matrix import GroupedExperts, GroupedMatrix, GroupProduct, group_product
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation
from sglang_jax.models.parameters import matrices_as_stored
from sglang_jax.runner.assembly import open_models

ROOT = Path(__file__).parents[2]

INPUTS = [(Axis.HEADS, 3), (Axis.HEAD_DIM, 128)]
OUTPUTS = [(Axis.GATE_OR_UP, 2), (Axis.INTERMEDIATE, 24)]


FLOAT4 = GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)


@pytest.mark.parametrize(
    ("kind", "float4"),
    [
        (GroupType(Levels.INT4, 32, Scales.FLOAT16, zeros=True), Float4.NUMBERS),
        (GroupType(Levels.INT4, 128, Scales.BFLOAT16), Float4.CODES),
        (GroupType(Levels.INT8, 64, Scales.FLOAT32, zeros=True), Float4.NUMBERS),
        (GroupType(Levels.FLOAT8_E4M3, 128, Scales.FLOAT32), Float4.NUMBERS),
        (FLOAT4, Float4.NUMBERS),
        (FLOAT4, Float4.CODES),
        (GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32), Float4.CODES),
    ],
    ids=lambda each: each.value,
)
def test_packed_blocks_multiply_as_the_dequantised_matrix(kind: GroupType, float4: Float4) -> None:
    """With axes of inputs and outputs in their places."""
    random = np.random.default_rng(0)
    levels = random.integers(0, 16 if kind.levels.bits == 4 else 256, (48, 384)).astype(np.uint8)
    if kind.levels is Levels.FLOAT8_E4M3:
        levels &= 0x7E  # finite numbers
    zeros = random.integers(3, 17, (48, 384 // kind.weights)).astype(np.uint8) if kind.zeros else None
    scales = random.uniform(0.5, 2, (48, 384 // kind.weights)).astype(kind.scales.dtype)
    blocks = kind.join(levels, scales, zeros)
    matrix = GroupedMatrix(GroupProduct(kind, interpret=True, float4=float4), INPUTS, OUTPUTS, (Part.GATE, Part.UP))
    assert matrix.arrays["values"].shape == (2, 24, 384 // kind.weights, kind.nbytes)
    matrix.arrays["values"].set_value(jnp.asarray(blocks.reshape(2, 24, *blocks.shape[1:])))
    matrix.pack()
    x = jnp.asarray(random.normal(size=(5, 3, 128)), jnp.bfloat16)
    found = matrix.multiply(x)
    assert found.shape == (5, 2, 24)
    wide = Stored(Encoding(kind), {Role.VALUES: blocks}).widened().astype(np.float64)
    expected = np.asarray(x, np.float64).reshape(5, -1) @ wide.T
    assert np.abs(np.asarray(found).reshape(5, -1) - expected).max() < 2**-8 * np.abs(expected).max()


def test_chips_that_convert_floats_of_4_bits_have_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose levels are all codes twice; matrices are packed as these are."""
    codes = np.arange(16).repeat(2)
    blocks = FLOAT4.join(codes.astype(np.uint8).reshape(1, 32), np.ones((1, 1), FLOAT4.scales.dtype), None)
    numbers, signed = np.where(codes >= 8, 8 - codes, codes), np.where(codes >= 8, codes - 16, codes)
    for chip, float4, scale, levels in (
        (Chip.V6E, Float4.NUMBERS, 0.5, numbers),
        (Chip.TPU7X, Float4.CODES, 1, signed),
    ):
        monkeypatch.setattr(group_product_pallas, "current_chip", lambda chip=chip: chip)
        product = group_product(Encoding(FLOAT4), ONE_DEVICE)
        assert product == GroupProduct(FLOAT4, float4=float4)
        sizes = (Axis.EXPERTS, 1), (Axis.HIDDEN, 32), (Axis.INTERMEDIATE, 1)
        experts = GroupedExperts(product, *sizes, Part.EXPERT_UP)
        experts.arrays["values"].set_value(jnp.asarray(blocks.reshape(1, 1, 1, -1)))
        experts.pack()
        weights = experts.weights()
        assert (weights.float4, weights.scales[0, 0, 0]) == (float4, scale)
        np.testing.assert_array_equal(np.asarray(weights.levels[0, :, 0].astype(jnp.int8)), levels)


def test_shapes_are_packed_as_arrays_are() -> None:
    """Before weights are loaded, for programs that are compiled meanwhile."""
    product = GroupProduct(GroupType(Levels.INT4, 64, Scales.FLOAT16, zeros=True))
    matrix = GroupedMatrix(product, INPUTS, OUTPUTS, (Part.GATE, Part.UP))
    matrix.pack()
    found = {name: (each.dtype.name, each.shape) for name, each in matrix.arrays.items()}
    assert found == {"levels": ("int4", (384, 48)), "scales": ("bfloat16", (6, 48)), "zeros": ("int8", (6, 48))}


def test_the_kernel_serves_whole_groups_on_each_device() -> None:
    kind = GroupType(Levels.INT4, 64, Scales.FLOAT16)
    two = GroupProduct(kind, Parallelism(2))
    assert two.for_inputs([(Axis.INTERMEDIATE, 256)]) == two
    smaller = replace(two, kind=replace(kind, weights=32))  # where a device's part cuts groups
    assert two.for_inputs([(Axis.INTERMEDIATE, 192)]) == smaller
    assert two.for_inputs([(Axis.INTERMEDIATE, 128 + 32)]) is None
    assert two.for_inputs([(Axis.HIDDEN, 192)]) == two  # of which each device has all
    assert GroupProduct(kind).for_inputs([(Axis.CHANNELS, 256)]) is not None
    assert two.for_inputs([(Axis.CHANNELS, 256)]) is None
    assert GroupProduct(kind).for_inputs([(Axis.HIDDEN, 2**20)]) is None  # in vector memory
    assert group_product(Encoding(kind), Parallelism(2)) == two
    assert group_product(Encoding(BlockType.Q4_1), ONE_DEVICE) is None
    with pytest.raises(ValueError, match="groups of floats have no zeros"):
        GroupType(Levels.FLOAT8_E4M3, 64, Scales.FLOAT32, zeros=True)


_PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.paged_model import PagedModel
from sglang_jax.jax_runner import weights
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.layers.grouped_matrix import GroupedExperts, GroupedMatrix, group_product
from sglang_jax.layers.sharding import make_mesh

# Each device's part is read by itself, as on several nodes.
weights._runs = lambda indices, shape: [weights._bounded(each, shape) for each in indices]

sequences = [np.random.default_rng(0).integers(0, 384, length) for length in (12, 21)]
steps = ({0: 10, 1: 20},)
models = {"qwen2": GroupedMatrix, "gpt_oss": GroupedExperts, "deepseek_v3": GroupedExperts}
weights_of_groups = {  # in which a device's inputs are
    ("qwen2", 2): [64, 64, 128, 128],
    ("qwen2", 4): [32, 32, 128, 128],
    ("gpt_oss", 2): [32] * 3,
    ("gpt_oss", 4): [32] * 3,
    ("deepseek_v3", 2): [64, 128, 128],
    ("deepseek_v3", 4): [64, 128, 128],
}
for name, stored in models.items():
    folder = Path(sys.argv[1]) / name
    expected = PagedModel(folder, dtype="bfloat16").run(sequences, steps)
    # Of qwen2, four devices have copies of two kv heads. Experts lie on devices in two ways.
    for devices, parts, platform in ((2, 1, None), (4, 2, "tpu")):
        def products(encoding):
            found = group_product(encoding, Parallelism(devices, parts))
            return None if found is None else replace(found, interpret=True)

        mesh = make_mesh(jax.devices()[:devices], expert=parts)
        model = PagedModel(folder, dtype="bfloat16", mesh=mesh, block_products=products, platform=platform)
        grouped = [each for _, each in nnx.iter_modules(model.model) if isinstance(each, stored)]
        found = sorted(each.product.kind.weights for each in grouped)
        assert found == weights_of_groups[name, devices], (name, devices, found)
        for matrix in grouped:
            for array in matrix.arrays.values():
                own = array.get_value()
                assert own.addressable_shards[0].data.size * devices == own.size, (own.shape, matrix.axes)
        for logits, wanted in zip(model.run(sequences, steps), expected, strict=True):
            error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
            print(name, devices, error)
            assert error < 0.02, (name, devices, error)
"""


_SIZES: dict[str, int] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}
_DIVIDED: dict[str, tuple[Grouped, int, dict[str, int]]] = {
    "qwen2": (Grouped.AWQ, 128, {"num_key_value_heads": 2, "intermediate_size": 384}),
    "gpt_oss": (Grouped.MXFP4, 32, {"num_key_value_heads": 4}),
    "deepseek_v3": (
        Grouped.FP8,
        128,
        {"num_hidden_layers": 2, "hidden_size": 512, "moe_intermediate_size": 128, "v_head_dim": 32},
    ),
}


@pytest.mark.slow
def test_models_in_groups_give_the_logits_of_widened_ones_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each device's share of every matrix, which may cut the checkpoint's groups. Activations are bfloat16, so
    roundings differ. Checkpoints are made here: the other process need not import transformers."""
    for name, (kind, size, further) in _DIVIDED.items():
        monkeypatch.setattr(grouped_checkpoints, "SIZE", size)
        make_grouped_checkpoint(tmp_path / name, name, kind, **{**_SIZES, **further})
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=4"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gpt_oss", Grouped.MXFP4), ("qwen3_moe", Grouped.AWQ), ("qwen3_moe", Grouped.CT_NVFP4)],
    ids=["mxfp4", "awq", "nvfp4"],
)
def test_experts_in_groups_give_the_logits_of_widened_ones(architecture: str, kind: Grouped, tmp_path: Path) -> None:
    """In steps of many rows and of few. Activations are bfloat16, so roundings differ, and a token may choose other
    experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    make_grouped_checkpoint(tmp_path, architecture, kind, **sizes)

    def products(encoding: Encoding) -> GroupProduct | None:
        found = group_product(encoding, ONE_DEVICE)
        return None if found is None else replace(found, interpret=True)

    expected = PagedModel(tmp_path, dtype="bfloat16").run(prompts(), STEPS)
    model = PagedModel(tmp_path, dtype="bfloat16", block_products=products)
    assert sum(isinstance(each, GroupedExperts) for _, each in nnx.iter_modules(model.model)) == 3
    for logits, wanted in zip(model.run(prompts(), STEPS), expected, strict=True):
        errors = np.linalg.norm(logits - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert np.quantile(errors, 0.8) < 0.03


def test_gguf_files_in_groups_give_the_logits_of_widened_ones(tmp_path: Path) -> None:
    """Of a head that is tied to embeddings, rows are looked up in a plain table."""
    tokens = np.random.default_rng(0).integers(0, 378, (2, 20)).astype(np.int32)
    steps = [{0: 12, 1: 3}, {0: 1, 1: 1}]

    def products(encoding: Encoding) -> GroupProduct | None:
        found = group_product(encoding, ONE_DEVICE)
        return None if found is None else replace(found, interpret=True)

    for kind, tied in zip(GROUPS, (False, True, False), strict=True):
        file = make_gguf_in_groups(tmp_path, kind, tied=tied)
        model = PagedModel(file, dtype="bfloat16", block_products=products, platform="tpu")
        found = [each for _, each in nnx.iter_modules(model.model) if isinstance(each, GroupedMatrix)]
        assert len(found) == 2 * 4 + (not tied)
        expected = PagedModel(file, dtype="bfloat16").run(tokens, steps)
        for logits, wanted in zip(model.run(tokens, steps), expected, strict=True):
            assert np.linalg.norm(logits - wanted) < 0.05 * np.linalg.norm(wanted)


def test_matrices_in_groups_stay_so_on_tpus(tmp_path: Path) -> None:
    """With bfloat16, unless layers are computed in shards; those of float32, or of other devices, are widened. The log
    counts them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    make_grouped_checkpoint(tmp_path, "qwen2", Grouped.FP8_BLOCKS, num_key_value_heads=2, **sizes)
    config = EngineConfig(model_path=str(tmp_path))
    models = open_models(config, open_checkpoint(str(tmp_path)))

    def grouped(platform: str, dtype: str, num_shards: int | None = None) -> int:
        device = SimpleNamespace(platform=platform, device_kind="TPU v6 lite")
        mesh = make_mesh(jax.devices()[:1])
        backend = JaxBackend(config, [device], mesh, jnp.dtype(dtype), AttentionImplementation.XLA, num_shards)
        model = backend.build(models).model
        found = sum(isinstance(each, GroupedMatrix) for _, each in nnx.iter_modules(model))
        names = ("query", "key", "value", "output", "gate", "up", "down") if found else ()
        stored = matrices_as_stored(model)
        assert sorted(name.part.value for name in stored) == sorted(names)
        assert set(stored.values()) <= {"float8_e4m3fn in groups of 32"}
        return found

    assert grouped("tpu", "bfloat16") == 4
    assert grouped("tpu", "float32") == 0
    assert grouped("tpu", "bfloat16", num_shards=2) == 0
    assert grouped("gpu", "bfloat16") == 0

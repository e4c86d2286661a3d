"""Bytes of models with latent attention, and of models in groups: a count from the fields of config.json must equal the
product's. The count does not use the manifest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.hand_count import Hand
from helpers.published_checkpoints import REPOSITORIES, Repository

import tpu
from sglang_jax.architectures import ModelConfig
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.parallelism import ONE_DEVICE, Parallelism
from sglang_jax.checkpoint import ParameterReader
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.hf_config import model_config_from_hf
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.config import Deterministic, Dtype, EngineConfig, LoadFormat, WeightQuantization
from sglang_jax.jax_runner.building import group_products, memory_of_one_device
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.block_matrix import no_blocks
from sglang_jax.models import StateDtypes, build_model
from sglang_jax.runner.quantization import encodings_by_option, kept_encodings
from sglang_jax.runner.sizing import Memory, choose_sizes
from tpu.alternatives import Setup
from tpu.shapes import load_shape
from tpu.topologies import parse_topology

SHAPES = Path(tpu.__file__).parent / "shapes"
BFLOAT16 = jnp.dtype(jnp.bfloat16)
HBM = 200 * 10**9


def config_of(fields: dict[str, Any]) -> ModelConfig:
    source = SHAPES / "config.json"
    return model_config_from_hf(JsonFields(fields, source), JsonFields({}, source))


def memory_of(
    config: ModelConfig, tp: int, *, encodings: Encodings = all_plain, platform: str = "tpu", hbm: int = 0
) -> Memory:
    """The product's count."""
    parallel, on_tpu = TensorParallel.of(config, Parallelism(tp)), platform == "tpu"
    attention = AttentionImplementation.PALLAS if on_tpu else AttentionImplementation.XLA
    model = build_model(
        parallel.config,
        dtype=BFLOAT16,
        attention=attention,
        platform=platform,
        kv_dtype=BFLOAT16,
        encodings=encodings,
        block_products=group_products(EngineConfig(model_path="", tp_size=tp), BFLOAT16, None),
    )
    return memory_of_one_device(parallel, model, BFLOAT16, 64, platform, hbm, state_dtypes=StateDtypes())


@pytest.mark.parametrize(
    ("name", "layers", "tp", "fp8"),
    [
        ("deepseek-v2-lite", 27, 1, False),
        ("deepseek-v2-lite", 27, 4, False),
        ("deepseek-v3", 5, 8, False),
        ("deepseek-v3", 5, 16, True),
        ("deepseek-v3", 5, 64, True),
        *(pytest.param("deepseek-v3", 61, tp, fp8, marks=pytest.mark.soak) for tp in (8, 16, 64) for fp8 in (0, 1)),
    ],
)
def test_weights_and_pages_equal_the_hand_count(name: str, layers: int, tp: int, fp8: bool) -> None:
    fields = json.loads((SHAPES / f"{name}.json").read_text()) | {"num_hidden_layers": layers}
    config, hand = config_of(fields), Hand(fields, tp, fp8)
    wanted = WeightQuantization.FLOAT8_E4M3 if fp8 else WeightQuantization.AUTO
    memory = memory_of(config, tp, encodings=encodings_by_option(config, wanted), hbm=HBM)
    assert memory.weights == hand.weights()
    (group,) = memory.groups
    assert group.page == 64 * hand.cached_token(on_tpu=True)
    options = EngineConfig(model_path=name, tp_size=tp, page_size=64, mem_fraction_static=0.9, context_length=8192)
    pages = (int(0.9 * HBM) - hand.weights()) // group.page
    assert choose_sizes(options, 8192, memory).num_pages == (pages,)  # the pad page counted
    if fp8:
        options = options.model_copy(update={"quantization": WeightQuantization.FLOAT8_E4M3})
    encodings = kept_encodings(config, encodings_by_option(config, options.quantization))
    asked = Setup(config, parse_topology("tpu7x:2x2x4"), options, encodings)
    # without norms and corrections
    assert 0 <= hand.weights() - asked.weights(Parallelism(tp)) < 1e-3 * hand.weights()
    assert 64 * asked.kv_token(tp) == group.page


def published(name: str, folder: Path, layers: int | None = None) -> tuple[Repository, ModelConfig, list[Encodings]]:
    """A repository, and its encodings as the engine and as `tpu.check` read them, the second by the config only."""
    repository = next(each for each in REPOSITORIES if each.name == name)
    if layers is not None:
        repository = repository.cut(layers)
    repository.write(folder)
    encodings = []
    for load_format in (LoadFormat.AUTO, LoadFormat.DUMMY):
        opened = open_checkpoint(str(folder), load_format)
        assert opened.reader is not None
        encodings.append(ParameterReader(opened.reader, opened.config).encoding)
    return repository, opened.config, encodings


def suggested(config: ModelConfig, tp: int, encodings: Encodings) -> int:
    """The count on which suggestions of other slices are based."""
    options = EngineConfig(model_path="", tp_size=tp, mem_fraction_static=0.9)
    return Setup(config, parse_topology("tpu7x:2x2x4"), options, known(config, encodings)).weights(Parallelism(tp))


def known(config: ModelConfig, encodings: Encodings) -> dict[ParameterName, Encoding]:
    return {name: encoding for name in manifest_of(config).specs if (encoding := encodings(name)) is not None}


@pytest.mark.parametrize(("layers", "tp"), [(5, 8), (5, 64), pytest.param(61, 32, marks=pytest.mark.soak)])
def test_the_published_deepseek_v3_equals_the_hand_count(layers: int, tp: int, tmp_path: Path) -> None:
    repository, config, encodings = published("deepseek-ai/DeepSeek-V3", tmp_path / "model", layers)
    hand = Hand(repository.fields, tp, blocks=True)
    for each in encodings:
        assert memory_of(config, tp, encodings=each).weights == hand.weights()
        # without norms and corrections
        assert 0 <= hand.weights() - suggested(config, tp, each) < 1e-3 * hand.weights()


@pytest.mark.parametrize(
    ("name", "of_group"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", 128 // 2 + 2),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 128 // 2 + 2 + 1),
        ("Qwen/Qwen3-8B-FP8", 128 + 2),
        ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", 128 * 2),  # widened, because inputs are in another order
    ],
)
@pytest.mark.parametrize("tp", [1, 4])
def test_groups_equal_the_hand_count(name: str, of_group: int, tp: int, tmp_path: Path) -> None:
    """`of_group`: bytes of 128 weights with their scale, and perhaps a zero."""
    repository, config, encodings = published(name, tmp_path / "model")
    model = repository.unquantised()
    linear = sum(math.prod(shape) for shape in model.linear.values()) // 128 * of_group
    tables = sum(2 * math.prod(shape) for shape in model.plain.values() if len(shape) == 2)
    norms = sum(2 * shape[0] for tensor, shape in model.plain.items() if tensor.endswith("norm.weight"))
    biases = sum(2 * shape[0] for tensor, shape in model.plain.items() if tensor.endswith("bias"))
    for each in encodings:
        found = memory_of(config, tp, encodings=each).weights
        assert found == (linear + tables + biases) // tp + norms
        assert found - suggested(config, tp, each) == biases // tp + norms


@pytest.mark.parametrize("tp", [1, 8])
def test_groups_that_an_option_makes_equal_the_hand_count(tp: int) -> None:
    config, table = load_shape("llama-3.1-8b"), 128256 * 4096
    encodings = encodings_by_option(config, WeightQuantization.INT4)
    norms = 65 * 4096
    linear = 8_030_261_248 - 2 * table - norms
    found = memory_of(config, tp, encodings=encodings).weights
    assert found == (linear // 128 * 66 + 2 * 2 * table) // tp + 2 * norms
    assert found - suggested(config, tp, encodings) == 2 * norms


@pytest.mark.parametrize(
    "options", [{"deterministic": Deterministic.TP, "tp_size": 1}, {"dtype": Dtype.FLOAT32, "tp_size": 1}]
)
def test_groups_are_widened_with_options_that_have_no_kernel(options: dict[str, Any]) -> None:
    config, topology = load_shape("llama-3.1-8b"), parse_topology("v6e-1")
    found = known(config, encodings_by_option(config, WeightQuantization.INT4))
    asked = EngineConfig(model_path="", mem_fraction_static=0.9, **options)
    assert Setup(config, topology, asked, found).weights(ONE_DEVICE) == Setup(config, topology, asked).weights(
        ONE_DEVICE
    )
    shards = 8 if asked.deterministic is Deterministic.TP else None
    dtype = jnp.dtype(jnp.float32) if asked.dtype is Dtype.FLOAT32 else BFLOAT16
    assert group_products(asked, dtype, shards) is no_blocks


def test_off_a_tpu_pages_have_no_padding() -> None:
    fields = json.loads((SHAPES / "deepseek-v2-lite.json").read_text()) | {"num_hidden_layers": 2}
    (group,) = memory_of(config_of(fields), 2, platform="cpu").groups
    assert group.page == 64 * Hand(fields, 2).cached_token(on_tpu=False) == 64 * 2 * 576 * 2

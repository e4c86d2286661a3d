"""Bytes of models with latent attention: a count from the fields of config.json must equal the product's. The count
does not use the manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import tpu
from sglang_jax.architectures import ModelConfig
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.checkpoint.hf_config import model_config_from_hf
from sglang_jax.checkpoint.quantization import all_plain
from sglang_jax.config import EngineConfig, WeightQuantization
from sglang_jax.jax_runner.building import memory_of_one_device
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.models import StateDtypes, build_model
from sglang_jax.runner.quantization import encodings_by_option, kept_encodings
from sglang_jax.runner.sizing import Memory, choose_sizes
from tpu.alternatives import Setup
from tpu.topologies import parse_topology

SHAPES = Path(tpu.__file__).parent / "shapes"
BFLOAT16 = jnp.dtype(jnp.bfloat16)
HBM = 200 * 10**9


@dataclass(frozen=True)
class Hand:
    """A count for one device of `tp`. A matrix has two bytes a number, or, with `fp8`, one, and four for the scale
    of each row. What has no heads or columns to shard is on every device."""

    fields: dict[str, Any]
    tp: int
    fp8: bool = False

    def matrix(self, rows: int, columns: int, *, shared: bool) -> int:
        """`shared`: every device has the whole matrix; otherwise each has a shard of the rows."""
        values, scales = (1, 4) if self.fp8 else (2, 0)
        return rows * (columns * values + scales) // (1 if shared else self.tp)

    def sums(self, rows: int, columns: int) -> int:
        """A matrix whose outputs are summed over devices: each has a shard of the columns, and the scale of each
        row."""
        values, scales = (1, 4) if self.fp8 else (2, 0)
        return rows * (columns * values // self.tp + scales)

    def gated(self, columns: int) -> int:
        hidden = self.fields["hidden_size"]
        return 2 * self.matrix(columns, hidden, shared=False) + self.sums(hidden, columns)

    def attention(self) -> int:
        fields = self.fields
        hidden, heads, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
        plain, rotated, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        inputs, of_queries = hidden, 0
        if fields["q_lora_rank"]:
            inputs = fields["q_lora_rank"]
            of_queries = self.matrix(inputs, hidden, shared=True) + 2 * inputs  # and a norm
        queries = of_queries + self.matrix(heads * (plain + rotated), inputs, shared=False)
        cached = self.matrix(latent + rotated, hidden, shared=True) + 2 * latent
        absorbed = 2 * heads * (plain + value) * latent // self.tp  # never in 8 bits
        return queries + cached + absorbed + self.sums(hidden, heads * value)

    def experts(self) -> int:
        fields = self.fields
        hidden, experts, columns = (
            fields[name] for name in ("hidden_size", "n_routed_experts", "moe_intermediate_size")
        )
        correction = 4 * experts if fields["topk_method"] == "noaux_tc" else 0
        router = 4 * hidden * experts + correction
        return router + experts * self.gated(columns) + self.gated(fields["n_shared_experts"] * columns)

    def weights(self) -> int:
        fields = self.fields
        layers, dense, hidden = (fields[name] for name in ("num_hidden_layers", "first_k_dense_replace", "hidden_size"))
        of_all = layers * (self.attention() + 2 * 2 * hidden)
        tables = 2 * 2 * fields["vocab_size"] * hidden // self.tp
        feed_forward = dense * self.gated(fields["intermediate_size"]) + (layers - dense) * self.experts()
        return of_all + feed_forward + tables + 2 * hidden

    def cached_token(self, *, on_tpu: bool) -> int:
        """A latent vector and a rotated key in each layer, on a TPU in whole registers of 128 lanes."""
        width = self.fields["kv_lora_rank"] + self.fields["qk_rope_head_dim"]
        return self.fields["num_hidden_layers"] * 2 * (-(-width // 128) * 128 if on_tpu else width)


def config_of(fields: dict[str, Any]) -> ModelConfig:
    source = SHAPES / "config.json"
    return model_config_from_hf(JsonFields(fields, source), JsonFields({}, source))


def memory_of(config: ModelConfig, tp: int, *, fp8: bool = False, platform: str = "tpu", hbm: int = 0) -> Memory:
    """The product's count."""
    encodings = encodings_by_option(config, WeightQuantization.FLOAT8_E4M3) if fp8 else all_plain
    parallel, on_tpu = TensorParallel.of(config, tp), platform == "tpu"
    attention = AttentionImplementation.PALLAS if on_tpu else AttentionImplementation.XLA
    model = build_model(
        parallel.config,
        dtype=BFLOAT16,
        attention=attention,
        platform=platform,
        kv_dtype=BFLOAT16,
        encodings=encodings,
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
    memory = memory_of(config, tp, fp8=fp8, hbm=HBM)
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
    assert 0 <= hand.weights() - asked.weights(tp) < 1e-3 * hand.weights()
    assert 64 * asked.kv_token(tp) == group.page


def test_off_a_tpu_pages_have_no_padding() -> None:
    fields = json.loads((SHAPES / "deepseek-v2-lite.json").read_text()) | {"num_hidden_layers": 2}
    (group,) = memory_of(config_of(fields), 2, platform="cpu").groups
    assert group.page == 64 * Hand(fields, 2).cached_token(on_tpu=False) == 64 * 2 * 576 * 2

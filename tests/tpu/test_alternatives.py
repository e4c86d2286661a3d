"""The suggestions of `tpu.check` for a model that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.small_configs import small_config

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.config import Dtype, EngineConfig, KVCacheDtype, WeightQuantization
from sglang_jax.runner.quantization import encodings_by_option, kept_encodings
from tpu.alternatives import Setup, shortage_in, suggest_fitting, suggest_remedies
from tpu.shapes import load_shape
from tpu.topologies import GIB, parse_topology


def asked(topology: str, tp: int, model: ModelConfig | None = None, **options: object) -> Setup:
    given = EngineConfig(model_path="any", tp_size=tp, page_size=64, **{"mem_fraction_static": 0.9, **options})
    return Setup(model or load_shape("qwen3-32b"), parse_topology(topology), given)


@pytest.mark.parametrize(
    ("topology", "tp", "expected"),
    [
        ("v6e:2x4", 1, "--tp 4 (15.3 GiB of weights on each device)"),
        ("v6e:1x1", 1, "--tp 4 --topology v6e:2x2 (15.3 GiB of weights on each device)"),
        ("v5e:2x4", 4, "--tp 8 (7.6 GiB of weights on each device)"),
        ("v5p:2x2x1", 1, "--tp 2 (30.5 GiB of weights on each device)"),
    ],
)
def test_the_next_larger_slice_with_room(topology: str, tp: int, expected: str) -> None:
    assert suggest_fitting(asked(topology, tp)) == expected


def test_weights_count_in_their_own_dtype() -> None:
    """In float32, four devices would need 30.5 GiB each."""
    found = suggest_fitting(asked("v6e:1x1", 1, dtype=Dtype.FLOAT32))
    assert found == "--tp 8 --topology v6e:2x4 (15.3 GiB of weights on each device)"


def test_a_smaller_kv_dtype_where_the_cache_does_not_fit() -> None:
    """Llama's 128 KiB a token are 24 GiB for 196,608 tokens; on two devices 12 GiB each."""
    llama = load_shape("llama-3.1-8b")
    many = {"max_total_tokens": 196_608}
    larger = "--tp 2 --topology v6e:2x2 (7.5 GiB of weights on each device)"
    assert suggest_fitting(asked("v6e-1", 1, llama, **many)) == f"--kv-cache-dtype fp8_e4m3 or {larger}"
    narrow = many | {"kv_cache_dtype": KVCacheDtype.INT8}
    assert suggest_fitting(asked("v6e-1", 1, llama, **narrow)) == larger


def test_latent_vectors_have_no_8_bit_type() -> None:
    """A token of DeepSeek-V2-Lite takes 27 arrays of 640 lanes in bfloat16, on each of two devices as on one."""
    model = load_shape("deepseek-v2-lite")
    of_two = asked("v6e:2x2", 2, model, max_total_tokens=600_000)
    assert of_two.kv_token(2) == of_two.kv_token(4) == 27 * 640 * 2
    assert suggest_fitting(of_two) == "--tp 4 (7.4 GiB of weights on each device)"


def test_replicated_weights_count_on_each_device() -> None:
    """The latent projections, routers and output scales of DeepSeek-V3: 1.7 GiB on each device."""
    model = load_shape("deepseek-v3")
    encodings = kept_encodings(model, encodings_by_option(model, WeightQuantization.FLOAT8_E4M3))
    wanted = replace(asked("v6e:4x4", 16, model), encodings=encodings)
    assert suggest_fitting(wanted) == "--tp 32 --topology v6e:4x8 (21.2 GiB of weights on each device)"
    latents, routers = 61 * (7168 + 4) * (1536 + 512 + 64), 58 * 4 * 7168 * 256
    scales = 4 * 7168 * (58 * 256 + 58 + 3 + 61)
    assert 2 * wanted.weights(Parallelism(64)) - wanted.weights(Parallelism(32)) == latents + routers + scales


@pytest.mark.parametrize(
    ("start", "expected"),
    [("v6e:2x4", "v6e:4x4"), ("v6e:4x4", "v6e:4x8"), ("v5e:8x8", "v5e:8x16"), ("v5p:2x2x2", "v5p:2x2x4")],
)
def test_larger_slices_have_googles_names(start: str, expected: str) -> None:
    topology = parse_topology(start)
    model = small_config(num_heads=256, num_kv_heads=256, intermediate_size=1024)
    found = suggest_fitting(asked(start, topology.devices, model))
    assert found is not None
    assert f"--topology {expected} " in found


@pytest.mark.parametrize(
    ("shortage", "expected"),
    [
        (GIB, "--mem-fraction-static 0.86 or --tp 2 --topology v6e:2x2 (7.5 GiB of weights on each device)"),
        (25 * GIB, "--tp 2 --topology v6e:2x2 (7.5 GiB of weights on each device)"),
    ],
)
def test_room_next_to_weights_and_pages(shortage: int, expected: str) -> None:
    assert suggest_remedies(asked("v6e-1", 1, load_shape("llama-3.1-8b")), shortage) == expected


def test_the_compilers_missing_bytes_are_read() -> None:
    words = "Ran out of memory in memory space hbm. Used 16.51G of 15.75G hbm. Exceeded hbm capacity by 778.00M."
    assert shortage_in(words) == 778 * 2**20
    assert shortage_in("Ran out of memory in memory space vmem") is None


def test_no_slice_fits_a_model_that_cannot_be_sharded() -> None:
    """With five heads, only five devices would divide them, which no slice has."""
    model = small_config(num_heads=5, num_kv_heads=1, hidden_size=80, intermediate_size=96)
    assert suggest_fitting(asked("v6e:2x2", 1, model, kv_cache_dtype=KVCacheDtype.INT8)) is None

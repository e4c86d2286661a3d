"""A runner made from a checkpoint on disk, against transformers on the same checkpoint."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import AttentionBackend, Device, Dtype, EngineConfig, KVCacheDtype, LoadFormat
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner import attention_kernels, create_runner
from sglang_jax.jax_runner.building import JaxBackend, choose_attention, shards_on_jax
from sglang_jax.jax_runner.loading import load_rank
from sglang_jax.jax_runner.orbax_checkpoint import save_orbax
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttention
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, build_model
from sglang_jax.runner.assembly import Models
from sglang_jax.runner.plan import PromptLogprobs
from sglang_jax.runner.protocol import Runner

PROMPT = np.random.default_rng(2).integers(3, 380, 37).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def options(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model_path": str(folder),
        "dtype": Dtype.FLOAT32,
        "max_total_tokens": 640,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
    }
    return EngineConfig.model_validate(values | changes)


def make_runner(config: EngineConfig) -> Runner:
    return create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=config.random_seed))


@pytest.mark.parametrize("attention", [AttentionBackend.NUMBA, AttentionBackend.XLA, AttentionBackend.REFERENCE])
def test_text_and_logprobs_equal_those_of_transformers(folder: Path, attention: AttentionBackend) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        text = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=-1)
        logprobs = torch.log_softmax(oracle(torch.tensor([PROMPT])).logits[0], -1).numpy()
    runner = make_runner(options(folder, attention_backend=attention))
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    wanted = PromptLogprobs(0, 0, np.array(PROMPT[1:17], np.int32))
    driver.step([(request, 16)], prompt_logprobs=[wanted], prompt_top_logprobs=5)
    assert driver.generate(request, 20, chunk=16) == text[0, len(PROMPT) :].tolist()
    (found,) = request.prompt_logprobs
    assert found.logprobs == pytest.approx(logprobs[np.arange(16), PROMPT[1:17]], abs=2e-4)
    assert found.top_ids.tolist() == np.argsort(-logprobs[:16], axis=-1)[:, :5].tolist()
    runner.close()


def test_an_orbax_checkpoint_serves_the_same_weights(folder: Path, tmp_path: Path) -> None:
    config = options(folder)
    checkpoint = open_checkpoint(config.model_path)
    assert checkpoint.reader is not None
    mesh = make_mesh(jax.devices("cpu")[:1])
    model = build_model(
        checkpoint.config, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA, platform="cpu"
    )
    load_weights(model, checkpoint.reader, checkpoint.config, mesh)
    save_orbax(tmp_path / "orbax", checkpoint.config, model, [folder / "config.json"])
    tokens = []
    for path in (folder, tmp_path / "orbax"):
        runner = make_runner(options(folder, model_path=str(path)))
        driver = PlanDriver(runner)
        tokens.append(driver.generate(driver.admit(PROMPT), 5, chunk=16))
        runner.close()
    assert tokens[0] == tokens[1]


def test_spec_and_report_hold_the_requested_values(folder: Path) -> None:
    runner = make_runner(
        options(folder, dtype=Dtype.BFLOAT16, page_size=8, random_seed=3, load_format=LoadFormat.DUMMY)
    )
    (pool,) = runner.spec.pools
    assert (pool.num_pages, pool.page_size) == (81, 8)
    assert (runner.spec.max_rows, runner.spec.token_budget) == (2, 16)
    assert (runner.spec.max_context, runner.spec.vocab_size) == (512, 384)
    report = runner.report()
    assert report.details["dtype"] == "bfloat16"
    assert report.details["attention"] == "numba"
    # 2 layers, 2 kv heads of 32, keys and values, two bytes each, for every token of the pool and its pad page.
    assert report.kv_bytes == 648 * 2 * 2 * 32 * 2 * 2
    runner.close()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "name"), [(KVCacheDtype.FLOAT8_E4M3, "float8_e4m3fn"), (KVCacheDtype.INT8, "int8")]
)
def test_8_bit_keys_and_values_take_a_byte_each(folder: Path, kv_cache_dtype: KVCacheDtype, name: str) -> None:
    """And the logprobs are close to those without rounding."""
    found = []
    for kind in (KVCacheDtype.AUTO, kv_cache_dtype):
        runner = make_runner(options(folder, kv_cache_dtype=kind))
        report = runner.report()
        driver = PlanDriver(runner)
        request = driver.admit(PROMPT)
        wanted = PromptLogprobs(0, 0, np.array(PROMPT[1:17], np.int32))
        driver.step([(request, 16)], prompt_logprobs=[wanted])
        found.append((report.kv_bytes, report.details["kv_cache_dtype"], request.prompt_logprobs[0].logprobs))
        runner.close()
    (exact_bytes, exact_name, exact), (rounded_bytes, rounded_name, rounded) = found
    assert (exact_name, rounded_name) == ("float32", name)
    assert exact_bytes == 4 * rounded_bytes
    assert 1e-5 < np.abs(rounded - exact).max() < 0.2 * exact.std()


def test_options_that_cannot_be_met_are_refused_before_weights_are_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context_length 600 exceeds the model's maximum of 512 positions"):
        make_runner(options(folder, context_length=600))
    with pytest.raises(ConfigError, match="device tpu was given, but JAX sees only: cpu"):
        make_runner(options(folder, device=Device.TPU))
    with pytest.raises(ConfigError, match="max_total_tokens 10000000000 needs"):
        make_runner(options(folder, max_total_tokens=10**10))


@dataclass(frozen=True)
class TpuDevice:
    """The attributes that the choice of attention reads."""

    device_kind: str
    platform: str = "tpu"


def test_a_tpu_that_the_kernels_do_not_know_is_refused_at_the_start(folder: Path) -> None:
    assert choose_attention(options(folder), TpuDevice("TPU v6 lite")) is AttentionImplementation.PALLAS_CHECKED
    quick = options(folder, debug_memory=False)
    assert choose_attention(quick, TpuDevice("TPU v6 lite")) is AttentionImplementation.PALLAS
    with pytest.raises(ConfigError, match=r"support TPU v4, .*, and the device is 'TPU v99': choose .* xla"):
        choose_attention(options(folder), TpuDevice("TPU v99"))
    by_xla = options(folder, attention_backend=AttentionBackend.XLA)
    assert choose_attention(by_xla, TpuDevice("TPU v99")) is AttentionImplementation.XLA


KERNELS_NEED = "XLA's operations compute attention: CPU kernels need "


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "numba"),
        ({"attention_backend": "numba", "dtype": "bfloat16"}, "numba"),
        ({"attention_backend": "xla"}, "xla"),
        ({"kv_cache_dtype": "int8"}, KERNELS_NEED + "keys and values in bfloat16 or float32, got int8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, KERNELS_NEED + "keys and values in bfloat16 or float32, got float8_e4m3fn"),
        ({"enable_deterministic_inference": True}, KERNELS_NEED + "a model without options for equal results"),
        ({"kv_cache_dtype": "int8", "attention_backend": "numba"}, ConfigError),
        ({"enable_deterministic_inference": True, "attention_backend": "numba"}, ConfigError),
    ],
    ids=str,
)
def test_kernels_compute_attention_on_a_cpu_if_they_can(
    folder: Path, changes: dict[str, object], found: str | type[ConfigError], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise XLA's operations do, and a single line of the log says why, unless kernels were asked for."""
    config = options(folder, compilation_cache_dir=None, **changes)
    models = Models(open_checkpoint(config.model_path), None, None)

    def attention() -> str:
        backend = JaxBackend.choose(config, models)
        unloaded = backend.build(models)
        unloaded.build()
        return backend.attention_of(unloaded)

    if found is ConfigError:
        with pytest.raises(ConfigError, match=r"attention_backend numba (needs keys and values|may depend on)"):
            attention()
        return
    with caplog.at_level(logging.INFO, logger="sglang_jax"):
        name = attention()
    lines = [message for message in caplog.messages if message.startswith(KERNELS_NEED)]
    assert isinstance(found, str)
    if found.startswith(KERNELS_NEED):
        assert name in ("xla", "xla_fixed")
        assert len(lines) == 1
        assert lines[0].startswith(found)
    else:
        assert (name, lines) == (found, [])


@pytest.mark.parametrize(("rotary", "found"), [(32, "numba"), (8, "xla")])
def test_kernels_compute_latent_attention_of_some_sizes(rotary: int, found: str, tmp_path: Path) -> None:
    sizes = {"qk_rope_head_dim": rotary, "head_dim": rotary, "rope_parameters": {"rope_type": "default"}}
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", **sizes)
    config = options(folder, compilation_cache_dir=None)
    models = Models(open_checkpoint(config.model_path), None, None)
    backend = JaxBackend.choose(config, models)
    unloaded = backend.build(models)
    unloaded.build()
    assert backend.attention_of(unloaded) == found


def test_kernels_that_are_missing_or_wrong_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = TensorParallel.of(small_config(), Parallelism(2))
    missing = attention_kernels.missing_for_kernels(jnp.dtype("float32"), two, fixed=False)
    assert missing == "one device, got tp_size 2"
    config = options(folder, attention_backend="numba")
    models = Models(open_checkpoint(config.model_path), None, None)
    with monkeypatch.context() as without:
        without.setattr(attention_kernels, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"numba needs numba, which is not installed: pip install -e .*: choose"):
            JaxBackend.choose(config, models).build(models)
    attention_kernels.cpu_attention.cache_clear()
    call = CpuAttention.__call__
    for wrong in (1.02, float("nan")):
        with monkeypatch.context() as planted:
            planted.setattr(CpuAttention, "__call__", lambda *of, wrong=wrong, **more: call(*of, **more) * wrong)
            with pytest.raises(ConfigError, match="attention_backend numba has no kernels, the log says why"):
                JaxBackend.choose(config, models).build(models)
        attention_kernels.cpu_attention.cache_clear()
    assert [message.endswith("wrong results on this machine") for message in caplog.messages] == [True] * 2


@pytest.mark.parametrize(
    ("device", "backend", "debug", "expected"),
    [
        (TpuDevice("TPU v6 lite"), "auto", False, AttentionImplementation.PALLAS_FIXED),
        (TpuDevice("TPU v6 lite"), "auto", True, AttentionImplementation.PALLAS_FIXED_CHECKED),
        (TpuDevice("TPU v6 lite"), "xla", True, AttentionImplementation.XLA_FIXED),
        (TpuDevice("cpu", "cpu"), "auto", True, AttentionImplementation.XLA_FIXED),
        (TpuDevice("cpu", "cpu"), "reference", False, r"attention_backend reference may depend on.*choose auto"),
    ],
)
def test_the_same_results_in_every_step_need_attention_that_gives_them(
    folder: Path, device: TpuDevice, backend: str, debug: bool, expected: AttentionImplementation | str
) -> None:
    config = options(folder, enable_deterministic_inference=True, attention_backend=backend, debug_memory=debug)
    if isinstance(expected, AttentionImplementation):
        chosen = choose_attention(config, device)
        assert chosen is expected
        assert (chosen.fixed, chosen.checked) == (True, debug and chosen.for_tpu)
    else:
        with pytest.raises(ConfigError, match=expected):
            choose_attention(config, device)


def test_devices_whose_sums_may_depend_on_the_batch_compute_shards(folder: Path) -> None:
    model, same = small_config(), {"enable_deterministic_inference": True}
    assert [shards_on_jax(options(folder, **same, tp_size=size), model) for size in (1, 2, 4)] == [None, None, 4]
    assert shards_on_jax(options(folder, tp_size=4), model) is None
    assert shards_on_jax(options(folder, deterministic="tp"), model) == 4
    norm = QKNorm(norm=model.final_norm, whole=True)
    mixer = replace(model.layers[1].mixer, qk_norm=norm)
    whole = replace(model, layers=(model.layers[0], replace(model.layers[1], mixer=mixer)))
    with pytest.raises(ConfigError, match="does not support tp_size 4: layer 1 cannot be divided into parts"):
        shards_on_jax(options(folder, **same, tp_size=4), whole)
    for more in ({"kv_cache_dtype": "int8"}, {"keep_gguf_blocks": True}, {"cpu_activations": "int8"}):
        with pytest.raises(ConfigError, match=f"{next(iter(more))}.* not support deterministic tp"):
            shards_on_jax(options(folder, deterministic="tp", **more), model)


def test_a_draft_model_does_not_change_the_shards(folder: Path) -> None:
    main = open_checkpoint(str(folder))
    models = Models(main, replace(main, config=small_config(num_heads=3, num_kv_heads=1)), None)
    backend = JaxBackend.choose(options(folder, deterministic="tp"), models)
    assert [each.parallel.num_shards for each in (backend.build(models), backend.build_draft(main))] == [4, None]


def test_closing_frees_the_device(folder: Path) -> None:
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    config = options(folder)
    runner = load_rank(config, open_checkpoint(config.model_path))
    assert any(id(array) not in before for array in jax.live_arrays())
    runner.close()
    assert all(array.is_deleted() for array in jax.live_arrays() if id(array) not in before)

"""A runner of the torch backend made from a checkpoint on disk, against transformers on the same checkpoint."""

from __future__ import annotations

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.gguf_files import make_tiny_gguf
from helpers.plan_driver import PlanDriver
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.config import AttentionBackend, Device, Dtype, EngineConfig, KVCacheDtype, LoadFormat
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.assembly import Models
from sglang_jax.runner.plan import PromptLogprobs
from sglang_jax.runner.protocol import Runner
from torch_backend import building, create_runner
from torch_backend.models.transformer import Transformer
from torch_backend.parallel import SingleProcess

PROMPT = np.random.default_rng(2).integers(3, 380, 37).tolist()
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[int], np.ndarray]:
    """Greedy text of 20 tokens, and logprobs after each token of the prompt."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        text = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=-1)
        logprobs = torch.log_softmax(oracle(torch.tensor([PROMPT])).logits[0], -1).numpy()
    return text[0, len(PROMPT) :].tolist(), logprobs


def options(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model_path": str(folder),
        "device": Device.CPU,
        "dtype": Dtype.FLOAT32,
        "max_total_tokens": 640,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
    }
    return EngineConfig.model_validate(values | changes)


def open_for(config: EngineConfig) -> Checkpoint:
    return open_checkpoint(config.model_path, config.load_format, seed=config.random_seed)


def make_runner(config: EngineConfig) -> Runner:
    return create_runner(config, open_for(config))


@pytest.mark.parametrize("attention", [AttentionBackend.AUTO, AttentionBackend.NATIVE, AttentionBackend.REFERENCE])
def test_text_and_logprobs_are_those_of_transformers(
    folder: Path, expected: tuple[list[int], np.ndarray], attention: AttentionBackend
) -> None:
    text, logprobs = expected
    runner = make_runner(options(folder, attention_backend=attention))
    runner.warm_up(lambda done, total, what: None)
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    wanted = PromptLogprobs(0, 0, np.array(PROMPT[1:17], np.int32))
    driver.step([(request, 16)], prompt_logprobs=[wanted], prompt_top_logprobs=5)
    assert driver.generate(request, 20, chunk=16) == text
    (found,) = request.prompt_logprobs
    assert found.logprobs == pytest.approx(logprobs[np.arange(16), PROMPT[1:17]], abs=2e-4)
    assert found.top_ids.tolist() == np.argsort(-logprobs[:16], axis=-1)[:, :5].tolist()
    runner.close()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_half_precision_gives_nearly_the_same_logprobs(
    folder: Path, expected: tuple[list[int], np.ndarray], dtype: Dtype
) -> None:
    runner = make_runner(options(folder, dtype=dtype))
    assert runner.report().details["dtype"] == runner.report().details["kv_cache_dtype"] == dtype.value
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    wanted = PromptLogprobs(0, 0, np.array(PROMPT[1:17], np.int32))
    driver.step([(request, 16)], prompt_logprobs=[wanted])
    (found,) = request.prompt_logprobs
    logprobs = expected[1][np.arange(16), PROMPT[1:17]]
    assert found.logprobs == pytest.approx(logprobs, abs=0.2 if dtype is Dtype.BFLOAT16 else 0.03)
    runner.close()


def test_spec_and_report_show_the_options(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = make_runner(
            options(folder, dtype=Dtype.BFLOAT16, page_size=8, random_seed=3, load_format=LoadFormat.DUMMY)
        )
    (pool,) = runner.spec.pools
    assert (pool.num_pages, pool.page_size) == (81, 8)
    assert (runner.spec.max_rows, runner.spec.token_budget) == (2, 16)
    assert (runner.spec.max_context, runner.spec.vocab_size) == (512, 384)
    report = runner.report()
    assert (report.backend, report.device) == ("torch", f"cpu ({torch.get_num_threads()} threads)")
    assert report.details == {
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "attention": "numba",
        "tp_size": "1",
    }
    # keys and values of two bytes each, for every token of the pool and its pad page
    assert report.kv_bytes == 648 * LAYERS * KV_HEADS * HEAD_DIM * 2 * 2
    assert (report.compiled_programs, report.compiles_after_warm_up) == (0, 0)
    assert any("640 KV tokens" in message and "2 rows, 16 tokens a step" in message for message in caplog.messages)
    runner.close()


def test_weight_bytes_are_those_of_the_checkpoint(folder: Path) -> None:
    runner = make_runner(options(folder))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert runner.report().weight_bytes == sum(4 * parameter.numel() for parameter in oracle.parameters())
    runner.close()


def test_a_float8_cache_takes_a_quarter_of_the_memory(folder: Path) -> None:
    runner = make_runner(options(folder, kv_cache_dtype=KVCacheDtype.FLOAT8_E4M3))
    report = runner.report()
    assert report.details["kv_cache_dtype"] == "float8_e4m3fn"
    assert report.kv_bytes == 41 * 16 * LAYERS * KV_HEADS * HEAD_DIM * 2
    driver = PlanDriver(runner)
    assert len(driver.generate(driver.admit(PROMPT), 5, chunk=16)) == 5
    runner.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 600}, "context_length 600 exceeds the model's maximum of 512 positions"),
        ({"device": Device.TPU}, "device tpu is not supported by the torch backend, which runs on cuda or cpu"),
        ({"device": Device.CUDA}, "device cuda was given, but torch .* sees no CUDA GPU"),
        ({"max_total_tokens": 10**10}, "max_total_tokens 10000000000 needs"),
        (
            {"attention_backend": AttentionBackend.TRITON},
            "attention_backend triton is not available in the torch backend on",
        ),
        (
            {"attention_backend": AttentionBackend.XLA},
            "attention_backend xla is not available in the torch backend on cpu",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_options_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(building, "load_weights", refuse)
    with pytest.raises(ConfigError, match=message):
        make_runner(options(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_backend": "numba"},
            "attention_backend numba has no kernels: they support latent vectors of multiples of 32 numbers in "
            r"torch.bfloat16, not latent vectors of 32 \+ 8 numbers",
        ),
        (
            {"attention_backend": "sage"},
            "attention_backend sage does not support latent attention on cpu: choose numba",
        ),
    ],
)
def test_options_incompatible_with_latent_attention_are_refused(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    config = EngineConfig.model_validate({"model_path": str(folder), "backend": "torch"} | changes)
    with pytest.raises(ConfigError, match=message):
        create_runner(config, open_checkpoint(str(folder)))


def test_memory_for_no_request_is_refused_with_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "available_memory", lambda device: 2**20)
    with pytest.raises(ConfigError, match=r"^1 MiB of memory .* 0\.85: after 1 MiB of weights .* a request of 512"):
        make_runner(options(folder, max_total_tokens=None))


def test_the_pool_fills_the_memory_next_to_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(options(folder))
    weights = runner.report().weight_bytes
    runner.close()
    page = 16 * LAYERS * KV_HEADS * HEAD_DIM * 2 * 4
    # 40 pages of 16 tokens and the pad page, and half an unusable page
    monkeypatch.setattr(building, "available_memory", lambda device: weights + 41 * page + page // 2)
    runner = make_runner(options(folder, max_total_tokens=None, mem_fraction_static=0.9999999))
    assert runner.spec.pools[0].num_pages == 41
    assert runner.report().kv_bytes == 41 * page
    runner.close()


def test_an_orbax_checkpoint_needs_the_other_backend(folder: Path, tmp_path: Path) -> None:
    source = ModelSource(SourceKind.ORBAX, tmp_path, "model")
    checkpoint = replace(open_checkpoint(str(folder)), source=source, reader=None)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} is an Orbax checkpoint, .* choose --backend jax"):
        create_runner(options(folder), checkpoint)


def test_closing_and_other_weights_free_the_weights_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Transformer]] = []
    build = building.build_model

    def watched(*arguments: object, **keywords: object) -> Transformer:
        model = build(*arguments, **keywords)  # type: ignore[arg-type]
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(building, "build_model", watched)
    runner = make_runner(options(folder))
    driver = PlanDriver(runner)
    driver.generate(driver.admit(PROMPT), 2, chunk=16)
    (model,) = models
    assert model() is not None
    gc.collect()
    gc.disable()
    try:
        runner.load_weights(str(folder))
        assert model() is None
        assert models[-1]() is not None
        runner.release_memory(weights=True, kv=True)
        assert models[-1]() is None
        assert (runner.report().weight_bytes, runner.report().kv_bytes) == (0, 0)
        runner.resume_memory(weights=True, kv=True)
        assert models[-1]() is not None
        runner.close()
        assert models[-1]() is None
    finally:
        gc.enable()


def test_equal_results_of_experts_are_refused_on_a_gpu(tmp_path: Path) -> None:
    with_experts = make_tiny_checkpoint(tmp_path, "qwen2_moe")
    config = options(with_experts, enable_deterministic_inference=True)
    models = Models(open_checkpoint(config.model_path), None, None)
    with pytest.raises(ConfigError, match="enable_deterministic_inference does not support experts on a GPU"):
        building.TorchBackend.choose(config, models, torch.device("cuda"), SingleProcess())


def test_groups_of_4_bits_need_a_kernel(folder: Path) -> None:
    """Without one, the weights would take the memory of those that are not quantised."""
    for changes in ({}, {"dtype": Dtype.BFLOAT16, "cpu_activations": "exact"}):
        with pytest.raises(ConfigError, match="quantization int4 needs a GPU, or a CPU with numba and activations"):
            make_runner(options(folder, quantization="int4", **changes))


def test_later_runners_have_as_many_threads(folder: Path) -> None:
    """Sums may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        for _ in range(2):
            runner = make_runner(options(folder, deterministic="tp"))
            assert runner.report().device == "cpu (2 threads)"
            runner.close()
            assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_replaced_weights_leave_later_engines_their_threads(tmp_path: Path) -> None:
    """Matrices that all stay in blocks leave torch one thread, on the thread of their engine only. A new thread starts
    with the number that was set last."""
    model = make_tiny_model("llama", head_dim=32)
    file = make_tiny_gguf(tmp_path / "model.gguf", model, make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.Q8_0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = make_runner(options(file, dtype="bfloat16"))
        runner.load_weights(str(file))
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2
        runner.close()
    finally:
        torch.set_num_threads(before)


def test_a_draft_model_does_not_change_the_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "share_cores", lambda size, device: None)
    main = open_checkpoint(str(folder))
    models = Models(main, replace(main, config=small_config(num_heads=3, num_kv_heads=1)), None)
    config = options(folder, deterministic="tp", attention_backend="native")
    backend = building.TorchBackend.choose(config, models, torch.device("cpu"), SingleProcess())
    assert backend.num_shards == 4
    model, draft = backend.build(models), backend.build_draft(main)
    assert (model.in_shards, draft.in_shards) == (True, False)
    assert (len(model.shards), len(draft.shards)) == (4, 1)

"""Expert parallelism over eight devices of JAX and four processes of Torch: the outputs of one. Tests of fewer are in
`test_tensor_parallel`, `test_expert_models` and `tests/torch_backend/test_tensor_parallel.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.parity_cases import STEPS, TOLERANCE, prompts, transformers_logits
from helpers.quantized_checkpoints import Quantised, make_quantised_checkpoint
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.torch_ranks import run_ranks

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, Device, EngineConfig

ROOT = Path(__file__).parents[2]
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
SHARED: dict[str, Any] = {"num_experts": 16, **HEADS}
BIASES: dict[str, Any] = {"num_local_experts": 16, **HEADS}
PROMPTS = [[5, 17, 200, 33, 8], [301], [9, 9, 12, 40, 77, 250, 131, 6, 18]]
PARAMS = (
    SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=12, seed=3, ignore_eos=True),
)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("architecture", "changes", "quantization"),
    [("qwen2_moe", SHARED, "none"), ("qwen2_moe", SHARED, "int8"), ("gpt_oss", BIASES, "none")],
)
def test_eight_devices_give_the_same_as_one(
    architecture: str, changes: dict[str, Any], quantization: str, tmp_path: Path
) -> None:
    """Logits, and sampled tokens of an engine, with experts in two, four and eight parts: with a shared expert, also in
    8 bits, and with biases."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=8"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    arguments = [str(tmp_path), quantization, architecture, json.dumps(changes)]
    finished = subprocess.run(
        [sys.executable, "-m", "helpers.expert_parallel_on_jax", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_four_processes_compute_what_one_does_and_transformers(tmp_path: Path) -> None:
    """Experts in two and four parts: with a shared expert, also in 8 bits, and with biases."""
    folders = {name: tmp_path / name for name in ("qwen2_moe", "gpt_oss", "8 bits")}
    make_quantised_checkpoint(folders["8 bits"], "qwen2_moe", Quantised.INT8_W8A8, **SHARED)
    expected = {"8 bits": TorchPagedModel(folders["8 bits"]).run(prompts(), STEPS)}
    for name, changes in (("qwen2_moe", SHARED), ("gpt_oss", BIASES)):
        make_tiny_checkpoint(folders[name], name, **changes)
        expected[name] = [transformers_logits(name, each, **changes) for each in prompts()]
    cases = [(name, parts) for name in folders for parts in (2, 4)]
    options = [{"expert_parts": parts} for _, parts in cases]
    for found in run_ranks([folders[name] for name, _ in cases], 4, prompts(), STEPS, tmp_path, options):
        for (name, parts), logits in zip(cases, found, strict=True):
            for one, wanted in zip(logits, expected[name], strict=True):
                assert np.abs(one - wanted).max() < TOLERANCE, (name, parts)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_engine_of_four_processes_gives_the_tokens_of_one(quantization: str | None, tmp_path: Path) -> None:
    """With a shared expert. The counts of the experts' tokens are those of one process."""
    make_tiny_checkpoint(tmp_path, "qwen2_moe", **SHARED)
    found = []
    for tp_size, ep_size in ((1, 1), (4, 2), (4, 4)):
        config = EngineConfig(
            model_path=str(tmp_path),
            backend=Backend.TORCH,
            device=Device.CPU,
            dtype="float32",
            quantization=quantization,
            tp_size=tp_size,
            ep_size=ep_size,
            max_total_tokens=512,
            max_running_requests=4,
            chunked_prefill_size=8,
            skip_warmup=True,
            enable_expert_distribution_metrics=True,
        )
        with Engine(config=config) as engine:
            outputs = [output.output_ids for params in PARAMS for output in engine.generate(PROMPTS, params)]
            found.append((outputs, engine.state()["expert_tokens"]))
    assert found[1:] == found[:1] * 2

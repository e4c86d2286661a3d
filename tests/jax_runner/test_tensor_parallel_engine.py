"""An engine over forced host devices: the same text for any number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.parallel import TensorParallel

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import re
import sys
from dataclasses import replace
from sglang_jax import Engine, SamplingParams, json_grammar, regex_grammar
from sglang_jax.config import EngineConfig
from sglang_jax.layers.platform import PlatformLayout

folder = sys.argv[1]
prompts = [[5, 6, 7, 9], [100, 3, 77, 200, 13, 14, 15, 16, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48], [301]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
random = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=4, max_new_tokens=6, ignore_eos=True)
# All tokens are about as likely, and so would padding be.
uniform = SamplingParams(temperature=100.0, seed=5, max_new_tokens=60, ignore_eos=True)
under_grammars = [
    SamplingParams(temperature=0.0, max_new_tokens=20, grammar=json_grammar({"type": "object"})),
    SamplingParams(temperature=1.0, top_k=50, seed=6, max_new_tokens=20, grammar=regex_grammar("([a-z]{2} )+")),
    greedy,
]

def run(tp_size):
    config = EngineConfig(
        model_path=folder, backend="jax", device="cpu", dtype="float32", tp_size=tp_size, skip_warmup=True,
        max_total_tokens=512, max_running_requests=4, chunked_prefill_size=16, page_size=4,
    )
    with Engine(config=config) as engine:
        asked = (greedy, random, uniform, under_grammars)
        outputs = [engine.generate(prompts, params) for params in asked]
        assert re.match("{", outputs[3][0].text) and re.fullmatch("([a-z]{2} )*[a-z]{0,2}", outputs[3][1].text), outputs
        return [[out.output_ids for out in found] for found in outputs]

alone = run(1)
# As a TPU has its weights.
in_matrices = replace(PlatformLayout.of("cpu"), matrices=True)
PlatformLayout.of = lambda platform: in_matrices
for tp_size in map(int, sys.argv[2:]):
    assert run(tp_size) == alone, tp_size
"""


_DRAFTS = """
import sys
from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

prompts = [[5, 6, 7, 9], [100, 3, 77, 200, 13, 14, 15, 16, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48], [301]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
random = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=4, max_new_tokens=24, ignore_eos=True)

def run(tp_size, **options):
    config = EngineConfig(
        model_path=sys.argv[1] + "/model", backend="jax", device="cpu", dtype="float32", tp_size=tp_size,
        skip_warmup=True, max_total_tokens=512, max_running_requests=8, chunked_prefill_size=16, page_size=4,
        **options,
    )
    with Engine(config=config) as engine:
        outputs = [engine.generate(prompts, params) for params in (greedy, random)]
        drafts = sum(out.drafts.drafts for found in outputs for out in found if out.drafts is not None)
        return [[out.output_ids for out in found] for found in outputs], drafts

alone, _ = run(1)
found, drafts = run(
    2,
    speculative_algorithm="draft",
    speculative_draft_model_path=sys.argv[1] + "/" + sys.argv[2],
    speculative_num_draft_tokens=2,
)
assert found == alone, (found, alone)
assert drafts > 4, drafts
"""


_STATES = """
import sys
from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

folder = sys.argv[1]
shared = [(7 * number) % 380 + 3 for number in range(37)]
prompts = [[*shared, 5, 6], [*shared, 9], [301], shared[:21]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
random = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=4, max_new_tokens=8, ignore_eos=True)

def run(tp_size):
    config = EngineConfig(
        model_path=folder, backend="jax", device="cpu", dtype="float32", tp_size=tp_size, skip_warmup=True,
        max_total_tokens=256, max_running_requests=4, chunked_prefill_size=16, page_size=4, max_mamba_cache_size=10,
    )
    with Engine(config=config) as engine:
        outputs = [engine.generate(prompts, params) for params in (greedy, random, greedy)]
        with engine.open_session() as session:
            outputs.append([session.generate(shared[:number], greedy) for number in (5, 9, 3)])
        # How far a hit goes depends on which prompts were admitted together.
        assert max(out.cached_tokens for out in outputs[2][:2]) >= 32, outputs[2]
        return [[out.output_ids for out in found] for found in outputs]

assert run(2) == run(1)
"""


_EXPERTS = """
import sys
from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

folder = sys.argv[1]
prompts = [[5, 6, 7, 9], [100, 3, 77, 200, 13, 14, 15, 16, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48], [301]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
config = EngineConfig(
    model_path=folder, backend="jax", device="cpu", dtype="float32", tp_size=2, ep_size=2, skip_warmup=True,
    max_total_tokens=256, max_running_requests=4, chunked_prefill_size=16, page_size=4,
    enable_expert_distribution_metrics=True,
)
with Engine(config=config) as engine:
    engine.generate(prompts, greedy)
    counts = engine.state()["expert_tokens"]
assert [sum(layer) for layer in counts.values()] == [3 * (4 + 18 + 1 + 3 * 7)] * 2, counts
"""


_RANKS = """
import sys
from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

folder = sys.argv[1]
shared = [(7 * number) % 380 + 3 for number in range(40)]
prompts = [[*shared, 5, 6], [*shared[:33], 9], [301], shared[:21], [4, 5], [9, 8, 7], shared[3:30]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
random = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=4, max_new_tokens=8, ignore_eos=True)

def run(**options):
    config = EngineConfig(
        model_path=folder, backend="jax", device="cpu", dtype="float32", skip_warmup=True, debug_memory=True,
        max_total_tokens=256, max_running_requests=6, chunked_prefill_size=32, page_size=4, **options,
    )
    with Engine(config=config) as engine:
        state = engine.state()
        assert state["max_total_tokens"] == 256 * config.dp_ranks, state
        outputs = [engine.generate(prompts, params) for params in (greedy, random, greedy)]
        with engine.open_session() as session:
            outputs.append([session.generate(shared[:number], greedy) for number in (5, 9, 3)])
        assert max(out.cached_tokens for out in outputs[2]) >= 32, outputs[2]
        return [[out.output_ids for out in found] for found in outputs]

one = run()
assert run(tp_size=2, enable_dp_attention=True) == one
assert run(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True) == one
"""


_EACH = """
import sys

for number, (folder, program) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    sys.argv = ["program", folder]
    exec(program, {"__name__": f"program {number}"})
"""


def run_program(program: str, devices: int, *arguments: str | Path) -> None:
    """Runs Python code in a separate process with a number of devices. Checkpoints are made in this one, which has
    already imported transformers; that takes seconds."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(f"--xla_force_host_platform_device_count={devices}"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_devices_give_the_same_as_one_with_states_and_count_the_tokens_of_experts_once(tmp_path: Path) -> None:
    """Prompts that start with states of others, and turns of a session; then a model with experts in two parts, and one
    whose rows are divided between two ranks. One process, because most of the time is its start."""
    # One key head, which both devices have.
    states = make_tiny_checkpoint(tmp_path / "states", "qwen3_5_text", linear_num_key_heads=1)
    experts = make_tiny_checkpoint(tmp_path / "experts", "qwen3_moe")
    latents = make_tiny_checkpoint(tmp_path / "latents", "deepseek_v3")
    run_program(_EACH, 2, states, _STATES, experts, _EXPERTS, latents, _RANKS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", ["draft", "model"])
def test_two_devices_with_a_draft_model_give_the_same_as_one_without(tmp_path: Path, draft: str) -> None:
    # A vocabulary that no number of devices divides: each pads it. The draft model's one kv head is copied.
    for name, kind, kv_heads in (("model", "qwen3", 2), ("draft", "llama", 1)):
        heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
        make_tiny_checkpoint(tmp_path / name, kind, **heads, vocab_size=389)
    run_program(_DRAFTS, 2, tmp_path, draft)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [("2", "8"), pytest.param(("4",), marks=pytest.mark.soak)], ids=" ".join)
def test_several_devices_give_the_same_as_one(sizes: tuple[str, ...], tmp_path: Path) -> None:
    """Two have a kv head each; four and eight have copies."""
    # A vocabulary that no number of devices divides: each pads it.
    make_tiny_checkpoint(tmp_path, "qwen3", num_attention_heads=8, num_key_value_heads=2, vocab_size=389)
    run_program(_PROGRAM, 8, tmp_path, *sizes)


def config(num_heads: int, num_kv_heads: int, intermediate: int = 96, vocab: int = 96) -> ModelConfig:
    return dense_decoder(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=intermediate,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position=64,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("kv_heads", "size", "copies"), [(4, 1, 1), (4, 2, 1), (4, 4, 1), (2, 4, 2), (2, 8, 4), (1, 8, 8)]
)
def test_kv_heads_are_copied_where_there_are_more_devices(kv_heads: int, size: int, copies: int) -> None:
    parallel = TensorParallel.of(config(8, kv_heads), Parallelism(size))
    assert {layer.mixer.num_kv_heads for layer in parallel.config.layers} == {kv_heads * copies}
    assert kv_heads * copies % size == 0


@pytest.mark.parametrize(("vocab", "size", "padded"), [(97, 1, 97), (97, 8, 104), (96, 8, 96), (5, 4, 8)])
def test_a_vocabulary_is_padded_to_the_devices(vocab: int, size: int, padded: int) -> None:
    parallel = TensorParallel.of(config(8, 8, vocab=vocab), Parallelism(size))
    assert (parallel.vocab_size, parallel.config.vocab_size) == (vocab, padded)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (config(6, 2), 4, "6 heads and 2 kv heads cannot be spread over 4 devices"),
        (config(12, 3), 2, "12 heads and 3 kv heads cannot be spread over 2 devices"),
        (config(8, 8, intermediate=36), 8, "the intermediate size 36 cannot be spread over 8 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_an_error(model: ModelConfig, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorParallel.of(model, Parallelism(size))

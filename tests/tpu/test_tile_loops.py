"""Products of results that do not depend on the step, as libtpu compiles them: programs of few and of many rows have
loops over tiles with the same arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT
from helpers.tiny_models import make_tiny_checkpoint
from helpers.tpu_tile_loops import Loops, compiled_loops, differences, loops_of

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PROMPT_LOGPROBS = "jit(step)/cond/branch_1_fun/while"

_CHILD = """
import tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sglang_jax.kernels.row_tiles import TILE_ROWS_ON_TPU, in_tiles
from sglang_jax.layers.parameter import matmul

device = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=[1, 1, 1]).devices[0]
place = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())

def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

def product(x, weights):
    found = matmul(x, weights)
    return (found * jax.lax.rsqrt(jnp.mean(found * found, axis=-1, keepdims=True))).astype(x.dtype)

def step(x, weights):
    return in_tiles(lambda x: product(x, weights), x, TILE_ROWS_ON_TPU).swapaxes(0, 1)

for rows in (2, 300):
    print("PROGRAM", jax.jit(step).lower(array(rows, 512), array(512, 4, 128)).compile().as_text())
"""


def check(few: Loops, many: Loops) -> None:
    assert few.outside == many.outside == []
    assert differences(few, many) == []


def test_a_tile_of_few_rows_is_computed_as_one_of_many() -> None:
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    _, *programs = child.stdout.split("PROGRAM")
    few, many = map(loops_of, programs)
    check(few, many)
    (bodies,) = few.bodies.values()
    assert len(bodies) == 1
    assert "convolution f32[128," in bodies[0]
    assert "rsqrt" in bodies[0]


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_steps_of_few_and_many_rows_have_the_same_loops(topology: str, tmp_path: Path) -> None:
    """Without a prescribed layout, libtpu 0.0.51 computed rotations for two rows in another one than for 512 on v6e."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    few, many = _loops(tmp_path, topology, max_running_requests=2, chunked_prefill_size=512)
    check(few, many)
    assert {origin.rpartition("jit(_run_layer)/")[2]: len(bodies) for origin, bodies in few.bodies.items()} == {
        "while": 4,
        "mixer/while": 4,
        "feed_forward/while": 2,
        "jit(step)/while": 2,
        "jit(step)/head/while": 1,
        "jit(step)/cond/branch_1_fun/while": 1,
    }


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe", "gpt_oss", "qwen3_5", "mamba2", "deepseek_v3"])
def test_steps_of_other_families_have_the_same_loops(name: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, CASES[name].architecture, **CASES[name].changes)
    check(*_loops(folder, "v6e-1", max_running_requests=16, chunked_prefill_size=256))


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_a_shard_has_the_same_loops_on_any_number_of_devices(topology: str, tmp_path: Path) -> None:
    """Logprobs of prompts are computed on other devices than their logits, so of those loops, sums are compared."""
    changes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes | {"vocab_size": 8192}))
    sizes = {"max_running_requests": 2, "chunked_prefill_size": 512}
    alone, *others = [_loops(tmp_path, topology, deterministic="tp", tp_size=size, **sizes) for size in (1, 2, 8)]
    for decode, mixed in others:
        check(alone[0], _without_meshes(decode))
        check(_sums(alone[1], PROMPT_LOGPROBS), _sums(_without_meshes(mixed), PROMPT_LOGPROBS))


def _loops(folder: Path, topology: str, **options: Any) -> tuple[Loops, Loops]:
    sizes = {"context_length": 512, "max_total_tokens": 4096, "deterministic": "batch"}
    return compiled_loops(folder, topology, **sizes | options)


def _without_meshes(loops: Loops) -> Loops:
    """The loops with the names that they have on one device."""
    bodies = dict[str, list[str]]()
    for origin, found in loops.bodies.items():
        bodies.setdefault(origin.replace("/shard_map", ""), []).extend(found)
    return Loops({origin: sorted(found) for origin, found in bodies.items()}, loops.outside)


def _sums(loops: Loops, of: str) -> Loops:
    """The loops, of which those with the name `of` have only their sums."""
    found = [
        "\n".join(line for line in body.splitlines() if line.startswith(("convolution ", "dot ", "reduce ")))
        for body in loops.bodies[of]
    ]
    return Loops(loops.bodies | {of: sorted(found)}, loops.outside)

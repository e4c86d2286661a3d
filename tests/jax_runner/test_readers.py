"""Logits sharded over devices by the vocabulary give the same tokens and logprobs as whole ones."""

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
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sglang_jax.jax_runner.filters import has_near
from sglang_jax.jax_runner.readers import WholeLogits, reader_over
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.runner.plan import INVALID_TOKEN

LINES, VOCAB, COLUMNS = 11, 389, 392  # neither the lines nor the vocabulary are divided by 2 or 8
rng = np.random.default_rng(3)
logits = rng.standard_normal((LINES, COLUMNS)).astype(np.float32)
logits[:, VOCAB:] = 1e4  # padding
logits[0, [300, 41, 200]] = 7.0  # the first of equals, each with another device
logits[1] = np.nan
logits[2, 5] = np.inf
logits[3, 100] = -np.inf
logits[4] = 0.0
logits[4, VOCAB:] = np.nan

def state(**changed):
    return replace(SamplingState.empty(LINES + 2, VOCAB), **changed)

greedy = state()
counts = jnp.asarray(rng.integers(0, 5, (LINES + 2, VOCAB)), jnp.int32)
rows = np.array([12, 3, 5, 0, 1, 2, 4, 6, 7, 8, 9], np.int32)
some = np.zeros(LINES + 2, bool)
some[[12, 2, 9]] = True
mixed = state(
    temperature=jnp.where(some, 0.8, 0.0),
    top_p=jnp.where(some, 0.7, 1.0),
    seed_low=jnp.asarray(rng.integers(0, 2**32, LINES + 2), jnp.uint32),
    seed_high=jnp.asarray(rng.integers(0, 2**32, LINES + 2), jnp.uint32),
    presence_penalty=jnp.where(jnp.arange(LINES + 2) % 2 == 1, 1.5, 0.0),
    occurrences=counts,
    bias_ids=greedy.bias_ids.at[4, 0].set(388),
    bias_values=greedy.bias_values.at[4, 0].set(50.0),
    min_new_tokens=greedy.min_new_tokens.at[8].set(1000),
    stop_ids=greedy.stop_ids.at[8, 0].set(int(logits[9, :VOCAB].argmax())),
)
kv_lens = np.arange(LINES, dtype=np.int32) + 20
active = np.ones(LINES, bool)

def read(mesh, state):
    reader = reader_over(mesh)
    def run(logits, state, rows, kv_lens, active):
        tokens = reader.sample(logits, state, rows, kv_lens, active)
        return tokens, reader.logprobs(logits, tokens, jnp.int32(5), VOCAB)
    spread = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    return jax.jit(run)(jax.device_put(logits, spread), state, rows, kv_lens, active)

alone = make_mesh(jax.devices()[:1])
assert isinstance(reader_over(alone), WholeLogits)
for given in (greedy, mixed):
    expected = read(alone, given)
    assert expected[0].tolist()[:4] == [41] + [INVALID_TOKEN] * 3 or given is mixed
    for size in map(int, sys.argv[1:]):
        found = read(make_mesh(jax.devices()[:size]), given)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(one, other)
assert expected[0][6] == 388  # the biased token
assert expected[0][9] == int(np.argsort(logits[9, :VOCAB])[-2])  # the most likely may not end the output yet

# Of a large vocabulary, the nearest tokens are searched first.
VOCAB = COLUMNS = 40000
assert has_near(VOCAB)
logits = 3 * rng.standard_normal((LINES, COLUMNS)).astype(np.float32)
given = replace(SamplingState.empty(LINES + 2, VOCAB), temperature=mixed.temperature + 0.1, top_p=mixed.top_p)
one, other = (read(make_mesh(jax.devices()[:size]), given)[0] for size in (1, 8))
np.testing.assert_array_equal(one, other)
"""


@pytest.mark.slow
def test_sharded_logits_give_the_same_results_as_whole_ones() -> None:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=8"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-c", _PROGRAM, "8"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]

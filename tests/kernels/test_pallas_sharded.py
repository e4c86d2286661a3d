"""The TPU kernels under a mesh, in the interpreter: devices with a shard of the heads each give the result of one
device with all."""

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
from helpers.attention_steps import Case, make_step
from helpers.tpu_interpreter import CopyMode, Interpreted
from jax.sharding import NamedSharding, PartitionSpec
from sglang_jax.kernels.kv_storage import from_storage
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.ragged_paged_attention.pallas import blocks, prefill
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks
from sglang_jax.layers.attention import write_and_attend
from sglang_jax.layers.sharding import KV_AXES, make_mesh, named_sharding

assert len(jax.devices()) == 4
prefill.HEADS_TOGETHER = 2
blocks._decode_by_costs = lambda shape: DecodeBlocks(2, 128 // shape.page_size)
blocks._prefill_by_costs = lambda shape: PrefillBlocks(16, 128 // shape.page_size)
MIXED = Case(
    (9, 150, 40), (1, 1, 20), 2, tokens=32, rows=4, kv_heads=4, group=2, head_dim=128, page_size=32, columns=8,
    tiled=True,
)
CASES = {
    "options": (replace(MIXED, window=70, soft_cap=0.7, sinks=True), 2e-5),
    "float8": (replace(MIXED, storage="float8_e4m3fn", query_type="bfloat16", sinks=True), 2e-2),
}

def slots(case, step):
    table = np.asarray(step.batch.page_table)
    found = np.zeros(case.tokens, np.int32)
    place = 0
    for row, (length, count) in enumerate(zip(case.kv_lens, case.query_lens)):
        for position in range(length - count, length):
            found[place] = table[row, position // case.page_size] * case.page_size + position % case.page_size
            place += 1
    return jnp.asarray(found), place

def check(case, bound, size, mode):
    step = make_step(case)
    write_slots, real = slots(case, step)
    batch = replace(step.batch, write_slots=write_slots)
    keys, values = np.random.default_rng(1).standard_normal((2, case.tokens, case.kv_heads, case.head_dim))
    given = step.queries, jnp.asarray(keys, step.queries.dtype), jnp.asarray(values, step.queries.dtype), step.kv_pages
    static = {"scale": step.scale}
    expected, pages = write_and_attend(AttentionImplementation.REFERENCE, *given, batch, options=step.options, **static)
    mesh = make_mesh(jax.devices()[:size])
    spread = jax.device_put(step.kv_pages, named_sharding(mesh, KV_AXES))
    whole = jax.tree.map(
        lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec())), (given[:3], batch, step.options)
    )
    attention = Interpreted(write_and_attend, AttentionImplementation.PALLAS, **static)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        (found, written), raced = attention.run(mode, *whole[0], spread, whole[1], options=whole[2])
    assert not raced
    assert written.sharding.is_equivalent_to(spread.sharding, 5)
    wide = [np.asarray(array[:real], np.float32) for array in (found, expected)]
    np.testing.assert_allclose(*wide, atol=bound, rtol=0)
    np.testing.assert_array_equal(from_storage(written)[1:], from_storage(pages)[1:])

for wanted in sys.argv[1:]:
    name, size, mode = wanted.split(",")
    check(*CASES[name], int(size), CopyMode(mode))
"""


_STATES = """
import jax
import jax.numpy as jnp
import numpy as np
from functools import partial
from helpers.tpu_interpreter import CopyMode, Interpreted
from jax.sharding import NamedSharding, PartitionSpec
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig
from sglang_jax.architectures.kinds.sections import rows_by_device
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.layers import recurrent
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.layers.sharding import make_mesh

SIZE, ROWS, TOKENS, SLOTS = 2, 4, 96, 9
whole = GatedDeltaNetConfig(
    num_key_heads=1, num_value_heads=4, key_dim=8, value_dim=16, width=4, norm=NormConfig(eps=1e-5)
)
built, order = whole.sharded(Parallelism(SIZE)), np.array(rows_by_device(whole.convolution_sections, SIZE))
rng = np.random.default_rng(0)
counts = np.array([1, 70, 9, 0])
starts = np.concatenate(([0], np.cumsum(counts)))
sequences = np.minimum(np.searchsorted(starts[1:], np.arange(TOKENS), side="right"), ROWS - 1)
numbers = {
    "begin": [3, 5, 1, 0], "own": [3, 2, 1, 0], "sequences": sequences,
    "offsets": np.arange(TOKENS) - starts[sequences], "query_starts": starts, "num_decode": 1,
}
rows = StateRows(
    fresh=jnp.array([False, False, True, True]), decode_only=False,
    **{name: jnp.asarray(value, jnp.int32) for name, value in numbers.items()},
)
def random(*shape):
    return rng.standard_normal(shape, np.float32)
x, rates, steps = random(TOKENS, whole.channels), random(TOKENS, 4), random(TOKENS, 4)
kernel, tails, matrices = random(whole.channels, 1, 4), random(SLOTS, 3, whole.channels), random(SLOTS, 4, 8, 16)
bias, log = random(4), random(4)

expected = recurrent._delta_net(
    whole, AttentionImplementation.XLA, *map(jnp.asarray, (x, rates, steps)), (jnp.asarray(kernel), None),
    *map(jnp.asarray, (bias, log, tails, matrices)), rows,
)
mesh = make_mesh(jax.devices()[:SIZE])
everywhere = NamedSharding(mesh, PartitionSpec())
given = jax.device_put(
    (x[:, order], rates, steps, (kernel[order], None), bias, log, tails[..., order], matrices, rows), everywhere
)

def layer(*given):
    run = partial(recurrent._delta_net, built.of_one_device(), AttentionImplementation.PALLAS)
    of = recurrent
    taken = of._CHANNELS, of._OF_HEADS, of._OF_HEADS, of._WEIGHTS, of._HEADS, of._HEADS
    taken += of._TAILS, of._MATRICES, of._ALL
    return of._on_each_device(run, SIZE, taken, (of._HEAD_OUTPUTS, of._TAILS, of._MATRICES))(*given)

with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    (outputs, kept, after), raced = Interpreted(layer).run(CopyMode.EAGER, *given)
assert not raced
used = starts[-1]
np.testing.assert_allclose(outputs[:used], expected[0][:used], rtol=2e-4, atol=2e-5)
np.testing.assert_array_equal(np.asarray(kept)[1:4], np.asarray(expected[1])[1:4][..., order])
np.testing.assert_allclose(after[1:], expected[2][1:], rtol=2e-4, atol=2e-5)
assert after.sharding.shard_shape(after.shape) == (SLOTS, 2, 8, 16)
"""


@pytest.mark.slow
def test_each_device_attends_for_its_own_heads() -> None:
    """With a window, a soft cap, sinks per head and scales per kv head; each device also writes its pages."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=4"),
        # The interpreter's devices wait for each other on XLA's threads, whose default number is that of the cores.
        "NPROC": "16",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    cases = ["options,4,eager", "float8,2,on_wait"]
    command = [sys.executable, "-c", _PROGRAM, *cases]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]


@pytest.mark.soak
def test_each_device_scans_the_states_of_its_own_heads() -> None:
    """With a key head that both devices have."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=2"),
        "NPROC": "16",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-c", _STATES]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]

"""The TPU kernels under a mesh, in the interpreter: each device with its own heads computes what one does for all."""

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
from sglang_jax.kernels.ragged_paged_attention.pallas.decode import DecodeBlocks
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


@pytest.mark.slow
def test_each_device_attends_for_its_own_heads() -> None:
    """With a window, a soft cap, sinks of each head and scales of each kv head; pages are written by each as well."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=4"),
        # The interpreter's devices wait for each other on XLA's threads, of which there are else as many as cores.
        "NPROC": "16",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    cases = ["options,4,eager", "float8,2,on_wait"]
    command = [sys.executable, "-c", _PROGRAM, *cases]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]

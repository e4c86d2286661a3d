"""Matrices of 8 bits, as libtpu compiles them: they are widened within the product, never in memory."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

_CHILD = """
import tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS
from sglang_jax.layers.layout import TwoAxisLayout
from sglang_jax.layers.matrix import ScaledMatrix

device = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=[1, 1, 1]).devices[0]
place = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16, sharding=place)
outputs = [(Axis.GATE_OR_UP, 2), (Axis.INTERMEDIATE, 8192)]
for encoding in (INT8_ROWS, FLOAT8_ROWS):
    matrix = ScaledMatrix(encoding, [(Axis.HIDDEN, 4096)], outputs, (Part.GATE, Part.UP), jnp.dtype(jnp.bfloat16))
    matrix.repack(TwoAxisLayout())
    graph, state = nnx.split(matrix)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), state)
    multiply = jax.jit(lambda state, x: nnx.merge(graph, state).multiply(x))
    print("PROGRAM", multiply.lower(shapes, x).compile().as_text())

from sglang_jax.kernels.experts import ExpertChoice, ExpertProducts, ExpertWeights, multiply_experts

def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

matrices = [array(jnp.float8_e4m3fn, 64, 32, 512)] * 3
scales = [array(jnp.float32, 64, width) for width in (32, 32, 512)]
weights = ExpertWeights(*matrices, None, None, *scales)
choice = ExpertChoice(array(jnp.int32, 32, 8), array(jnp.float32, 32, 8))
multiply = jax.jit(lambda *given: multiply_experts(ExpertProducts.ALL, *given, lambda gate, up: jax.nn.silu(gate) * up))
print("PROGRAM", multiply.lower(array(jnp.bfloat16, 32, 512), weights, choice).compile().as_text())
"""

_WEIGHTS = 4096 * 2 * 8192
_OF_EXPERTS = 64 * 32 * 512


def test_they_are_widened_only_in_the_product() -> None:
    """Outputs of instructions outside of fusions are in memory: no 16- or 32-bit output has as many numbers."""
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    _, *programs = child.stdout.split("PROGRAM")
    expected = [("s8", _WEIGHTS), ("f8e4m3fn", _WEIGHTS), ("f8e4m3fn", _OF_EXPERTS)]
    for program, (stored, weights) in zip(programs, expected, strict=True):
        (entry,) = re.findall(r"^ENTRY .*?^}", program, re.DOTALL | re.MULTILINE)
        arrays = [
            (kind, math.prod(map(int, sizes.split(","))))
            for kind, sizes in re.findall(r"= \(?([a-z0-9]+)\[([\d,]+)\]", entry)
        ]
        assert (stored, weights) in arrays
        assert not [kind for kind, size in arrays if kind in ("bf16", "f32") and size >= weights // 2]

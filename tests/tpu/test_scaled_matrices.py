"""Quantised matrices, as libtpu compiles them: they are widened within the product, never in memory."""

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
weights = ExpertWeights(*matrices, None, None, None, *scales)
choice = ExpertChoice(array(jnp.int32, 32, 8), array(jnp.float32, 32, 8))
multiply = jax.jit(lambda *given: multiply_experts(ExpertProducts.ALL, *given, lambda gate, up: jax.nn.silu(gate) * up))
print("PROGRAM", multiply.lower(array(jnp.bfloat16, 32, 512), weights, choice).compile().as_text())
"""

_ROUNDED = """
import tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
import jax
import jax.numpy as jnp
import numpy as np
from dataclasses import replace
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import ActivationScales
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS
from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.rounding import rounding_of
from sglang_jax.layers.layout import TwoAxisLayout
from sglang_jax.layers.matrix import ScaledMatrix

int8 = replace(INT8_ROWS, activations=ActivationScales.TOKEN)
sizes = [(Axis.HIDDEN, 512)], [(Axis.GATE_OR_UP, 2), (Axis.INTERMEDIATE, 512)]
for name, own, encoding in (("v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]}, int8), ("tpu7x:2x2x1", {}, FLOAT8_ROWS)):
    device = topologies.get_topology_desc(name, "tpu", **own).devices[0]
    place = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
    bfloat16 = jnp.dtype(jnp.bfloat16)
    rounded = rounding_of(EngineConfig(model_path="demo"), device, bfloat16)(encoding)
    matrix = ScaledMatrix(encoding, *sizes, (Part.GATE, Part.UP), bfloat16, rounded)
    matrix.repack(TwoAxisLayout())
    graph, state = nnx.split(matrix)
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), state)
    for rows in (64, 512):
        x = jax.ShapeDtypeStruct((rows, 512), bfloat16, sharding=place)
        multiply = jax.jit(lambda state, x: nnx.merge(graph, state).multiply(x))
        print("PROGRAM", multiply.lower(shapes, x).compile().as_text())
"""

_GROUPS = """
import tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from functools import partial
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.layers.grouped_matrix import GroupedMatrix, GroupProduct, packed_groups
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.layers.sharding import make_mesh, named_sharding, partition_spec

mesh = make_mesh(topologies.get_topology_desc("v6e:2x2", "tpu").devices)
kind = GroupType(Levels.INT4, 32, Scales.FLOAT16, zeros=True)
hidden, inner = [(Axis.HIDDEN, 2048)], [(Axis.INTERMEDIATE, 4096)]
for inputs, outputs, part in (
    (hidden, [(Axis.GATE_OR_UP, 2), *inner], (Part.GATE, Part.UP)), (inner, hidden, (Part.DOWN,)),
):
    matrix = GroupedMatrix(GroupProduct(kind, Parallelism(4)), inputs, outputs, part)
    blocks = matrix.arrays["values"]
    shape = jax.ShapeDtypeStruct(blocks.shape, blocks.dtype, sharding=named_sharding(mesh, blocks.axes))
    places = partition_spec(blocks.axes), partition_spec(matrix.axes)
    pack = jax.jit(jax.shard_map(partial(packed_groups, kind), mesh=mesh, in_specs=places[:1], out_specs=places[1]))
    pack.lower(shape).compile()
    matrix.pack()
    graph, state = nnx.split(matrix)
    place = named_sharding(mesh, matrix.axes)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), state)
    x = jax.ShapeDtypeStruct(
        (64, inputs[0][1]), jnp.bfloat16, sharding=named_sharding(mesh, (Axis.TOKENS, inputs[0][0]))
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(lambda state, x: nnx.merge(graph, state).multiply(x)).lower(shapes, x).compile()
        print("PROGRAM ARGUMENTS", compiled.memory_analysis().argument_size_in_bytes, compiled.as_text())
"""

_WEIGHTS = 4096 * 2 * 8192
_OF_EXPERTS = 64 * 32 * 512


def test_they_are_widened_only_in_the_product() -> None:
    """Outputs of instructions outside of fusions are in memory: no 16- or 32-bit output has as many numbers."""
    programs = _programs(_CHILD)
    expected = [("s8", _WEIGHTS), ("f8e4m3fn", _WEIGHTS), ("f8e4m3fn", _OF_EXPERTS)]
    for program, (stored, weights) in zip(programs, expected, strict=True):
        (entry,) = re.findall(r"^ENTRY .*?^}", program, re.DOTALL | re.MULTILINE)
        arrays = [
            (kind, math.prod(map(int, sizes.split(","))))
            for kind, sizes in re.findall(r"= \(?([a-z0-9]+)\[([\d,]+)\]", entry)
        ]
        assert (stored, weights) in arrays
        assert not [kind for kind, size in arrays if kind in ("bf16", "f32") and size >= weights // 2]


def test_steps_of_many_rows_multiply_8_bits_with_8_bits() -> None:
    """Of int8 on v6e and float8 on tpu7x, 64 rows and 512: the types of both operands of the product, which is a
    convolution for libtpu."""
    for program, (stored, rounds) in zip(
        _programs(_ROUNDED), [("s8", False), ("s8", True), ("f8e4m3fn", False), ("f8e4m3fn", True)], strict=True
    ):
        types = dict(re.findall(r"%([\w.-]+) = \(?([a-z0-9]+)\[", program))
        (operands,) = re.findall(r" convolution\(([^)]*)\)", program)
        found = sorted(types[name] for name in re.findall(r"%([\w.-]+)", operands))
        assert (found == [stored, stored]) == rounds, found


def test_each_device_multiplies_its_groups_by_the_kernel() -> None:
    """In blocks of float16 scales, which are packed on the device; parts of inputs are summed. A quarter of the weights
    takes as much memory as `tpu.check` counts: half a byte, and two for the scale and one for the zero of 32."""
    by_outputs, by_inputs = _programs(_GROUPS)
    counts = [int(size) for program in (by_outputs, by_inputs) for size in re.findall(r"^ ARGUMENTS (\d+)", program)]
    weights = [2048 * 2 * 4096 // 4, 4096 * 2048 // 4]
    inputs = [64 * 2048 * 2, 64 * 4096 * 2 // 4]
    assert counts == [size // 2 + size // 32 * 3 + own for size, own in zip(weights, inputs, strict=True)]
    for program, levels in ((by_outputs, "s4[2048,2048]"), (by_inputs, "s4[1024,2048]")):
        assert levels in program
        assert program.count('custom_call_target="tpu_custom_call"') == 1
        assert not re.search(r"(bf16|f32|s8|u8)\[(2048|1024),2048\]", program)
    assert "all-reduce" in by_inputs
    assert "all-reduce" not in by_outputs


def _programs(child: str) -> list[str]:
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    found = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.split("PROGRAM")[1:]

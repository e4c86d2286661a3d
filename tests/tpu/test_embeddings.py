"""Embeddings, as libtpu compiles their lookup."""

from __future__ import annotations

import os
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
from sglang_jax.layers.part import PartOptions
from sglang_jax.models import AttentionImplementation
from sglang_jax.models.transformer import Embedding

device = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=[1, 1, 1]).devices[0]
place = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
options = PartOptions(
    hidden_size=2880, dtype=jnp.dtype(jnp.bfloat16), implementation=AttentionImplementation.PALLAS
)
embedding = Embedding(201088, options)
embedding.fill_up()
graph, state = nnx.split(embedding)
shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), state)
tokens = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=place)
lowered = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)).lower(shapes, tokens)
print("TEMPORARY", lowered.compile().memory_analysis().temp_size_in_bytes, lowered.out_info.shape)
"""


def test_the_table_of_gpt_oss_is_not_copied() -> None:
    """Its columns are filled up. As they are stored, a lookup needs memory for a second table, 1.1 GiB."""
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    found = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    [line] = [line for line in found.stdout.splitlines() if line.startswith("TEMPORARY")]
    _, temporary, *shape = line.split()
    assert int(temporary) < 2**20
    assert shape == ["(64,", "2880)"]

"""What engines reserve of a cluster, and how many of them there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.ray_cluster import Nodes, launcher, starts

from sglang_jax.batch.options import BatchConfig
from sglang_jax.batch.ray.pipeline import replica_resources
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.batch.ray_options import RayOptions
from sglang_jax.config import Device, EngineConfig
from sglang_jax.errors import ConfigError


def test_a_tensor_parallel_group_has_the_gpus_of_one_node(
    cluster: Nodes, tmp_path: Path, started: Path, output: Path, read_output
) -> None:
    nodes = {cluster.add(num_cpus=3, num_gpus=3), cluster.add(num_cpus=3, num_gpus=2)}
    (tmp_path / "input.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{row}"}) for row in range(400)))
    status = run_ray_batch(
        BatchConfig(input=tmp_path / "input.jsonl", output=output),
        RayOptions(min_replicas=2, rows_per_batch=4, batches_per_replica=2),
        EngineConfig(model_path="echo", device=Device.CUDA, tp_size=2),
        launch=launcher(started),
    )
    assert status == 0
    assert {start.node_id for start in starts(started)} == nodes
    assert {len(start.devices.split(",")) for start in starts(started)} == {2}


def test_the_pool_grows_to_its_limit(cluster: Nodes, tmp_path: Path, started: Path, output: Path, read_output) -> None:
    cluster.add(num_cpus=4)
    (tmp_path / "input.jsonl").write_text("\n".join(json.dumps({"prompt": f"prompt {row}"}) for row in range(600)))
    status = run_ray_batch(
        BatchConfig(input=tmp_path / "input.jsonl", output=output),
        RayOptions(min_replicas=1, max_replicas=2, rows_per_batch=4, batches_per_replica=2),
        EngineConfig(model_path="echo:0.02"),
        launch=launcher(started),
    )
    assert status == 0
    assert len(read_output()[0]) == 600
    assert len(starts(started)) == 2


def test_engines_run_on_what_the_cluster_has(cluster: Nodes) -> None:
    options = RayOptions(cpus_per_replica=4)
    config = EngineConfig(tp_size=4)
    assert replica_resources(config, options) == {"num_cpus": 4}
    cluster.add(num_cpus=1, num_gpus=1)
    assert replica_resources(config, options) == {"num_cpus": 4, "num_gpus": 4}
    cluster.add(num_cpus=1, resources={"TPU": 4})
    assert replica_resources(config, options) == {"num_cpus": 4, "resources": {"TPU": 4}}
    assert replica_resources(config.model_copy(update={"device": Device.CPU}), options) == {"num_cpus": 4}


def test_an_engine_lies_on_one_node(cluster: Nodes) -> None:
    config = EngineConfig(nnodes=2, dist_init_addr="127.0.0.1:1234")
    with pytest.raises(ConfigError, match="nnodes must be 1 with --engine ray, got 2"):
        replica_resources(config, RayOptions())

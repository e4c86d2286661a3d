"""What engines reserve of a cluster, and how many of them there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from helpers.ray_cluster import PATIENT, Nodes, launcher, starts
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.batch.options import BatchConfig
from sglang_jax.batch.ray import Answering, answer_rows
from sglang_jax.batch.ray.group import GroupPlacement, in_order, start_host
from sglang_jax.batch.ray.pipeline import replica_resources
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.batch.ray_options import RayOptions
from sglang_jax.config import Backend, Device, Dtype, EngineConfig, ServerConfig
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
    """The first engine is busy until there is a second one."""
    cluster.add(num_cpus=4)
    prompts = [f"{PATIENT}{row}" for row in range(100)]
    (tmp_path / "input.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    status = run_ray_batch(
        BatchConfig(input=tmp_path / "input.jsonl", output=output),
        RayOptions(min_replicas=1, max_replicas=2, rows_per_batch=4, batches_per_replica=4),
        EngineConfig(model_path="echo"),
        launch=launcher(started),
    )
    assert status == 0
    assert len(read_output()[0]) == 100
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


def test_an_engine_over_two_hosts_has_a_node_each(cluster: Nodes, tmp_path: Path, output: Path, read_output) -> None:
    """Two processes of JAX, one model. Alone it says the same."""
    for _ in range(2):
        cluster.add(num_cpus=2)
    model = make_tiny_checkpoint(tmp_path / "model")
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    (tmp_path / "input.jsonl").write_text(
        "\n".join(json.dumps({"prompt": prompt, **body}) for prompt in ("one", "two three", "four five six"))
    )
    alone = EngineConfig(
        model_path=str(model),
        backend=Backend.JAX,
        device=Device.CPU,
        dtype=Dtype.FLOAT32,
        skip_warmup=True,
        max_total_tokens=512,
        max_running_requests=4,
        compilation_cache_dir=tmp_path / "compiled",
    )
    both = alone.model_copy(update={"nnodes": 2, "tp_size": 2})
    texts = []
    for name, config in (("alone", alone), ("both", both)):
        folder = output.with_name(name)
        options = RayOptions(max_replicas=1, cpus_per_replica=2)
        assert run_ray_batch(BatchConfig(input=tmp_path / "input.jsonl", output=folder), options, config) == 0
        lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
        texts.append({line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def test_hosts_of_a_group_are_those_of_one_tpu_slice_in_its_order(cluster: Nodes) -> None:
    """The hosts of two slices, as Ray describes them; there are no chips."""
    for name in ("first", "second"):
        for worker in reversed(range(2)):
            head = {"TPU-v6e-8-head": 1} if worker == 0 else {}
            labels = {
                "ray.io/tpu-slice-name": name,
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-pod-type": "v6e-8",
                "ray.io/tpu-topology": "2x4",
            }
            machine = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": "v6e-8"}
            resources = {"TPU": 4, **head}
            cluster.add(num_cpus=2, resources=resources, labels=labels, env_vars=machine | {"TPU_TOPOLOGY": "2x4"})
    placement = GroupPlacement(hosts=2, bundle={"CPU": 1, "TPU": 4}, calls=1, tpu_slice=("v6e", "2x4"))
    group = placement.reserve()
    hosts = [start_host(group, number, placement) for number in range(2)]
    where = [ray.get(host.address.remote()).partition(":")[0] for host in in_order(hosts)]
    labels = {node["NodeManagerAddress"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    slices = [(labels[address]["ray.io/tpu-slice-name"], labels[address]["ray.io/tpu-worker-id"]) for address in where]
    assert slices in ([("first", "0"), ("first", "1")], [("second", "0"), ("second", "1")])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"nnodes": 2, "tp_size": 2}, {}, "nnodes 2 needs max_replicas"),
        ({"nnodes": 2, "tp_size": 3}, {"max_replicas": 1}, r"tp_size \(3\) must be a multiple of nnodes \(2\)"),
        ({"nnodes": 2, "tp_size": 8, "device": Device.TPU}, {"max_replicas": 1}, "needs tpu_slice, such as v6e:4x4"),
    ],
)
def test_groups_that_cannot_be_placed_are_refused(cluster: Nodes, config, options, message) -> None:
    answering = Answering(config=ServerConfig(**config))
    with pytest.raises(ConfigError, match=message):
        answer_rows(ray.data.from_items([{"prompt": "a"}]), answering, RayOptions(**options))

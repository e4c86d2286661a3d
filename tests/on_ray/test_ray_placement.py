"""Which resources of a cluster engines reserve, and how many engines there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from helpers.ray_cluster import PATIENT, Nodes, launcher, meanwhile, starts, until
from helpers.tiny_models import make_tiny_checkpoint
from ray import PlacementGroupID
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from sglang_jax.batch.options import BatchConfig, RayOptions, describe_lack_of_nodes
from sglang_jax.batch.ray import Answering, SharedAttempts, answer_rows, nodes
from sglang_jax.batch.ray.nodes import WORKER_LABEL, GroupPlacement, sort_nodes, start_node
from sglang_jax.batch.ray.pipeline import replica_resources, reporting_waits
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.config import Backend, Device, Dtype, EngineConfig, ServerConfig
from sglang_jax.errors import ConfigError

SLICE_LABEL = "ray.io/tpu-slice-name"


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


def test_engines_run_on_the_clusters_devices(cluster: Nodes) -> None:
    options = RayOptions(cpus_per_replica=4)
    config = EngineConfig(tp_size=4)
    assert replica_resources(config, options) == {"num_cpus": 4}
    cluster.add(num_cpus=1, num_gpus=1)
    assert replica_resources(config, options) == {"num_cpus": 4, "num_gpus": 4}
    cluster.add(num_cpus=1, resources={"TPU": 4})
    assert replica_resources(config, options) == {"num_cpus": 4, "resources": {"TPU": 4}}
    assert replica_resources(config.model_copy(update={"device": Device.CPU}), options) == {"num_cpus": 4}


def tiny_engine(folder: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(make_tiny_checkpoint(folder / "model")),
        backend=Backend.JAX,
        device=Device.CPU,
        dtype=Dtype.FLOAT32,
        skip_warmup=True,
        max_total_tokens=512,
        max_running_requests=4,
        compilation_cache_dir=folder / "compiled",
    )


def test_each_process_of_a_two_node_engine_has_its_own_node(cluster: Nodes, tmp_path: Path, output: Path) -> None:
    """Two processes of JAX, one model. One process gives the same output."""
    for _ in range(2):
        cluster.add(num_cpus=2)
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    (tmp_path / "input.jsonl").write_text(
        "\n".join(json.dumps({"prompt": prompt, **body}) for prompt in ("one", "two three", "four five six"))
    )
    alone = tiny_engine(tmp_path)
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


def test_a_two_node_engine_that_loses_one_restarts_on_the_remaining_nodes(
    cluster: Nodes, tmp_path: Path, output: Path, read_output
) -> None:
    """There are three nodes: it can restart only if it holds none of its earlier ones."""
    for _ in range(3):
        cluster.add(num_cpus=2)
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    (tmp_path / "input.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{row}", **body}) for row in range(100)))

    def kill_a_node() -> None:
        [group] = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        cluster.kill(group["bundles_to_node_id"][1])

    with meanwhile(lambda: output.is_dir() and len(list(output.iterdir())) >= 1, kill_a_node):
        status = run_ray_batch(
            BatchConfig(input=tmp_path / "input.jsonl", output=output),
            RayOptions(max_replicas=1, cpus_per_replica=2, rows_per_batch=4, batches_per_replica=2, rows_per_file=4),
            tiny_engine(tmp_path).model_copy(update={"nnodes": 2, "tp_size": 2}),
        )
    answers, errors = read_output()
    assert (status, errors) == (0, [])
    assert len(answers) == 100


def add_slices(cluster: Nodes) -> None:
    """The nodes of two TPU slices as Ray describes them, without chips."""
    for name in ("first", "second"):
        for worker in reversed(range(2)):
            head = {"TPU-v6e-8-head": 1} if worker == 0 else {}
            labels = {
                SLICE_LABEL: name,
                WORKER_LABEL: str(worker),
                "ray.io/tpu-pod-type": "v6e-8",
                "ray.io/tpu-topology": "2x4",
            }
            machine = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": "v6e-8"}
            resources = {"TPU": 4, **head}
            cluster.add(num_cpus=2, resources=resources, labels=labels, env_vars=machine | {"TPU_TOPOLOGY": "2x4"})


@contextmanager
def reserved(placement: GroupPlacement) -> Iterator[PlacementGroup]:
    """Returns all reservations at the end."""
    before = set(placement_group_table())
    yield placement.reserve()
    for one in set(placement_group_table()) - before:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(one))))


def labels_of(group: PlacementGroup) -> list[dict[str, str]]:
    """The labels of its nodes, in any order."""
    of_node = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    return [of_node[node_id] for node_id in placement_group_table(group)["bundles_to_node_id"].values()]


ONE_SLICE = GroupPlacement(nodes=2, bundle={"CPU": 1, "TPU": 4}, calls=1, tpu_slice=("v6e", "2x4"))


def test_a_group_has_the_nodes_of_one_tpu_slice_in_order(cluster: Nodes) -> None:
    add_slices(cluster)
    with reserved(ONE_SLICE) as group:
        nodes = [start_node(group, number, ONE_SLICE) for number in range(2)]
        where = [ray.get(node.address.remote()).partition(":")[0] for node in sort_nodes(nodes)]
    labels = {node["NodeManagerAddress"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    slices = [(labels[address][SLICE_LABEL], labels[address][WORKER_LABEL]) for address in where]
    assert slices in ([("first", "0"), ("first", "1")], [("second", "0"), ("second", "1")])


def test_a_partly_used_tpu_slice_is_not_waited_for(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first node is free, and Ray chooses slices by that node."""
    monkeypatch.setattr(nodes, "RETRY_SECONDS", 1.0)
    add_slices(cluster)
    for used, free in (("first", "second"), ("second", "first")):
        another = placement_group([{"CPU": 2}], bundle_label_selector=[{SLICE_LABEL: used, WORKER_LABEL: "1"}])
        ray.get(another.ready())
        with reserved(ONE_SLICE) as group:
            assert [labels[SLICE_LABEL] for labels in labels_of(group)] == [free, free]
        remove_placement_group(another)
        assert cluster.groups_come_and_gone()


def test_a_run_without_an_engine_logs_it_periodically(cluster: Nodes) -> None:
    told: list[str] = []
    attempts = SharedAttempts()
    with reporting_waits(attempts, {"CPU": 3, "GPU": 1}, 1, told.append, seconds_between=0.1):
        until(lambda: len(told) >= 3)
        node = cluster.add(num_cpus=3, num_gpus=1)
        until(lambda: "It is starting, or other jobs use its nodes" in told[-1])
        with attempts.of("start"):
            pass
        cluster.kill(node)
        until(lambda: told[-1].startswith("Again without an engine"))
    lack = describe_lack_of_nodes({"CPU": 3, "GPU": 1}, 1, 0)
    assert told[0] == f"{lack}: waiting for one."
    assert re.fullmatch(rf"Still without an engine after \d+ s\. {lack}\.", told[1])
    told.clear()
    with reporting_waits(attempts, {"CPU": 3}, 2, told.append):
        pass
    assert told == [f"{describe_lack_of_nodes({'CPU': 3}, 2, 0)}: waiting for them."]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"nnodes": 2, "tp_size": 2}, {}, "nnodes 2 needs --max-replicas"),
        ({"nnodes": 2, "tp_size": 3}, {"max_replicas": 1}, r"tp_size \(3\) must be a multiple of nnodes \(2\)"),
        ({"nnodes": 2, "tp_size": 8, "device": Device.TPU}, {"max_replicas": 1}, "needs --tpu-slice, such as v6e:4x4"),
        (
            {"nnodes": 2, "tp_size": 8, "device": Device.TPU},
            {"max_replicas": 1, "tpu_slice": "v6e:4x4"},
            r"tpu_slice v6e:4x4 has 16 chips, all of which .*: nnodes 2 with 4 each \(tp_size 8\) are 8",
        ),
        (
            {"nnodes": 2, "tp_size": 8, "device": Device.TPU},
            {"max_replicas": 1, "tpu_slice": "v9z:2x4"},
            "tpu_slice v9z:2x4, with 4 of its chips on each node: .*v9z",
        ),
    ],
)
def test_groups_that_cannot_be_placed_are_refused(cluster: Nodes, config, options, message) -> None:
    answering = Answering(config=ServerConfig(**config))
    with pytest.raises(ConfigError, match=message):
        answer_rows(ray.data.from_items([{"prompt": "a"}]), answering, RayOptions(**options))

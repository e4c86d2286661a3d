"""From a cluster and options to a pool of actors, and from files to files through it; what a run says as long as it has
no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.exceptions import RayError
from ray.util.tpu import get_tpu_worker_resources

from sglang_jax.batch.ray.actors import Answering, AnswerLines, AnswerRows, Attempts, SharedAttempts
from sglang_jax.batch.ray.files import RequestFiles
from sglang_jax.batch.ray.nodes import GroupPlacement
from sglang_jax.batch.ray_options import RayOptions, lack_of_nodes
from sglang_jax.config import Device, EngineConfig
from sglang_jax.errors import ConfigError

SECONDS_BETWEEN = 60.0
"""How often a run without an engine says so."""

QUEUED_BATCHES = 2
"""Batches that wait at an actor beside those that it works on, so that it never waits for the driver."""


def answer_rows(
    dataset: Dataset,
    answering: Answering,
    options: RayOptions | None = None,
    *,
    columns: Sequence[str] = (),
) -> Dataset:
    """A dataset of requests with their answers beside them; see `AnswerRows` for the columns it needs and adds.

    Rows are answered when the dataset is consumed. Whatever fails, a row comes out for each that went in.

    **Arguments:** `columns`: further columns that are fields of a row's body, such as `max_tokens`.

    **Raises:** `ConfigError` for devices that cannot be divided among nodes, or nodes that cannot be placed.
    """
    options = options or RayOptions()
    dataset = _in_batches(dataset, options)
    return dataset.map_batches(
        AnswerRows,
        fn_constructor_kwargs={
            "answering": _placed(answering, options),
            "attempts": SharedAttempts(),
            "columns": tuple(columns),
        },
        **pool_of_engines(answering.config, options),
    )


def answer_files(
    requests: RequestFiles, answering: Answering, options: RayOptions, names: Sequence[str], attempts: Attempts
) -> Dataset:
    """A dataset of answers to the lines of files. `names`: see `AnswerLines`. Raises `ConfigError`."""
    dataset = _in_batches(ray.data.read_datasource(requests), options)
    return dataset.map_batches(
        AnswerLines,
        fn_constructor_kwargs={
            "answering": _placed(answering, options),
            "attempts": attempts,
            "files": tuple(names),
        },
        **pool_of_engines(answering.config, options),
    )


def _in_batches(dataset: Dataset, options: RayOptions) -> Dataset:
    """Blocks become batches: what is begun again after a loss is one of them. The pool grows once its actors have work
    for all their threads; by default Ray Data waits until nearly as much again is queued at them, out of reach of
    actors that are still to come."""
    dataset.context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0
    return dataset.repartition(target_num_rows_per_block=options.rows_per_batch)


def pool_of_engines(config: EngineConfig, options: RayOptions) -> dict[str, Any]:
    """Arguments of `map_batches` for a pool of actors with an engine each.

    Several batches are at an actor at once, each in a thread, so that its engine has work while one of them comes to
    its end. Actors that are lost are started again where there is room, and their batches begun again, as Ray Data has
    it by default; `Attempts` limits that.

    **Raises:** `ConfigError` for devices that cannot be divided among nodes, or nodes that cannot be placed.
    """
    return {
        "batch_size": options.rows_per_batch,
        "batch_format": "pyarrow",
        "udf_modifying_row_count": False,
        "compute": ActorPoolStrategy(
            min_size=options.min_replicas,
            max_size=options.max_replicas,
            max_concurrent_calls_per_actor=options.batches_per_replica,
            max_tasks_in_flight_per_actor=options.batches_per_replica + QUEUED_BATCHES,
            enable_true_multi_threading=True,
        ),
        **replica_resources(config, options),
    }


def replica_resources(config: EngineConfig, options: RayOptions) -> dict[str, Any]:
    """What an actor reserves, all of it on one node: a tensor-parallel group's devices lie together. Over several
    nodes it reserves nothing, as the actors of its `MultiNodeEngine` do."""
    if config.nnodes > 1:
        return {"num_cpus": 0}
    needs = node_resources(config, options)
    resources: dict[str, Any] = {"num_cpus": needs.pop("CPU")}
    if "GPU" in needs:
        resources["num_gpus"] = needs.pop("GPU")
    return resources | ({"resources": needs} if needs else {})


def node_resources(config: EngineConfig, options: RayOptions) -> dict[str, float]:
    """What an engine takes of each of its nodes, by Ray's names. With `device` auto it runs on what the cluster has:
    TPUs, or else GPUs, or else CPUs.

    **Raises:** `ConfigError` for devices that cannot be divided among the nodes.
    """
    if config.tp_size % config.nnodes:
        raise ConfigError(f"tp_size ({config.tp_size}) must be a multiple of nnodes ({config.nnodes})")
    needs: dict[str, float] = {"CPU": options.cpus_per_replica}
    device = _device(config.device)
    if device is not Device.CPU:
        needs["GPU" if device is Device.CUDA else "TPU"] = config.tp_size // config.nnodes
    return needs


def _placed(answering: Answering, options: RayOptions) -> Answering:
    """With the placement of an engine over several nodes. Raises `ConfigError`."""
    config = answering.config
    if config.nnodes == 1:
        return answering
    if options.max_replicas is None:
        raise ConfigError(f"nnodes {config.nnodes} needs --max-replicas, the number of such engines")
    needs = node_resources(config, options)
    if "TPU" in needs and options.tpu_slice is None:
        raise ConfigError(f"nnodes {config.nnodes} on TPUs needs --tpu-slice, such as v6e:4x4")
    on_tpus = "TPU" in needs
    return replace(
        answering,
        group=GroupPlacement(
            nodes=config.nnodes,
            bundle=needs,
            calls=options.batches_per_replica + QUEUED_BATCHES,
            tpu_slice=_slice(options.tpu_slice, config) if on_tpus and options.tpu_slice is not None else None,
        ),
    )


def _slice(named: str, config: EngineConfig) -> tuple[str, str]:
    """Its version and topology. Raises `ConfigError` if the engine would not take the whole of it."""
    version, _, topology = named.partition(":")
    chips = config.tp_size // config.nnodes
    try:
        nodes, _ = get_tpu_worker_resources(topology, version, {"TPU": chips}, chips_per_vm=chips)
    except ValueError as error:
        raise ConfigError(f"tpu_slice {named}, with {chips} of its chips on each node: {error}") from error
    if nodes != config.nnodes:
        raise ConfigError(
            f"tpu_slice {named} has {nodes * chips} chips, all of which the engine must take: nnodes {config.nnodes} "
            f"with {chips} each (tp_size {config.tp_size}) are {config.tp_size}"
        )
    return version, topology


def _device(wanted: Device) -> Device:
    if wanted is not Device.AUTO:
        return wanted
    has = ray.cluster_resources()
    return Device.TPU if has.get("TPU") else Device.CUDA if has.get("GPU") else Device.CPU


@contextmanager
def telling_what_is_awaited(
    attempts: SharedAttempts,
    needs: Mapping[str, float],
    nodes: int,
    tell: Callable[[str], None],
    seconds_between: float = SECONDS_BETWEEN,
) -> Iterator[None]:
    """Around a run: tells now and then what it waits for, until its first engine has started, and when no engine has
    room any more, as nodes were lost.

    **Arguments:** `attempts`: those of the run; `needs`, `nodes`: what an engine takes of each of so many nodes.
    """
    if nodes_with(needs) < nodes:
        tell(f"{_lack(needs, nodes)}: waiting for {'one' if nodes == 1 else 'them'}.")
    over = threading.Event()
    begin = time.monotonic()

    def watch() -> None:
        while not over.wait(seconds_between):
            try:
                had_an_engine = attempts.finished() > 0
                short = nodes_with(needs) < nodes
            except RayError:  # the run is about to meet it too
                return
            since = f"after {time.monotonic() - begin:.0f} s"
            if short:
                tell(f"{'Again' if had_an_engine else 'Still'} without an engine {since}. {_lack(needs, nodes)}.")
            elif not had_an_engine:
                tell(f"Still without an engine {since}. It is starting, or other jobs use its nodes.")

    watcher = threading.Thread(target=watch, name="sglang-jax-waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def nodes_with(needs: Mapping[str, float]) -> int:
    """How many nodes of the cluster are large enough, whoever uses them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes)


def _lack(needs: Mapping[str, float], nodes: int) -> str:
    return lack_of_nodes(needs, nodes, nodes_with(needs))

"""Builds the pipeline from files through a pool of actors to answers, and reports while a run has no engine."""

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

from sglang_jax.batch.options import RayOptions, describe_lack_of_nodes
from sglang_jax.batch.ray.actors import Answering, AnswerLines, AnswerRows, Attempts, SharedAttempts
from sglang_jax.batch.ray.files import RequestFiles
from sglang_jax.batch.ray.nodes import GroupPlacement
from sglang_jax.config import Device, EngineConfig
from sglang_jax.errors import ConfigError

SECONDS_BETWEEN = 60.0
"""Seconds between two reports while a run has no engine."""

QUEUED_BATCHES = 2
"""Batches queued at an actor in addition to those in progress, so that it never waits for the driver."""


def answer_rows(
    dataset: Dataset,
    answering: Answering,
    options: RayOptions | None = None,
    *,
    columns: Sequence[str] = (),
) -> Dataset:
    """Adds answers to a dataset of requests; see `AnswerRows` for the columns that it needs and adds. Rows are answered
    when the dataset is consumed. Every input row gives one output row, also after failures. `columns`: further columns
    that are fields of a row's body, such as `max_tokens`. Raises `ConfigError` for devices that cannot be divided among
    nodes, or nodes that cannot be placed."""
    options = options or RayOptions()
    dataset = _split_into_batches(dataset, options)
    return dataset.map_batches(
        AnswerRows,
        fn_constructor_kwargs={
            "answering": _with_placement(answering, options),
            "attempts": SharedAttempts(),
            "columns": tuple(columns),
        },
        **pool_of_engines(answering.config, options),
    )


def answer_files(
    requests: RequestFiles, answering: Answering, options: RayOptions, names: Sequence[str], attempts: Attempts
) -> Dataset:
    """Returns a dataset of answers to the lines of files. `names`: see `AnswerLines`. Raises `ConfigError`."""
    dataset = _split_into_batches(ray.data.read_datasource(requests), options)
    return dataset.map_batches(
        AnswerLines,
        fn_constructor_kwargs={
            "answering": _with_placement(answering, options),
            "attempts": attempts,
            "files": tuple(names),
        },
        **pool_of_engines(answering.config, options),
    )


def _split_into_batches(dataset: Dataset, options: RayOptions) -> Dataset:
    """Splits a dataset into batches, the unit of retries. The pool grows once all threads of its actors have work; by
    default, Ray Data waits until nearly twice as much is queued at them, where new actors cannot take it."""
    dataset.context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0
    return dataset.repartition(target_num_rows_per_block=options.rows_per_batch)


def pool_of_engines(config: EngineConfig, options: RayOptions) -> dict[str, Any]:
    """Returns arguments of `map_batches` for a pool of actors with one engine each. An actor works on several batches
    at once, each in a thread, so that its engine stays busy while a batch ends. By default, Ray Data restarts lost
    actors where there is room, and their batches; `Attempts` limits that. Raises `ConfigError` for devices that cannot
    be divided among nodes, or nodes that cannot be placed."""
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
    """Returns the resources that an actor reserves on one node: a tensor-parallel group's devices must be together. An
    engine over several nodes reserves them in the actors of its `MultiNodeEngine` instead."""
    if config.nnodes > 1:
        return {"num_cpus": 0}
    needs = node_resources(config, options)
    resources: dict[str, Any] = {"num_cpus": needs.pop("CPU")}
    if "GPU" in needs:
        resources["num_gpus"] = needs.pop("GPU")
    return resources | ({"resources": needs} if needs else {})


def node_resources(config: EngineConfig, options: RayOptions) -> dict[str, float]:
    """Returns what an engine takes of each of its nodes, by Ray's names. With `device` auto, it uses the cluster's
    TPUs, or else GPUs, or else CPUs. Raises `ConfigError` for devices that cannot be divided among the nodes."""
    if config.tp_size % config.nnodes:
        raise ConfigError(f"tp_size ({config.tp_size}) must be a multiple of nnodes ({config.nnodes})")
    needs: dict[str, float] = {"CPU": options.cpus_per_replica}
    device = _device(config.device)
    if device is not Device.CPU:
        needs["GPU" if device is Device.CUDA else "TPU"] = config.tp_size // config.nnodes
    return needs


def _with_placement(answering: Answering, options: RayOptions) -> Answering:
    """Adds the placement of an engine over several nodes. Raises `ConfigError`."""
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
            tpu_slice=_parse_slice(options.tpu_slice, config) if on_tpus and options.tpu_slice is not None else None,
        ),
    )


def _parse_slice(named: str, config: EngineConfig) -> tuple[str, str]:
    """Returns a slice's version and topology. Raises `ConfigError` if the engine would not use the whole slice."""
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
def reporting_waits(
    attempts: SharedAttempts,
    needs: Mapping[str, float],
    nodes: int,
    tell: Callable[[str], None],
    seconds_between: float = SECONDS_BETWEEN,
) -> Iterator[None]:
    """While the block runs, reports what the run waits for, until its first engine has started, and again if lost nodes
    leave no room for any engine. `attempts`: those of the run; `needs`, `nodes`: what an engine takes of each of its
    nodes."""
    if nodes_with(needs) < nodes:
        tell(f"{_lack(needs, nodes)}: waiting for {'one' if nodes == 1 else 'them'}.")
    over = threading.Event()
    begin = time.monotonic()

    def watch() -> None:
        while not over.wait(seconds_between):
            try:
                had_an_engine = attempts.finished() > 0
                short = nodes_with(needs) < nodes
            except RayError:  # the run will raise it too
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
    """Counts nodes of the cluster that are large enough, including busy ones."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes)


def _lack(needs: Mapping[str, float], nodes: int) -> str:
    return describe_lack_of_nodes(needs, nodes, nodes_with(needs))

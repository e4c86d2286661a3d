"""Compiles the programs of a JAX runner for a TPU slice without the TPUs, in a separate process: see `tpu.worker`. They
are the runner's own (`jax_runner.programs`), built from shapes, without arrays and weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.config import Dtype, KVCacheDtype, SpeculativeAlgorithm
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.buckets import Bucket, Buckets
from sglang_jax.jax_runner.building import (
    choose_attention,
    group_products,
    kv_dtype_of,
    memory_of_one_device,
    mixed_shapes,
    shards_on_jax,
    state_dtypes_of,
)
from sglang_jax.jax_runner.builds import Executable
from sglang_jax.jax_runner.compiles import use_compilation_cache
from sglang_jax.jax_runner.kv_scales import calibration_inputs, calibration_program
from sglang_jax.jax_runner.model_programs import programs_of, replicated_shapes
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.rounding import describe_rounding, rounding_of
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import make_mesh, named_sharding
from sglang_jax.models import Transformer, build_model, kv_cache_spec
from sglang_jax.runner.assembly import runner_spec
from sglang_jax.runner.determinism import refuse_with_determinism
from sglang_jax.runner.expert_load import refuse_without_experts
from sglang_jax.runner.sizing import (
    choose_sizes,
    describe_pools,
    pages_in_memory,
    refuse_ranks,
    refuse_with_latents,
    refuse_with_states,
)
from tpu.estimate import Estimate
from tpu.figures import CacheEntries, Deployment, Message, Notice, ProgramFailure, ProgramFigures, Request, Selection
from tpu.hlo import collectives_of, find_kernels, take_text
from tpu.operations import Module
from tpu.topologies import Topology

_PLATFORM = "tpu"
CALIBRATION = "calibrate scales"
"""The program that a server with an int8 cache runs once, if the checkpoint has no scales of keys and values."""

Builders = dict[str, Callable[[], Executable]]
Names = dict[str, str]
"""Names of weights, by their names in a program."""


def compile_all(request: Request, dumps: Path, send: Callable[[Message], None]) -> None:
    """Sends the deployment, and then the figures or the failure of each program. Raises `ConfigError` for an invalid
    deployment. `dumps`: the folder to which XLA writes the text of compiled programs. Programs are cached if the
    options name a folder; existing entries cannot be read without a TPU, and are compiled again."""
    logging.getLogger("sglang_jax").addHandler(_Notices(send))
    folder = request.options.compilation_cache_dir
    before = frozenset() if folder is None else _existing_programs(folder)
    devices = _devices(request.topology, request.options.tp_size)
    mesh = make_mesh(devices[: request.options.tp_size], expert=request.options.expert_parts)
    deployment, builders, buckets, names = _deploy(request, mesh)
    send(deployment)
    by_name = {str(bucket): bucket for bucket in buckets}
    for name in deployment.programs:
        send(_compile(name, by_name.get(name), builders[name], dumps, names))
    if folder is not None:
        kept = _entries(folder)
        send(CacheEntries(len(kept), len(kept - before)))


def _existing_programs(folder: str) -> frozenset[str]:
    """Enables the compilation cache in a folder, and returns its existing entries. Raises `ConfigError` if nothing can
    be written there, before compiling for hours."""
    remedy = "choose a writable folder with --write-cache"
    if not use_compilation_cache(folder):
        raise ConfigError(f"no programs can be written to {folder}: {remedy}")
    trial = epath.Path(folder) / ".tpu-check"
    try:
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"no programs can be written to {folder} ({error}): {remedy}") from error
    return _entries(folder)


def _entries(folder: str) -> frozenset[str]:
    """Names of the programs in a folder, as JAX names them."""
    return frozenset(file.name for file in epath.Path(folder).glob("*-cache"))


class _Notices(logging.Handler):
    """Sends each warning once."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._sent: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._sent:
            self._sent.add(text)
            self._send(Notice(text))


def _devices(topology: Topology, count: int) -> list[jax.Device]:
    try:
        found = topologies.get_topology_desc(str(topology), _PLATFORM, **topology.configuration)
        devices = list(found.devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ConfigError(f"libtpu has no topology {topology}: {_first_line(error)}") from error
    if count > topology.devices:
        raise ConfigError(f"tp_size {count} needs {count} devices; {topology} has {topology.devices}")
    return devices


def _deploy(request: Request, mesh: Mesh) -> tuple[Deployment, Builders, Buckets, Names]:
    options, topology = request.options, request.topology
    if options.speculative_algorithm is SpeculativeAlgorithm.DRAFT:
        raise ConfigError(
            "speculative_algorithm draft: tpu.check does not support draft models yet; check each of the two models "
            "separately"
        )
    refuse_with_determinism(options, request.model)
    refuse_with_states(options, request.model)
    refuse_with_latents(options, request.model)
    refuse_ranks(options, request.model)
    refuse_without_experts(options, request.model)
    num_shards = shards_on_jax(options, request.model)
    parallel = TensorParallel.of(request.model, Parallelism.of(options), num_shards)
    dtype = jnp.dtype(jnp.bfloat16 if options.dtype is Dtype.AUTO else options.dtype.value)
    attention = choose_attention(options, mesh.devices.flat[0])
    kv_dtype = kv_dtype_of(options, dtype)
    rounding = rounding_of(options, mesh.devices.flat[0], dtype)
    describe_rounding(options, request.model, request.encodings.get, rounding)
    # What fits into vector memory depends on the chip, which kernels read from the context.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = build_model(
            parallel.config,
            dtype=dtype,
            attention=attention,
            platform=_PLATFORM,
            kv_dtype=kv_dtype,
            encodings=request.encodings.get,
            block_products=group_products(options, dtype, num_shards),
            min_rounded_rows=rounding,
            num_shards=num_shards,
            dp_ranks=options.dp_ranks,
        )
    states, hbm = state_dtypes_of(options, dtype), topology.chip.hbm
    memory = memory_of_one_device(parallel, model, kv_dtype, options.page_size, _PLATFORM, hbm, state_dtypes=states)
    sizes = choose_sizes(options, parallel.config.default_context, memory, parallel.config.longest_context)
    spec = runner_spec(options, request.model, memory, sizes, mixed_shapes(options, sizes))
    pages = pages_in_memory(memory, sizes)
    cache = kv_cache_spec(
        parallel.config,
        kv_dtype,
        pages,
        options.page_size,
        platform=_PLATFORM,
        state_dtypes=states,
        shards_on_device=parallel.shards_on_device,
        ranks=options.dp_ranks,
    )
    programs = programs_of(model, parallel, cache, spec, options, mesh)
    buckets = programs.buckets
    builders = programs.builders()
    if options.kv_cache_dtype is KVCacheDtype.INT8:
        builders[CALIBRATION] = partial(_build_calibration, model, parallel, mesh, dtype, options.page_size)
    names = list(builders)
    deployment = Deployment(
        config=request.model,
        device_kind=mesh.devices.flat[0].device_kind,
        devices=topology.devices,
        box=_box([tuple(device.coords) for device in mesh.devices.flat], topology),
        hbm=memory.available,
        weights=memory.weights,
        page=sum(group.page for group in memory.groups if not group.kind.keeps_states),
        page_size=options.page_size,
        slot=sum(group.page for group in memory.groups if group.kind.keeps_states),
        num_pages=sizes.num_pages[0],
        kv=sum(group.page * count for group, count in zip(memory.groups, pages, strict=True)),
        pools=describe_pools(memory, sizes, options.page_size),
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=sizes.max_context,
        dtype=dtype.name,
        kv_dtype=kv_dtype.name,
        attention=attention.value,
        programs=tuple(_selected(names, buckets, request.selection)),
        all_programs=len(names),
        ranks=options.dp_ranks,
    )
    paths = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model)))
    return deployment, builders, buckets, {f"weights[{number}]": path for number, path in enumerate(paths)}


def _box(coordinates: list[tuple[int, ...]], topology: Topology) -> tuple[int, ...]:
    """The number of chips that a group of devices spans along each axis of the slice."""
    axes = list(zip(*coordinates, strict=True))[: len(topology.shape)]
    return tuple(max(axis) - min(axis) + 1 for axis in axes)


def _build_calibration(
    model: Transformer, parallel: TensorParallel, mesh: Mesh, dtype: jnp.dtype, page_size: int
) -> Executable:
    program, state = calibration_program(model, mesh)
    placed = jax.tree.map(
        lambda weight: weight.replace(
            jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=named_sharding(mesh, weight.axes))
        ),
        state,
        is_leaf=lambda node: isinstance(node, Parameter),
    )
    spec, batch = calibration_inputs(parallel, dtype, page_size, _PLATFORM)
    # Kernels read the mesh from the context.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled: Executable = program.lower(placed, spec.memory(mesh), replicated_shapes(batch, mesh)).compile()
    return compiled


def _selected(names: list[str], buckets: Buckets, selection: Selection) -> list[str]:
    """Steps smallest first, then the rest."""
    steps = [str(bucket) for bucket in buckets]
    others = [name for name in names if name not in steps]
    match selection:
        case Selection.QUICK:
            return [str(buckets.decode[-1]), str(buckets.mixed[-1])]
        case Selection.ENDS:
            ends = (buckets.decode[0], buckets.decode[-1], buckets.mixed[0], buckets.mixed[-1])
            return [*dict.fromkeys(map(str, ends)), *others]
        case Selection.ALL:
            return [*steps, *others]


def _compile(
    name: str, bucket: Bucket | None, build: Callable[[], Executable], dumps: Path, names: Names
) -> ProgramFigures | ProgramFailure:
    start = time.monotonic()
    try:
        program: Any = build()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return ProgramFailure(name, time.monotonic() - start, _first_line(error))
    seconds = time.monotonic() - start
    memory, costs = program.memory_analysis(), program.cost_analysis()
    text = take_text(dumps)
    operations = () if text is None else Module(text).operations()
    return ProgramFigures(
        name=name,
        tokens=bucket.tokens if bucket else 0,
        rows=bucket.rows if bucket else 0,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=costs.get("flops", 0.0),
        accessed=costs.get("bytes accessed", 0.0),
        collectives=None if text is None else collectives_of(operations),
        kernels=None if text is None else find_kernels(text),
        estimate=None if text is None else Estimate.of(operations, names if bucket else {}),
    )


def _first_line(error: BaseException) -> str:
    """The compiler's first lines; the rest is pages of buffers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__

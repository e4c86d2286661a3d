"""From options and a checkpoint to a runner with its weights on the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from sglang_jax.architectures.model_config import cache_groups
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.config import AttentionBackend, EngineConfig, KVCacheDtype, SpeculativeAlgorithm, Warmup
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.block_kernels import block_product, check_block_kernels
from sglang_jax.jax_runner.block_weights import KeptBlocks, blocks_to_keep
from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.compiles import use_compilation_cache
from sglang_jax.jax_runner.devices import available_memory, select_devices, select_dtype
from sglang_jax.jax_runner.kv_scales import LENGTH, ROWS, calibrate_kv_scales, convert_kv_scales
from sglang_jax.jax_runner.model_programs import parameters, programs_of, split_model
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.runner import JaxRunner
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import chip_of
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import make_mesh, partition_spec
from sglang_jax.models import (
    AttentionImplementation,
    StateDtypes,
    Transformer,
    allocate,
    build_model,
    bytes_of_groups,
    kv_cache_spec,
)
from sglang_jax.models.kv_cache import KVCacheSpec
from sglang_jax.models.parameters import matrices_in_8_bits
from sglang_jax.runner.draft_model import open_draft, with_draft
from sglang_jax.runner.expert_load import refuse_without_experts
from sglang_jax.runner.kv_scales import kv_scale_factor
from sglang_jax.runner.plan import RunnerSpec
from sglang_jax.runner.quantization import describe_matrices, encodings_of, quantization_of
from sglang_jax.runner.sizing import (
    GroupMemory,
    Memory,
    Sizes,
    choose_sizes,
    describe_pools,
    pages_in_memory,
    pool_specs,
    refuse_drafts_with_states,
    refuse_with_states,
)

logger = logging.getLogger(__name__)

_ATTENTION = {
    AttentionBackend.XLA: AttentionImplementation.XLA,
    AttentionBackend.PALLAS: AttentionImplementation.PALLAS,
    AttentionBackend.REFERENCE: AttentionImplementation.REFERENCE,
}
_KV_DTYPES = {
    KVCacheDtype.FLOAT8_E4M3: jnp.dtype(jnp.float8_e4m3fn),
    KVCacheDtype.INT8: jnp.dtype(jnp.int8),
}


def load_rank(config: EngineConfig, checkpoint: Checkpoint) -> JaxRunner:
    """A runner on the first `config.tp_size` devices of `config.device`. Sizes are settled before any weight is read.

    **Raises:** `ConfigError` for options that the machine or the model cannot meet, `CheckpointError` for weights that
    the model cannot take.
    """
    use_compilation_cache(config.cache_address())
    refuse_with_states(config, checkpoint.config)
    refuse_without_experts(config, checkpoint.config)
    parallel = TensorParallel.of(checkpoint.config, config.tp_size)
    devices = select_devices(config.device, parallel.size)
    device = devices[0]
    dtype = select_dtype(config.dtype, device)
    mesh = make_mesh(devices)
    attention = choose_attention(config, device)
    if attention.for_tpu:
        refuse_drafts_with_states(config, checkpoint.config, "TPUs")
    kv_dtype = kv_dtype_of(config, dtype)
    platform = device.platform
    quantization = quantization_of(config, checkpoint)
    bare = partial(
        build_model,
        parallel.config,
        dtype=dtype,
        attention=attention,
        platform=platform,
        kv_dtype=kv_dtype,
        encodings=encodings_of(checkpoint, quantization),
    )
    kept = _blocks_to_keep(config, checkpoint, bare, device, dtype)

    def build() -> Transformer:
        built = bare()
        if kept is not None:
            kept.attach(built)
        return built

    model = build()
    draft = _build_draft(config, checkpoint, dtype, attention, platform)
    memory, sizes = _sizes(config, parallel, model, devices, kv_dtype, state_dtypes_of(config, dtype), draft)
    kv_factor = kv_scale_factor(checkpoint, config.kv_cache_dtype)
    cache = kv_cache_spec(
        parallel.config,
        kv_dtype,
        pages_in_memory(memory, sizes)[: len(cache_groups(parallel.config))],
        config.page_size,
        platform=platform,
        state_dtypes=state_dtypes_of(config, dtype),
        count_experts=config.enable_expert_distribution_metrics,
    )
    own_cache = None if draft is None else draft.cache(sizes, config)
    spec = runner_spec(config, memory, sizes, parallel)
    drafting = None if draft is None or own_cache is None else (draft.build(), draft.parallel, own_cache)
    programs = programs_of(build(), parallel, cache, spec, config, mesh, drafting)
    try:
        _begin_building(programs, config, spec)
        _load(model, checkpoint, parallel, mesh, quantization)
        if kept is not None:
            kept.load(model, mesh)
        _fit_kv_scales(config, model, kv_factor, parallel, mesh, dtype)
        _, weights = split_model(model)
        kv = allocate(cache, mesh)
        if draft is not None and own_cache is not None:
            _load(draft.model, draft.checkpoint, draft.parallel, mesh)
            weights, kv = [*weights, *split_model(draft.model)[1]], (*kv, *allocate(own_cache, mesh))
    except BaseException:
        programs.abandon()
        raise
    details = {
        "dtype": dtype.name,
        "kv_cache_dtype": kv_dtype.name,
        "attention": attention.value,
        "tp_size": str(parallel.size),
        **_further_details(config, checkpoint, model),
    }
    counted = tuple(number for number, experts in enumerate(cache.counted) if experts)
    return JaxRunner(programs, weights, kv, spec, details, mesh, counted)


def _further_details(config: EngineConfig, checkpoint: Checkpoint, model: Transformer) -> dict[str, str]:
    """What the runner's report tells of how it was made, where there is something to tell."""
    details = {"compilation_cache": config.cache_address()}
    if (matrices := describe_matrices(checkpoint.config, matrices_in_8_bits(model))) is not None:
        details["weights"] = matrices
    if checkpoint.config.keeps_states:
        details["mamba_ssm_dtype"] = config.mamba_ssm_dtype.value
    if config.speculative_algorithm is SpeculativeAlgorithm.DRAFT:
        details["speculative_draft_model_path"] = str(config.speculative_draft_model_path)
    return details


def _blocks_to_keep(
    config: EngineConfig,
    checkpoint: Checkpoint,
    build: Callable[[], Transformer],
    device: jax.Device,
    dtype: jnp.dtype,
) -> KeptBlocks | None:
    """What is kept in blocks of the model that `build` makes.

    **Raises:** `ConfigError` if it was asked for and cannot be.
    """
    if not config.keep_gguf_blocks:
        return None
    check_block_kernels(device, dtype, config.tp_size)
    if checkpoint.reader is None or not checkpoint.reads_gguf:
        raise ConfigError(f"keep_gguf_blocks: {checkpoint.source.path} is not a GGUF file with weights")
    model = build()
    room = available_memory(device) - sum(_bytes_on_one_device(parameter, 1) for parameter in parameters(model))
    address = config.cache_address()
    product = partial(block_product, cache_folder=None if "://" in address else Path(address))
    return blocks_to_keep(model, checkpoint.config, checkpoint.reader, product, room)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft model without values, `model`, and what makes further ones. Its keys and values are of the type of
    activations, `dtype`."""

    checkpoint: Checkpoint
    parallel: TensorParallel
    build: Callable[[], Transformer]
    model: Transformer
    dtype: jnp.dtype
    platform: str

    def cache(self, sizes: Sizes, config: EngineConfig) -> KVCacheSpec:
        """The last ones of the pages of `sizes` are its own."""
        pages = sizes.num_pages[-len(cache_groups(self.parallel.config)) :]
        return kv_cache_spec(self.parallel.config, self.dtype, pages, config.page_size, platform=self.platform)


def _build_draft(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    attention: AttentionImplementation,
    platform: str,
) -> _Draft | None:
    found = open_draft(config, checkpoint)
    if found is None:
        return None
    parallel = TensorParallel.of(found.config, config.tp_size)
    build = partial(
        build_model,
        parallel.config,
        dtype=dtype,
        attention=attention,
        platform=platform,
        kv_dtype=dtype,
        encodings=encodings_of(found, None),
    )
    return _Draft(found, parallel, build, build(), dtype, platform)


def _begin_building(programs: Programs, config: EngineConfig, spec: RunnerSpec) -> None:
    """While weights are read: what the warm-up will build or, without one, what a runner of one row needs for its first
    answer. What a runner of several rows needs first, only its requests tell."""
    if not config.skip_warmup:
        first_only = config.warmup is Warmup.FIRST and config.nnodes == 1
        programs.begin(programs.needed_first() if first_only else programs.builders())
    elif spec.max_rows == 1:
        programs.begin(programs.of_short_answers())


def choose_attention(config: EngineConfig, device: jax.Device) -> AttentionImplementation:
    """The implementation that the options ask for; `auto` is the kernels for TPU there, and XLA's operations elsewhere.
    With `debug_memory` kernels check addresses.

    **Raises:** `ConfigError` for one, or for another option, that this backend does not have, and for a TPU that the
    kernels do not know.
    """
    on_tpu = device.platform == "tpu"
    backend = config.attention_backend
    if backend is AttentionBackend.AUTO:
        backend = AttentionBackend.PALLAS if on_tpu else AttentionBackend.XLA
    if backend not in _ATTENTION:
        raise ConfigError(
            f"attention_backend {backend.value} needs the torch backend; the JAX backend has auto, "
            f"{', '.join(known.value for known in _ATTENTION)}"
        )
    if backend is AttentionBackend.PALLAS and not on_tpu:
        raise ConfigError(f"attention_backend pallas needs a TPU, the device is a {device.platform}: choose auto")
    if backend is AttentionBackend.PALLAS:
        chip_of(device.device_kind)
        if config.debug_memory:
            return AttentionImplementation.PALLAS_CHECKED
    return _ATTENTION[backend]


def kv_dtype_of(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """The type of keys and values in the cache; `dtype` is that of activations."""
    return _KV_DTYPES.get(config.kv_cache_dtype, dtype)


def state_dtypes_of(config: EngineConfig, dtype: jnp.dtype) -> StateDtypes:
    """The types of recurrent states; `dtype` is that of activations."""
    return StateDtypes(activations=dtype, recurrent=jnp.dtype(config.mamba_ssm_dtype.value))


def _sizes(
    config: EngineConfig,
    parallel: TensorParallel,
    model: Transformer,
    devices: Sequence[jax.Device],
    kv_dtype: jnp.dtype,
    state_dtypes: StateDtypes,
    draft: _Draft | None,
) -> tuple[Memory, Sizes]:
    """By what each device holds of weights and pages, and the device with the least memory."""
    device, count = devices[0], parallel.size
    own = [other for other in devices if other.process_index == jax.process_index()]
    # Devices that are one CPU share its memory.
    available = _least_of_nodes(min(map(available_memory, own)) // (len(own) if device.platform == "cpu" else 1))
    memory = memory_of_one_device(
        parallel, model, kv_dtype, config.page_size, device.platform, available, state_dtypes=state_dtypes
    )
    if draft is not None:
        beside = memory_of_one_device(
            draft.parallel,
            draft.model,
            draft.dtype,
            config.page_size,
            device.platform,
            available,
            state_dtypes=state_dtypes,
        )
        memory = with_draft(memory, beside.weights, beside.groups)
    sizes = choose_sizes(config, parallel.config.default_context, memory, parallel.config.longest_context)
    logger.info(
        "%d x %s: %.0f MiB of weights, %s (%s), %d rows, %d tokens a step",
        count,
        device.device_kind,
        memory.weights / 2**20,
        describe_pools(memory, sizes, config.page_size),
        kv_dtype.name,
        sizes.max_rows,
        sizes.token_budget,
    )
    return memory, sizes


def memory_of_one_device(
    parallel: TensorParallel,
    model: Transformer,
    kv_dtype: jnp.dtype,
    page_size: int,
    platform: str,
    available: int,
    *,
    state_dtypes: StateDtypes,
) -> Memory:
    """What a device has, and what it holds of the weights, of each page and of each slot."""
    sizes = bytes_of_groups(parallel.config, kv_dtype, page_size, platform=platform, state_dtypes=state_dtypes)
    groups = zip(sizes, cache_groups(parallel.config), strict=True)
    return Memory(
        platform=platform,
        available=available,
        weights=sum(_bytes_on_one_device(parameter, parallel.size) for parameter in parameters(model)),
        groups=tuple(GroupMemory(size // parallel.size, group.kind, group.window) for size, group in groups),
    )


def runner_spec(config: EngineConfig, memory: Memory, sizes: Sizes, parallel: TensorParallel) -> RunnerSpec:
    """What a runner of these sizes offers."""
    buckets = Buckets.ladder(sizes.max_rows, sizes.token_budget, config.page_size)
    return RunnerSpec(
        pools=pool_specs(memory, sizes, config.page_size),
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=sizes.max_context,
        vocab_size=parallel.vocab_size,
        mixed_shapes=tuple((bucket.tokens, bucket.rows) for bucket in buckets.mixed),
        max_samples=config.max_samples,
        drafts_with_prompts=False,
        max_drafts=sizes.draft_slots if parallel.config.keeps_states else None,
        prompt_tokens=sizes.prompt_tokens,
    )


def _least_of_nodes(available: int) -> int:
    """All nodes must come to the same sizes."""
    if jax.process_count() == 1:
        return available
    mebibytes = multihost_utils.process_allgather(np.int32(available // 2**20))
    return int(mebibytes.min()) * 2**20


def _bytes_on_one_device(parameter: Parameter, count: int) -> int:
    size = math.prod(parameter.shape) * parameter.dtype.itemsize
    return size // count if "tensor" in partition_spec(parameter.axes) else size


def _load(
    model: Transformer,
    checkpoint: Checkpoint,
    parallel: TensorParallel,
    mesh: Mesh,
    quantization: Quantization | None = None,
) -> None:
    if checkpoint.reader is None:
        from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax  # here: importing Orbax takes a second

        restore_orbax(checkpoint.source.path, model, checkpoint.config, mesh, checkpoint.source.remote)
    else:
        load_weights(model, checkpoint.reader, checkpoint.config, mesh, quantization)
    model.arrange(parallel.size)


def _fit_kv_scales(
    config: EngineConfig,
    model: Transformer,
    factor: float | None,
    parallel: TensorParallel,
    mesh: Mesh,
    dtype: jnp.dtype,
) -> None:
    """Scales for a cache of 8 bits: the checkpoint's, times `factor`. Without these float8 has scales of 1; integers,
    whose steps are the same everywhere, need ones that fit."""
    if factor is not None:
        convert_kv_scales(model, factor)
    if factor is not None or config.kv_cache_dtype is not KVCacheDtype.INT8:
        return
    calibrate_kv_scales(model, parallel, mesh, dtype=dtype, page_size=config.page_size)
    logger.info(
        "Keys and values are stored in int8 with scales calibrated on %d tokens: the checkpoint has none",
        ROWS * LENGTH,
    )

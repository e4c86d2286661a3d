"""Builds a model of shapes on JAX before its weights are read, and chooses devices, dtypes and kernels."""

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
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from sglang_jax.architectures.model_config import ModelConfig, cache_groups
from sglang_jax.architectures.parallelism import ONE_DEVICE, Parallelism
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.config import AttentionBackend, EngineConfig, KVCacheDtype
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.attention_kernels import cpu_attention, missing_for_kernels
from sglang_jax.jax_runner.block_kernels import block_product, missing_for_blocks, unit_for_rounded
from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.devices import available_memory, select_devices, select_dtype
from sglang_jax.jax_runner.model_programs import parameters
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.rounding import describe_rounding, rounding_of
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.kernels.ragged_paged_attention.cpu import (
    CpuAttention,
    CpuAttentions,
    CpuLatents,
    HeadForm,
    LatentForm,
    no_cpu_attention,
)
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import chip_of
from sglang_jax.layers.attention import Attention
from sglang_jax.layers.block_matrix import BLOCK_AXES, BlockProducts, no_blocks
from sglang_jax.layers.grouped_matrix import group_product
from sglang_jax.layers.latent_attention import LatentAttention
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.rounded_rows import MinRoundedRows
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import (
    AttentionImplementation,
    StateDtypes,
    Transformer,
    build_model,
    bytes_of_groups,
    kv_cache_spec,
)
from sglang_jax.models.kv_cache import KVCacheSpec
from sglang_jax.runner.assembly import Models
from sglang_jax.runner.determinism import check_divisible, shards_of
from sglang_jax.runner.quantization import (
    asks_for_blocks,
    encodings_of,
    has_groups,
    keeps_blocks,
    refuse_blocks,
    require_kernels_for_groups,
    rounds_activations,
    wants_blocks,
)
from sglang_jax.runner.sizing import GroupMemory, Memory, Sizes

logger = logging.getLogger(__name__)

_ATTENTION = {
    AttentionBackend.XLA: AttentionImplementation.XLA,
    AttentionBackend.PALLAS: AttentionImplementation.PALLAS,
    AttentionBackend.NUMBA: AttentionImplementation.XLA,  # of layers that its kernels do not support
    AttentionBackend.REFERENCE: AttentionImplementation.REFERENCE,
}

_MOST_DEVICES_IN_ANY_ORDER = 2
"""Devices whose sum is the same in any order."""

_FIXED = {
    AttentionBackend.XLA: AttentionImplementation.XLA_FIXED,
    AttentionBackend.PALLAS: AttentionImplementation.PALLAS_FIXED,
}
"""The same for results that do not depend on the batch."""
_KV_DTYPES = {
    KVCacheDtype.FLOAT8_E4M3: jnp.dtype(jnp.float8_e4m3fn),
    KVCacheDtype.INT8: jnp.dtype(jnp.int8),
}


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model of shapes over the devices of `parallel`, with the dtype of keys and values. `build` creates another
    one."""

    checkpoint: Checkpoint
    quantization: Quantization | None
    parallel: TensorParallel
    kv_dtype: jnp.dtype
    build: Callable[[], Transformer]
    model: Transformer

    def load(self, mesh: Mesh) -> None:
        """Loads the weights of `model`, and changes them to the layout that it computes with. Raises `CheckpointError`
        for weights that do not fit the model."""
        if self.checkpoint.reader is None:
            from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax  # here: importing it takes a second

            source = self.checkpoint.source
            restore_orbax(source.path, self.model, self.checkpoint.config, mesh, source.remote)
        else:
            load_weights(self.model, self.checkpoint.reader, self.checkpoint.config, mesh, self.quantization)
        self.model.repack(self.parallel.size)


@dataclass(frozen=True, slots=True)
class JaxBackend:
    """The devices, dtypes and kernels of a runner: see `runner.assembly.Backend`. `dtype`: of activations."""

    config: EngineConfig
    devices: Sequence[jax.Device]
    mesh: Mesh
    dtype: jnp.dtype
    attention: AttentionImplementation
    num_shards: int | None

    @classmethod
    def choose(cls, config: EngineConfig, models: Models) -> JaxBackend:
        """Chooses the first `config.tp_size` devices of `config.device`, and dtypes and kernels for them. Raises
        `ConfigError` for options that the models or the machine do not support."""
        num_shards = shards_on_jax(config, models.main.config)
        for each in models.all:
            TensorParallel.of(each.config, Parallelism.of(config))  # refuses what cannot be sharded, on any machine
        devices = select_devices(config.device, config.tp_size)
        attention = choose_attention(config, devices[0])
        dtype = select_dtype(config.dtype, devices[0])
        return cls(config, devices, make_mesh(devices, expert=config.expert_parts), dtype, attention, num_shards)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def kv_dtype(self) -> jnp.dtype:
        return kv_dtype_of(self.config, self.dtype)

    @property
    def place(self) -> str:
        return f"{self.dtype.name} on {len(self.devices)} x {self.devices[0].device_kind}, KV in {self.kv_dtype.name}"

    def build(self, models: Models) -> UnloadedModel:
        parallel = TensorParallel.of(models.main.config, Parallelism.of(self.config), self.num_shards)
        build = self._builder(parallel, models.main, models.quantization, self.kv_dtype)
        encodings = encodings_of(models.main, models.quantization)
        describe_rounding(self.config, models.main.config, encodings, self._rounding)
        products = _block_products(self.config, models.main, build, self.devices[0], self.dtype, self.num_shards)
        if products is no_blocks:
            needed = "a TPU and bfloat16, or one CPU device with numba and activations rounded to int8"
            require_kernels_for_groups(self.config, needed)
        build = partial(build, block_products=products)
        return UnloadedModel(models.main, models.quantization, parallel, self.kv_dtype, build, build())

    def build_draft(self, draft: Checkpoint) -> UnloadedModel:
        parallel = TensorParallel.of(draft.config, Parallelism.of(self.config))
        build = self._builder(parallel, draft, None, self.dtype)
        return UnloadedModel(draft, None, parallel, self.dtype, build, build())

    @property
    def _rounding(self) -> MinRoundedRows:
        return rounding_of(self.config, self.devices[0], self.dtype)

    def _builder(
        self, parallel: TensorParallel, checkpoint: Checkpoint, quantization: Quantization | None, kv_dtype: jnp.dtype
    ) -> Callable[..., Transformer]:
        return partial(
            build_model,
            parallel.config,
            dtype=self.dtype,
            attention=self.attention,
            platform=self.platform,
            kv_dtype=kv_dtype,
            cpu_attention=_cpu_attentions(self.config, parallel, self.devices[0], kv_dtype),
            encodings=encodings_of(checkpoint, quantization),
            min_rounded_rows=self._rounding,
            num_shards=parallel.num_shards,
            dp_ranks=self.config.dp_ranks,
        )

    def available(self) -> int:
        """Free bytes of the node with the least memory, per device. Devices that are one CPU share its memory."""
        own = [device for device in self.devices if device.process_index == jax.process_index()]
        return _least_of_nodes(min(map(available_memory, own)) // (len(own) if self.platform == "cpu" else 1))

    def attention_of(self, model: UnloadedModel) -> str:
        """The attention backend that computes a model."""
        layers = (module for _, module in nnx.iter_modules(model.model))
        by_kernels = any(isinstance(each, Attention | LatentAttention) and each.kernels is not None for each in layers)
        return AttentionBackend.NUMBA.value if by_kernels else self.attention.value

    def weights_of(self, model: UnloadedModel) -> int:
        return _bytes_of_weights(model.model, model.parallel.over)

    def groups_of(self, model: UnloadedModel) -> tuple[GroupMemory, ...]:
        states = state_dtypes_of(self.config, self.dtype)
        return _groups(model.parallel, model.kv_dtype, self.config.page_size, self.platform, states)

    def mixed_shapes(self, sizes: Sizes) -> tuple[tuple[int, int], ...]:
        return mixed_shapes(self.config, sizes)

    def cache(self, model: UnloadedModel, pages: tuple[int, ...], *, count_experts: bool = False) -> KVCacheSpec:
        return kv_cache_spec(
            model.parallel.config,
            model.kv_dtype,
            pages,
            self.config.page_size,
            platform=self.platform,
            state_dtypes=state_dtypes_of(self.config, self.dtype),
            count_experts=count_experts,
            shards_on_device=model.parallel.shards_on_device,
            ranks=self.config.dp_ranks,
        )


def group_products(config: EngineConfig, dtype: jnp.dtype, num_shards: int | None) -> BlockProducts:
    """The kernels for matrices in groups on TPUs; none for other dtypes than bfloat16, and for layers in shards."""
    if dtype != jnp.bfloat16 or num_shards is not None:
        return no_blocks
    return partial(group_product, over=Parallelism.of(config))


def _block_products(
    config: EngineConfig,
    checkpoint: Checkpoint,
    build: Callable[..., Transformer],
    device: jax.Device,
    dtype: jnp.dtype,
    num_shards: int | None,
) -> BlockProducts:
    """The kernels for matrices in groups on TPUs. On CPUs, those for matrices that are also kept in blocks, of the
    model that `build` creates; none if the blocks would take too much memory. Raises `ConfigError` if the options ask
    for blocks that are not supported."""
    if device.platform == "tpu" and has_groups(config, checkpoint) and not asks_for_blocks(config):
        return group_products(config, dtype, num_shards)
    if not wants_blocks(config, checkpoint):
        return no_blocks
    rounded = rounds_activations(config)
    if (missing := missing_for_blocks(device, dtype, config.tp_size, rounded=rounded)) is not None:
        refuse_blocks(config, checkpoint, missing)
        return no_blocks
    unit = unit_for_rounded() if rounded else None
    products = partial(block_product, cache_folder=_kernel_folder(config), unit=unit, dtype=dtype.name)
    if unit is not None:
        return products
    sizes = [
        (set(BLOCK_AXES) & set(parameter.axes), _bytes_on_one_device(parameter, ONE_DEVICE))
        for parameter in parameters(build(block_products=products))
    ]
    needed = sum(size for in_blocks, size in sizes if in_blocks)
    room = available_memory(device) - sum(size for in_blocks, size in sizes if not in_blocks)
    return products if keeps_blocks(needed, room) else no_blocks


def _cpu_attentions(
    config: EngineConfig, parallel: TensorParallel, device: jax.Device, kv_dtype: jnp.dtype
) -> CpuAttentions:
    """The kernels of a model's attention on a CPU; none, with a log line, if they do not support the model or the
    machine, and for another attention backend. Raises `ConfigError` for the latter if the options ask for them."""
    wanted = config.attention_backend
    if device.platform != "cpu" or wanted not in (AttentionBackend.AUTO, AttentionBackend.NUMBA):
        return no_cpu_attention
    if not parallel.config.attention:
        return no_cpu_attention
    missing = missing_for_kernels(kv_dtype, parallel, fixed=config.batch_invariant)
    if missing is not None:
        if wanted is AttentionBackend.NUMBA:
            raise ConfigError(f"attention_backend numba needs {missing}: choose xla, or auto")
        logger.info("XLA's operations compute attention: CPU kernels need %s", missing)
        return no_cpu_attention
    find = partial(cpu_attention, kv_dtype=kv_dtype, cache_folder=_kernel_folder(config))
    return find if wanted is AttentionBackend.AUTO else partial(_required, find)


def _required(find: CpuAttentions, form: HeadForm | LatentForm) -> CpuAttention | CpuLatents:
    found = find(form)
    if found is None:
        raise ConfigError("attention_backend numba has no kernels, the log says why: choose xla, or auto")
    return found


def _kernel_folder(config: EngineConfig) -> Path | None:
    """Where machine code of CPU kernels is cached, if not in a bucket."""
    address = config.cache_address()
    return None if "://" in address else Path(address)


def shards_on_jax(config: EngineConfig, model: ModelConfig) -> int | None:
    """The number of shards in which a model is computed: that of `shards_of`; one for each device if the order of the
    compiler's sums over devices could depend on a token's place; else None. Raises `ConfigError` for options that
    shards do not support."""
    found = shards_of(config, model)
    if found is None and config.batch_invariant and config.tp_size > _MOST_DEVICES_IN_ANY_ORDER:
        found = config.tp_size
        check_divisible(config, model, found)
    if found is None:
        return None
    if asks_for_blocks(config):
        raise ConfigError(
            "keep_gguf_blocks and cpu_activations int8 do not support deterministic tp on the JAX backend: remove them"
        )
    if config.kv_cache_dtype is KVCacheDtype.INT8:
        raise ConfigError("kv_cache_dtype int8 does not support deterministic tp on the JAX backend: choose auto")
    return found


def choose_attention(config: EngineConfig, device: jax.Device) -> AttentionImplementation:
    """The attention implementation of the options; `auto` is the Pallas kernels on a TPU, and XLA's operations
    elsewhere (which kernels may replace on a CPU). With `debug_memory`, kernels check addresses. Raises `ConfigError`
    for an implementation that this backend or the device does not support, and for a TPU that the kernels do not
    support."""
    on_tpu = device.platform == "tpu"
    backend = config.attention_backend
    if backend is AttentionBackend.AUTO:
        backend = AttentionBackend.PALLAS if on_tpu else AttentionBackend.XLA
    if backend not in _ATTENTION:
        raise ConfigError(
            f"attention_backend {backend.value} needs the torch backend; the JAX backend has auto, "
            f"{', '.join(known.value for known in _ATTENTION)}"
        )
    if backend is AttentionBackend.NUMBA and device.platform != "cpu":
        raise ConfigError(f"attention_backend numba needs a CPU, the device is a {device.platform}: choose auto")
    if backend is AttentionBackend.PALLAS and not on_tpu:
        raise ConfigError(f"attention_backend pallas needs a TPU, the device is a {device.platform}: choose auto")
    if backend is AttentionBackend.PALLAS:
        chip_of(device.device_kind)
    fixed = config.batch_invariant
    if fixed and backend not in _FIXED:
        raise ConfigError(
            f"attention_backend {backend.value} may depend on the batch, which {config.determinism_option} "
            "excludes: choose auto"
        )
    if backend is AttentionBackend.PALLAS and config.debug_memory:
        return AttentionImplementation.PALLAS_FIXED_CHECKED if fixed else AttentionImplementation.PALLAS_CHECKED
    return (_FIXED if fixed else _ATTENTION)[backend]


def kv_dtype_of(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values in the cache, from that of activations."""
    return _KV_DTYPES.get(config.kv_cache_dtype, dtype)


def state_dtypes_of(config: EngineConfig, dtype: jnp.dtype) -> StateDtypes:
    return StateDtypes(activations=dtype, recurrent=jnp.dtype(config.mamba_ssm_dtype.value))


def mixed_shapes(config: EngineConfig, sizes: Sizes) -> tuple[tuple[int, int], ...]:
    buckets = Buckets.ladder(sizes.max_rows, sizes.token_budget, config.page_size)
    return tuple((bucket.tokens, bucket.rows) for bucket in buckets.mixed)


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
    return Memory(
        platform=platform,
        available=available,
        weights=_bytes_of_weights(model, parallel.over),
        groups=_groups(parallel, kv_dtype, page_size, platform, state_dtypes),
    )


def _groups(
    parallel: TensorParallel, kv_dtype: jnp.dtype, page_size: int, platform: str, state_dtypes: StateDtypes
) -> tuple[GroupMemory, ...]:
    sizes = bytes_of_groups(
        parallel.config,
        kv_dtype,
        page_size,
        platform=platform,
        state_dtypes=state_dtypes,
        devices=parallel.size,
        shards_on_device=parallel.shards_on_device,
    )
    groups = zip(sizes, cache_groups(parallel.config), strict=True)
    return tuple(GroupMemory(group.name, size, group.kind, group.window) for size, group in groups)


def _least_of_nodes(available: int) -> int:
    """The least memory of all nodes in whole MiB, so that all choose the same sizes."""
    if jax.process_count() == 1:
        return available
    mebibytes = multihost_utils.process_allgather(np.int32(available // 2**20))
    return int(mebibytes.min()) * 2**20


def _bytes_on_one_device(parameter: Parameter, over: Parallelism) -> int:
    bits = 4 if parameter.dtype == jnp.int4 else 8 * parameter.dtype.itemsize
    return math.prod(parameter.shape) * bits // 8 // math.prod(map(over.parts, parameter.axes))


def _bytes_of_weights(model: Transformer, over: Parallelism) -> int:
    """Bytes of the weights on one device, with matrices in blocks and groups as their kernels read them."""
    packed = nnx.clone(model)
    packed.pack()
    return sum(_bytes_on_one_device(parameter, over) for parameter in parameters(packed))

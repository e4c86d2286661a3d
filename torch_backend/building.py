"""Builds models on Torch without weights: chooses kernels and dtypes, and shards the model by rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.model_config import CacheGroup, cache_groups
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import Checkpoint, ModelConfig
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.config import AttentionBackend, Dtype, EngineConfig, KVCacheDtype, MambaDtype
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.assembly import Models
from sglang_jax.runner.determinism import shards_of
from sglang_jax.runner.quantization import (
    asks_for_blocks,
    encodings_of,
    has_groups,
    keeps_blocks,
    matrices_in_bfloat16,
    only_bfloat16,
    only_blocks,
    refuse_blocks,
    require_kernels_for_groups,
    rounds_activations,
    wants_blocks,
)
from sglang_jax.runner.sizing import GroupMemory, Sizes
from torch_backend.cpu_trial import CpuForm
from torch_backend.devices import available_memory, select_dtype, widens_bfloat16
from torch_backend.kernel_choice import Kernels, choose_kernels, refuse_sinks
from torch_backend.kv_pages import KVForm, StateDtypes
from torch_backend.layers.bfloat16 import Bfloat16Weights
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.shard import ModelShard
from torch_backend.models import Transformer, build_model
from torch_backend.parallel import TensorParallel
from torch_backend.process_group import share_cores
from torch_backend.weights import bytes_in_blocks, load_weights, matrices_as_stored, packs, weight_bytes

if TYPE_CHECKING:
    from torch_backend.compilation.traced_model import TracedTransformer
    from torch_backend.cpu_kernels.recording import RecordedLayers

_STATE_DTYPES = {MambaDtype.FLOAT32: torch.float32, MambaDtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A rank's shards of a model before its weights are loaded, with the dtypes of its keys and values, the bytes that
    the weights will take, and the matrices that stay in memory as stored, with their dtype. `in_shards`: whether shards
    are computed one by one, even if the rank has only one."""

    config: ModelConfig
    shards: tuple[ModelShard, ...]
    kv_form: KVForm
    model: Transformer | TracedTransformer
    weight_bytes: int
    load: Callable[[], None]
    as_stored: Mapping[ParameterName, str] = field(default_factory=dict)
    in_shards: bool = False


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """The device of a rank, its dtypes and its kernels: see `runner.assembly.Backend`. `dtype`: of activations;
    `num_shards`: see `build_model`."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    kv_form: KVForm
    kernels: Kernels
    parallel: TensorParallel
    num_shards: int | None

    @classmethod
    def choose(
        cls, config: EngineConfig, models: Models, device: torch.device, parallel: TensorParallel
    ) -> TorchBackend:
        """Chooses dtypes and kernels for the models on a device. Raises `ConfigError` for options that it does not
        support."""
        if config.enable_dp_attention:
            raise ConfigError("enable_dp_attention is not supported by the torch backend yet: choose --backend jax")
        if config.batch_invariant and device.type != "cpu":
            _refuse_experts(config, models.main.config)
        dtype = select_dtype(config.dtype, device)
        kv_form = kv_form_of(config, dtype)
        num_shards = shards_of(config, models.main.config)
        size = parallel.size if num_shards is None else num_shards
        # As many threads as with one process per shard: a library's sums may depend on their number.
        share_cores(size, device)
        parts = config.expert_parts
        sizes = [(models.main.config, size), *((draft.config, parallel.size) for draft in models.all[1:])]
        shards = [(each, ModelShard.of(each, 0, Parallelism(own, parts))) for each, own in sizes]
        heads = dict.fromkeys(form for each, shard in shards for form in shard.head_forms(each))
        rounds = rounds_activations(config)
        latents = any(each.config.keeps_latents for each in models.all)
        by_kernels = all(layer.attention is not None for layer in models.main.config.layers) and not latents
        stay = _bfloat16_of(config, device, models.main, models.quantization)
        alone = by_kernels and len(models.all) == 1
        own_threads = alone and _only_kernels(config, models.main, models.quantization, stay)
        vectors = tuple(dict.fromkeys(form for each, shard in shards for form in shard.latent_forms(each)))
        form = CpuForm(dtype, kv_form.keys, tuple(heads), rounds, bool(stay), own_threads, vectors)
        kernels = choose_kernels(
            config.attention_backend,
            device,
            form,
            config.cache_folder(),
            latents=latents,
            fixed=config.batch_invariant,
        )
        return cls(config, device, dtype, kv_form, kernels, parallel, num_shards)

    @property
    def platform(self) -> str:
        return self.device.type

    @property
    def place(self) -> str:
        return f"{dtype_name(self.dtype)} on {self.device}, KV in {self.kv_form.name}"

    @property
    def state_dtypes(self) -> StateDtypes:
        return StateDtypes(self.dtype, _STATE_DTYPES[self.config.mamba_ssm_dtype])

    def build(self, models: Models) -> UnloadedModel:
        """See `Backend`. Builds this project's model, or that of transformers."""
        checkpoint, quantization = models.main, models.quantization
        if checkpoint.transformers_config is not None:
            return self._build_traced(checkpoint)
        if self.kernels.threads is not None:
            # If kernels multiply all matrices, what is left for torch's operations is small, and waiting for all of
            # their threads is not, if other processes use the cores. Other weights may replace them later.
            stay = self._bfloat16_weights(checkpoint, quantization)
            alone = _only_kernels(self.config, checkpoint, quantization, () if stay is None else stay.names)
            torch.set_num_threads(1 if alone else self.kernels.threads.size)
        build = self._builder(checkpoint, quantization, self.num_shards)
        grouped = self._keeps_groups and has_groups(self.config, checkpoint)
        blocks = _block_matrices(self.config, checkpoint, build, self.kernels, grouped=grouped)
        if not grouped and (blocks is None or not blocks.serves_all_rows):
            require_kernels_for_groups(self.config, "a GPU, or a CPU with numba and activations rounded to int8")
        model = build(block_matrices=blocks)
        return self._unloaded(checkpoint, quantization, self.kv_form, model, in_shards=self.num_shards is not None)

    def build_draft(self, draft: Checkpoint) -> UnloadedModel:
        """See `Backend`. Raises `CheckpointError` for an Orbax checkpoint."""
        refuse_orbax(draft)
        model = self._builder(draft, None, None)()
        return self._unloaded(draft, None, KVForm(self.dtype, self.dtype), model, in_shards=False)

    def _builder(
        self, checkpoint: Checkpoint, quantization: Quantization | None, num_shards: int | None
    ) -> Callable[..., Transformer]:
        return partial(
            build_model,
            checkpoint.config,
            dtype=self.dtype,
            device=self.device,
            operations=self.kernels.operations,
            attention=self.kernels.attention,
            states=self.kernels.states,
            parallel=self.parallel,
            encodings=encodings_of(checkpoint, quantization),
            keeps_groups=self._keeps_groups,
            bfloat16=self._bfloat16_weights(checkpoint, quantization),
            fixed=self.config.batch_invariant,
            num_shards=num_shards,
            expert_parts=self.config.expert_parts,
            recordings=self._recordings(),
        )

    def _bfloat16_weights(self, checkpoint: Checkpoint, quantization: Quantization | None) -> Bfloat16Weights | None:
        if self.kernels.bfloat16 is None:
            return None
        names = _bfloat16_of(self.config, self.device, checkpoint, quantization)
        return Bfloat16Weights(names, self.kernels.bfloat16)

    @property
    def _keeps_groups(self) -> bool:
        """A GPU multiplies matrices in groups, in an order that may depend on the step."""
        return self.device.type == "cuda" and not self.config.batch_invariant

    def _recordings(self) -> RecordedLayers | None:
        """None where layers do more than call kernels that can be recorded."""
        several = self.parallel.size > 1 or self.num_shards is not None
        if self.kernels.threads is None or several or self.config.disable_cuda_graph:
            return None
        from torch_backend.cpu_kernels.recording import RecordedLayers

        return RecordedLayers(self.kernels.threads)

    def _unloaded(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization | None,
        kv_form: KVForm,
        model: Transformer,
        *,
        in_shards: bool,
    ) -> UnloadedModel:
        config, reader = checkpoint.config, checkpoint.reader
        assert reader is not None
        refuse_sinks(self.kernels.attention_name, model.layers_with_sinks)

        def load() -> None:
            layout = load_weights(model, reader, config, quantization=quantization)
            with torch.inference_mode():
                if model.fixed:
                    model.fix_rows(layout)
                elif layout is not None:
                    layout.measure()

        as_stored = matrices_as_stored(model, config)
        size = weight_bytes(model)
        return UnloadedModel(config, model.shards, kv_form, model, size, load, as_stored, in_shards=in_shards)

    def _build_traced(self, checkpoint: Checkpoint) -> UnloadedModel:
        # Imported here, because only these models need the transformers library.
        from torch_backend.compilation.building import build_traced

        model, read = build_traced(
            self.config,
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            operations=self.kernels.operations,
            attention=self.kernels.attention,
            parallel=self.parallel,
        )
        refuse_sinks(self.kernels.attention_name, model.layers_with_sinks)
        shard = ModelShard.of(checkpoint.config, self.parallel.rank, Parallelism.of(self.config))
        size, load = model.weight_bytes(), partial(model.load, read)
        return UnloadedModel(checkpoint.config, (shard,), self.kv_form, model, size, load)

    def available(self) -> int:
        """See `Backend`. The minimum of all ranks; processes on one CPU share its memory."""
        least = self.parallel.minimum(available_memory(self.device))
        return least // (self.parallel.size if self.device.type == "cpu" else 1)

    def weights_of(self, model: UnloadedModel) -> int:
        return -self.parallel.minimum(-model.weight_bytes)

    def groups_of(self, model: UnloadedModel) -> tuple[GroupMemory, ...]:
        groups = cache_groups(model.config)
        return tuple(
            GroupMemory(group.name, self._bytes_of_one(model, group), group.kind, group.window) for group in groups
        )

    def _bytes_of_one(self, model: UnloadedModel, group: CacheGroup) -> int:
        """Bytes of a page, or of a state slot."""
        layers = [model.config.layers[number] for number in group.layers]
        if group.kind.keeps_states:
            own = [layer.recurrent for layer in layers if layer.recurrent is not None]
            return sum(
                self.state_dtypes.bytes_of_slot(shard.recurrent(each).state) for shard in model.shards for each in own
            )
        attention = layers[0].attention
        assert attention is not None
        pools = len({shard.heads_of_pages(attention.cached) for shard in model.shards})
        of_layer = pools * model.kv_form.bytes_per_token(model.shards[0].cached(attention.cached))
        return self.config.page_size * len(layers) * of_layer

    def mixed_shapes(self, sizes: Sizes) -> tuple[tuple[int, int], ...]:
        """See `Backend`. Steps are not padded."""
        return ()


def _refuse_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for a model with experts, whose products on a GPU are a library's."""
    if any(layer.num_experts for layer in model.layers):
        raise ConfigError(
            f"{config.determinism_option} does not support experts on a GPU: the library that multiplies them may "
            "round by the batch"
        )


def kv_form_of(config: EngineConfig, dtype: torch.dtype) -> KVForm:
    """The dtypes of stored keys and values; `dtype` is that of activations. Raises `ConfigError` for float8 keys with
    an attention backend that needs int8 keys."""
    integers = config.attention_backend is AttentionBackend.SAGE
    match config.kv_cache_dtype:
        case KVCacheDtype.INT8:
            return KVForm(torch.int8, torch.int8)
        case KVCacheDtype.FLOAT8_E4M3 if integers:
            raise ConfigError(
                "attention_backend sage stores keys in int8: kv_cache_dtype must be auto or int8, got fp8_e4m3"
            )
        case KVCacheDtype.FLOAT8_E4M3:
            return KVForm(torch.float8_e4m3fn, torch.float8_e4m3fn)
        case _:
            return KVForm(torch.int8 if integers else dtype, dtype)


def _bfloat16_of(
    config: EngineConfig, device: torch.device, checkpoint: Checkpoint, quantization: Quantization | None
) -> frozenset[ParameterName]:
    """The matrices of a checkpoint that should stay in bfloat16, in a model that computes in float32: the dtype is not
    the user's choice, but that of the device."""
    if config.dtype is not Dtype.AUTO or not widens_bfloat16(device):
        return frozenset()
    return matrices_in_bfloat16(checkpoint, quantization)


def _only_kernels(
    config: EngineConfig, checkpoint: Checkpoint, quantization: Quantization | None, stay: Collection[ParameterName]
) -> bool:
    """Whether kernels with their own threads multiply all matrices of a model, those that `stay` in bfloat16 or those
    in blocks."""
    if only_bfloat16(checkpoint.config, stay):
        return not config.batch_invariant
    return rounds_activations(config) and only_blocks(checkpoint, quantization)


def _block_matrices(
    config: EngineConfig, checkpoint: Checkpoint, build: Callable[..., Transformer], kernels: Kernels, *, grouped: bool
) -> BlockMatrices | None:
    """The kernels for matrices that keep their GGUF blocks, for the model that `build` makes; None if memory is too
    small for blocks besides widened matrices. `grouped`: its matrices stay in groups without these kernels. Raises
    `ConfigError` if blocks were asked for and cannot be kept."""
    if not wants_blocks(config, checkpoint):
        return None
    if kernels.block_matrices is None:
        if asks_for_blocks(config) or not grouped:
            refuse_blocks(
                config, checkpoint, "a CPU, numba, and activations in bfloat16 with avx512_bf16, or rounded to int8"
            )
        return None
    if kernels.block_matrices.serves_all_rows:
        return kernels.block_matrices
    model = build(block_matrices=kernels.block_matrices)
    needed = bytes_in_blocks(model)
    room = available_memory(model.device) - (weight_bytes(model) - needed)
    return kernels.block_matrices if packs(model) and keeps_blocks(needed, room) else None


def refuse_orbax(checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` for an Orbax checkpoint, whose weights only JAX restores."""
    if checkpoint.reader is None and checkpoint.transformers_config is None:
        raise CheckpointError(
            f"{checkpoint.source.address} is an Orbax checkpoint, which only the JAX backend restores: "
            "choose --backend jax, or give the checkpoint that it was converted from"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""From options and a checkpoint to a runner with its weights on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.model_config import CacheGroup, CacheKind, cache_groups, group_of_layers
from sglang_jax.architectures.tensor_names import Kind
from sglang_jax.checkpoint import Checkpoint, ModelConfig
from sglang_jax.config import AttentionBackend, EngineConfig, KVCacheDtype, MambaDtype
from sglang_jax.errors import CheckpointError, ConfigError
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
    refuse_with_states,
)
from torch_backend.batch import ForwardBatch
from torch_backend.block_weights import KeptMatrix, matrices_to_keep, measure_forms
from torch_backend.cpu_trial import CpuForm
from torch_backend.devices import available_memory, select_device, select_dtype
from torch_backend.graphs import Bucket, CudaCapture, mixed_buckets, row_buckets
from torch_backend.kernel_choice import Kernels, choose_kernels, refuse_sinks
from torch_backend.key_means import give_key_means
from torch_backend.kv_pages import KVForm, KVPages, LayerMemory, StateDtypes
from torch_backend.layers.layout import PackedAndBlocks
from torch_backend.layers.shard import ModelShard
from torch_backend.models import Transformer, build_model
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.runner import DraftPart, TorchRunner
from torch_backend.streams import CpuThread, CudaStream, Stream
from torch_backend.weights import load_kv_parameters, load_weights, matrices_in_8_bits, weight_bytes
from torch_backend.weights import weight_bytes as weight_bytes_of

if TYPE_CHECKING:
    from torch_backend.compilation.traced_model import TracedTransformer

logger = logging.getLogger(__name__)

_MOST_CAPTURED_ROWS = 256
_STATE_DTYPES = {MambaDtype.FLOAT32: torch.float32, MambaDtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PagedTransformer:
    """A loaded model with its KV pages and states: the runner's `Model`."""

    transformer: Transformer | TracedTransformer
    kv: Sequence[LayerMemory]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states `[T, hidden]`."""
        hidden: torch.Tensor = self.transformer(batch, self.kv)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[m, vocab]`."""
        return self.transformer.logits(hidden)


def load_rank(config: EngineConfig, checkpoint: Checkpoint, parallel: TensorParallel = SINGLE) -> TorchRunner:
    """A runner on `config.device`, or one rank of several. Sizes are settled before any weight is read.

    **Raises:** `ConfigError` for options that the machine or the model cannot meet, `CheckpointError` for weights that
    the model cannot take.
    """
    if checkpoint.reader is None and checkpoint.foreign is None:
        raise CheckpointError(
            f"{checkpoint.source.address} is an Orbax checkpoint, which only the JAX backend restores: "
            "choose --backend jax, or give the checkpoint that it was converted from"
        )
    device = select_device(config.device, parallel.rank)
    stream: Stream = CpuThread() if device.type == "cpu" else CudaStream(device)
    try:
        # On the CPU all of torch's work belongs on one thread. Each thread that computes has a team of helpers, and
        # with more threads than cores these sleep between operations: a decode step then takes 1.6 times as long.
        return stream.submit(partial(_load_on, stream, config, checkpoint, device, parallel)).wait()
    except BaseException:
        stream.close()
        raise


def kv_form_of(config: EngineConfig, dtype: torch.dtype) -> KVForm:
    """How keys and values are stored; `dtype` is that of activations.

    **Raises:** `ConfigError` for float8 keys with attention that wants them in int8.
    """
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


def _load_on(
    stream: Stream,
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    parallel: TensorParallel,
) -> TorchRunner:
    """Builds model, pages and runner; runs on `stream`."""
    dtype = select_dtype(config.dtype, device)
    kv_form = kv_form_of(config, dtype)
    refuse_with_states(config, checkpoint.config)
    refuse_without_experts(config, checkpoint.config)
    state_dtypes = StateDtypes(dtype, _STATE_DTYPES[config.mamba_ssm_dtype])
    shard = ModelShard.of(checkpoint.config, parallel.rank, parallel.size)
    guessing = open_draft(config, checkpoint)
    head_forms = shard.head_forms(checkpoint.config)
    if guessing is not None:
        own_shard = ModelShard.of(guessing.config, parallel.rank, parallel.size)
        head_forms = tuple(dict.fromkeys((*head_forms, *own_shard.head_forms(guessing.config))))
    form = CpuForm(dtype, kv_form.keys, head_forms)
    kernels = choose_kernels(config.attention_backend, device, form, config.cache_folder())
    built = _build(config, checkpoint, dtype, device, kernels, parallel)
    draft = None if guessing is None else _build_draft(guessing, dtype, device, kernels, parallel)
    for model in (built.model, *(() if draft is None else (draft.model,))):
        refuse_sinks(kernels.attention_name, model.layers_with_sinks)
    memory, sizes = _sizes(
        config, checkpoint.config, shard, device, dtype, kv_form, state_dtypes, built.weight_bytes, parallel, draft
    )
    kv_parameters, kv_factor = checkpoint.kv_parameters(), _kv_factor(config, checkpoint, kv_form)
    built.load()
    own_groups = len(cache_groups(checkpoint.config))
    own_pages = pages_in_memory(memory, sizes)[:own_groups]
    kv = _allocate(checkpoint.config, shard, own_pages, config.page_size, kv_form, device, state_dtypes)
    load_kv_parameters(kv, kv_parameters, shard, kv_factor)
    if kv_form.keys == torch.int8 and not kv_parameters.has(Kind.MEAN):
        give_key_means(built.model, kv, checkpoint.config, dtype=dtype, max_context=sizes.max_context)
    if config.enable_expert_distribution_metrics:
        kv = _with_counts(kv, checkpoint.config, device)
    drafting = None
    if draft is not None:
        draft.load()
        own_form, pages = KVForm(dtype, dtype), sizes.num_pages[own_groups:]
        cache = _allocate(draft.config, draft.shard, pages, config.page_size, own_form, device, state_dtypes)
        drafting = DraftPart(PagedTransformer(draft.model, cache), own_groups)
    spec = _runner_spec(config, checkpoint.config, memory, sizes)
    most = min(config.cuda_graph_max_bs or _MOST_CAPTURED_ROWS, spec.max_rows)
    capture = _capture(stream, config, device, kernels)
    return TorchRunner(
        PagedTransformer(built.model, kv),
        spec,
        device=device,
        stream=stream,
        sampler=kernels.sampler,
        capture=capture,
        graph_buckets=row_buckets(most),
        mixed_buckets=() if capture is None else _mixed_buckets(config, checkpoint.config, kernels, most, sizes),
        weight_bytes=built.weight_bytes + (0 if draft is None else weight_bytes_of(draft.model)),
        kv_bytes=sum(
            group.page * pages for group, pages in zip(memory.groups, pages_in_memory(memory, sizes), strict=True)
        ),
        details=_details(
            config, checkpoint, dtype, kv_form, kernels, parallel, built.in_8_bits, drafting=draft is not None
        ),
        draft=drafting,
        states=[pool for layer in kv for pool in layer.states],
        counted={number: own.expert_tokens for number, own in enumerate(kv) if own.expert_tokens is not None},
    )


def _with_counts(kv: Sequence[LayerMemory], config: ModelConfig, device: torch.device) -> list[LayerMemory]:
    """The same with a count for each expert."""
    counts = [torch.zeros(layer.num_experts, dtype=torch.int64, device=device) for layer in config.layers]
    return [
        replace(memory, expert_tokens=count if len(count) else None) for memory, count in zip(kv, counts, strict=True)
    ]


def _kv_factor(config: EngineConfig, checkpoint: Checkpoint, form: KVForm) -> float | None:
    """What the checkpoint's scales are multiplied by: see `kv_scale_factor`. Keys in int8 have scales of their own, and
    a mean that the checkpoint may bring.

    **Raises:** `CheckpointError` for scales and means that cannot be used.
    """
    if form.keys != torch.int8:
        return kv_scale_factor(checkpoint, config.kv_cache_dtype)
    parameters = checkpoint.kv_parameters()
    logger.info(
        "Keys%s are stored in int8 with one scale per token%s",
        " and values" if form.values == torch.int8 else "",
        "; those of the checkpoint are not used" if parameters.has(Kind.SCALE) else "",
    )
    if parameters.has(Kind.MEAN):
        parameters.check(Kind.MEAN)
        logger.info("Using the checkpoint's means of keys")
    return None


def _runner_spec(config: EngineConfig, model: ModelConfig, memory: Memory, sizes: Sizes) -> RunnerSpec:
    return RunnerSpec(
        pools=pool_specs(memory, sizes, config.page_size),
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=sizes.max_context,
        vocab_size=model.vocab_size,
        max_samples=config.max_samples,
        drafts_with_prompts=False,
        max_drafts=sizes.draft_slots if model.keeps_states else None,
        prompt_tokens=sizes.prompt_tokens,
    )


def _details(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kv_form: KVForm,
    kernels: Kernels,
    parallel: TensorParallel,
    in_8_bits: Mapping[ParameterName, str],
    *,
    drafting: bool,
) -> dict[str, str]:
    """What the runner's report tells of how it was made."""
    details = {
        "dtype": _name(dtype),
        "kv_cache_dtype": kv_form.name,
        "attention": kernels.attention_name.value,
        "tp_size": str(parallel.size),
    }
    if checkpoint.foreign is not None:
        details["model_impl"] = config.model_impl.value
    if (matrices := describe_matrices(checkpoint.config, in_8_bits)) is not None:
        details["weights"] = matrices
    if drafting:
        details["speculative_draft_model_path"] = str(config.speculative_draft_model_path)
    if checkpoint.config.keeps_states:
        details["mamba_ssm_dtype"] = config.mamba_ssm_dtype.value
    return details


@dataclass(frozen=True, slots=True)
class _BuiltDraft:
    """A draft model without values. Its keys and values are of the type of activations."""

    config: ModelConfig
    shard: ModelShard
    model: Transformer
    load: Callable[[], None]


def _build_draft(
    found: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels, parallel: TensorParallel
) -> _BuiltDraft:
    reader = found.reader
    if reader is None:
        raise CheckpointError(
            f"{found.source.address} is an Orbax checkpoint, which only the JAX backend restores: choose "
            "--backend jax, or give the checkpoint that it was converted from"
        )
    model = build_model(
        found.config,
        dtype=dtype,
        device=device,
        operations=kernels.operations,
        attention=kernels.attention,
        parallel=parallel,
        encodings=encodings_of(found, None),
    )

    def load() -> None:
        load_weights(model, reader, found.config)

    return _BuiltDraft(found.config, ModelShard.of(found.config, parallel.rank, parallel.size), model, load)


@dataclass(frozen=True, slots=True)
class _Built:
    """A model without values, the bytes that they will take, and what gives them; the matrices that are in memory in 8
    bits, and the type of each."""

    model: Transformer | TracedTransformer
    weight_bytes: int
    load: Callable[[], None]
    in_8_bits: Mapping[ParameterName, str] = field(default_factory=dict)


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    parallel: TensorParallel,
) -> _Built:
    """Our model, or that of transformers."""
    quantization = quantization_of(config, checkpoint)
    if checkpoint.foreign is not None:
        # Imported here: only such models need transformers' own.
        from torch_backend.compilation.building import build_traced

        traced, read = build_traced(
            config,
            checkpoint,
            dtype=dtype,
            device=device,
            operations=kernels.operations,
            attention=kernels.attention,
            parallel=parallel,
        )
        return _Built(traced, traced.weight_bytes(), partial(traced.load, read))
    reader = checkpoint.reader
    assert reader is not None
    model = build_model(
        checkpoint.config,
        dtype=dtype,
        device=device,
        operations=kernels.operations,
        attention=kernels.attention,
        states=kernels.states,
        parallel=parallel,
        encodings=encodings_of(checkpoint, quantization),
    )
    kept = _blocks_to_keep(config, checkpoint, model, device, kernels)

    def load() -> None:
        layout = load_weights(model, reader, checkpoint.config, kept=kept, quantization=quantization)
        if isinstance(layout, PackedAndBlocks):
            with torch.inference_mode():
                measure_forms(layout)

    return _Built(model, weight_bytes(model, kept), load, matrices_in_8_bits(model, checkpoint.config))


def _blocks_to_keep(
    config: EngineConfig, checkpoint: Checkpoint, model: Transformer, device: torch.device, kernels: Kernels
) -> Sequence[KeptMatrix]:
    if not config.keep_gguf_blocks:
        return ()
    if checkpoint.reader is None or not checkpoint.reads_gguf:
        raise ConfigError(f"keep_gguf_blocks: {checkpoint.source.path} is not a GGUF file with weights")
    if kernels.block_matrices is None:
        raise ConfigError(
            "keep_gguf_blocks needs a CPU with avx512_bf16, numba and --dtype bfloat16: remove it, or see the log"
        )
    room = available_memory(device) - weight_bytes(model)
    return matrices_to_keep(model, checkpoint.config, checkpoint.reader, kernels.block_matrices, room)


def _capture(stream: Stream, config: EngineConfig, device: torch.device, kernels: Kernels) -> CudaCapture | None:
    if device.type == "cpu" or config.disable_cuda_graph:
        return None
    if not kernels.capturable:
        logger.info("Steps are not captured: %s attention reads lengths on the host", kernels.attention_name)
        return None
    return CudaCapture(cast("CudaStream", stream).stream)


def _mixed_buckets(
    config: EngineConfig, model: ModelConfig, kernels: Kernels, most_rows: int, sizes: Sizes
) -> tuple[Bucket, ...]:
    """Sizes of steps with prompts to capture, of at most `most_rows` decode rows."""
    reason = None
    if model.keeps_states and kernels.states.reads_lengths:
        reason = "layers with a recurrent state read lengths on the host"
    elif config.max_samples > 1:
        reason = f"not supported with speculative_algorithm {config.speculative_algorithm.value}"
    if reason is not None:
        logger.info("Steps with prompts are not captured: %s", reason)
        return ()
    return mixed_buckets(most_rows, sizes.prompt_tokens)


def _sizes(
    config: EngineConfig,
    model_config: ModelConfig,
    shard: ModelShard,
    device: torch.device,
    dtype: torch.dtype,
    kv_form: KVForm,
    state_dtypes: StateDtypes,
    weight_bytes: int,
    parallel: TensorParallel,
    draft: _BuiltDraft | None,
) -> tuple[Memory, Sizes]:
    """Sizes that every rank agrees on, and what follows from them on this one."""

    def memory_of(model: ModelConfig, shard: ModelShard, form: KVForm) -> tuple[GroupMemory, ...]:
        def bytes_of_one(group: CacheGroup) -> int:
            """Of a page, or of a slot."""
            layers = [model.layers[number] for number in group.layers]
            if group.kind is CacheKind.STATE:
                own = (shard.recurrent(layer.recurrent) for layer in layers if layer.recurrent is not None)
                return sum(state_dtypes.bytes_of_slot(recurrent.state) for recurrent in own)
            attention = layers[0].attention
            assert attention is not None
            kv_heads = len(shard.kv_heads(attention.num_kv_heads))
            return config.page_size * form.bytes_per_token(len(layers), kv_heads, attention.head_dim)

        return tuple(GroupMemory(bytes_of_one(group), group.kind, group.window) for group in cache_groups(model))

    # Processes on one CPU share its memory, and all of them must agree on the sizes.
    available = parallel.least(available_memory(device)) // (parallel.size if device.type == "cpu" else 1)
    memory = Memory(
        platform=device.type,
        available=available,
        weights=-parallel.least(-weight_bytes),
        groups=memory_of(model_config, shard, kv_form),
    )
    if draft is not None:
        own = -parallel.least(-weight_bytes_of(draft.model))
        memory = with_draft(memory, own, memory_of(draft.config, draft.shard, KVForm(dtype, dtype)))
    sizes = choose_sizes(config, model_config.default_context, memory, model_config.longest_context)
    logger.info(
        "%s on %s: %.0f MiB of weights, %s, %d rows, %d tokens a step",
        _name(dtype),
        device,
        weight_bytes / 2**20,
        describe_pools(memory, sizes, config.page_size),
        sizes.max_rows,
        sizes.token_budget,
    )
    return memory, sizes


def _allocate(
    config: ModelConfig,
    shard: ModelShard,
    num_pages: tuple[int, ...],
    page_size: int,
    form: KVForm,
    device: torch.device,
    state_dtypes: StateDtypes,
) -> list[LayerMemory]:
    """Pages, or slots, of every layer: of each group `num_pages`."""
    memory: list[LayerMemory] = []
    for layer, group in zip(config.layers, group_of_layers(config), strict=True):
        arrays = () if layer.recurrent is None else shard.recurrent(layer.recurrent).state
        states = state_dtypes.allocate(num_pages[-1], arrays, device)
        pages = None
        if layer.attention is not None and group is not None:
            heads, head_dim = shard.kv_heads(layer.attention.num_kv_heads), layer.attention.head_dim
            pages = KVPages.allocate(num_pages[group], len(heads), page_size, head_dim, form, device)
        memory.append(LayerMemory(pages, states))
    return memory


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Builds the runner of one rank from options and a checkpoint: `runner.assembly` on Torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from sglang_jax.architectures.model_config import LayerConfig, group_of_layers, num_slots
from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.checkpoint import Checkpoint, ModelConfig, ParameterReader
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.assembly import Assembly, Models, check_room, describe, open_models, open_replacement, settle
from sglang_jax.runner.kv_scales import kv_scale_factor
from sglang_jax.runner.sizing import Sizes
from torch_backend.batch import ForwardBatch
from torch_backend.building import TorchBackend, UnloadedModel, dtype_name, refuse_orbax
from torch_backend.devices import select_device
from torch_backend.graphs import Bucket, CudaCapture, mixed_buckets, row_buckets
from torch_backend.kernel_choice import Kernels
from torch_backend.key_means import give_key_means
from torch_backend.kv_pages import KVForm, KVPages, LayerMemory, StateDtypes
from torch_backend.models import Transformer
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.runner import ReleasableMemory, TorchRunner
from torch_backend.step import Model
from torch_backend.streams import CpuThread, CudaStream, Stream, others_keep_threads
from torch_backend.weights import load_kv_parameters

if TYPE_CHECKING:
    from torch_backend.compilation.traced_model import TracedTransformer

logger = logging.getLogger(__name__)

_MAX_CAPTURED_ROWS = 256


@dataclass(frozen=True, slots=True)
class PagedTransformer:
    """A loaded model with its KV pages and states: the runner's `Model`. `transformer`: None once released."""

    transformer: Transformer | TracedTransformer | None
    kv: Sequence[LayerMemory]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        assert self.transformer is not None, "the weights were released"
        hidden: torch.Tensor = self.transformer(batch, self.kv)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.transformer is not None, "the weights were released"
        return self.transformer.logits(hidden)

    def without_weights(self) -> PagedTransformer:
        return PagedTransformer(None, self.kv)

    def pages(self) -> Iterator[torch.Tensor]:
        for memory in self.kv:
            yield from memory.states
            for shard in memory.shards:
                yield from shard.states
            for pool in memory.pools:
                yield pool.keys
                if not pool.shared:
                    yield pool.values
                if pool.latent_scales is not None:
                    yield pool.latent_scales.values


def load_rank(config: EngineConfig, checkpoint: Checkpoint, parallel: TensorParallel = SINGLE) -> TorchRunner:
    """Returns a runner on `config.device`, or one rank of several. Sizes are determined before any weight is read.
    Raises as `create_runner`."""
    refuse_orbax(checkpoint)
    device = select_device(config.device, parallel.rank)
    stream: Stream = CpuThread() if device.type == "cpu" else CudaStream(device)
    try:
        # On the CPU all of torch's work runs on one thread. Each thread that computes has its own team of OpenMP
        # threads; with more threads than cores, these sleep between operations, and a decode step takes 1.6 times as
        # long.
        with others_keep_threads():
            return stream.submit(partial(_load_on, stream, config, checkpoint, device, parallel)).wait()
    except BaseException:
        stream.close()
        raise


def _load_on(
    stream: Stream,
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    parallel: TensorParallel,
) -> TorchRunner:
    """Builds the model, the pages and the runner; runs on `stream`."""
    models = open_models(config, checkpoint)
    backend = TorchBackend.choose(config, models, device, parallel)
    assembly: Assembly[UnloadedModel] = settle(config, models, backend)
    main, draft, spec, kernels = assembly.model, assembly.draft, assembly.spec, backend.kernels
    kv_parameters, kv_factor = checkpoint.kv_parameters(), _kv_factor(config, checkpoint, backend.kv_form)
    main.load()
    kv = _allocate_main(backend, assembly, kv_parameters, kv_factor)
    main_model = PagedTransformer(main.model, kv)
    drafting = None
    if draft is not None:
        draft.load()
        own = _allocate(draft, assembly.draft_pages, config.page_size, device, backend.state_dtypes)
        drafting = PagedTransformer(draft.model, own)
    most = min(config.cuda_graph_max_bs or _MAX_CAPTURED_ROWS, spec.max_rows)
    capture = _capture(stream, config, checkpoint.config, device, kernels)
    pages = [*main_model.pages(), *(() if drafting is None else drafting.pages())]
    memory = ReleasableMemory(
        partial(_reload, config, models, backend), partial(_without_weights, backend), tuple(pages)
    )
    return TorchRunner(
        main_model,
        spec,
        memory=memory,
        device=device,
        stream=stream,
        sampler=kernels.sampler,
        capture=capture,
        graph_buckets=row_buckets(most),
        mixed_buckets=()
        if capture is None
        else _mixed_buckets(config, checkpoint.config, kernels, most, assembly.sizes),
        weight_bytes=main.weight_bytes + (0 if draft is None else draft.weight_bytes),
        kv_bytes=assembly.kv_bytes,
        details={
            "dtype": dtype_name(backend.dtype),
            "kv_cache_dtype": backend.kv_form.name,
            "attention": kernels.attention_name.value,
            **describe(config, models, main.as_stored),
        },
        draft=drafting,
        states=[pool for layer in kv for part in layer.parts for pool in part.states],
        counted={
            number: own.expert_tokens
            for number, layer in enumerate(kv)
            for own in layer.parts
            if own.expert_tokens is not None
        },
    )


def _reload(
    config: EngineConfig, models: Models, backend: TorchBackend, served: Model, model_path: str | None
) -> Model:
    """Returns the model with other weights, over the pages of `served`; runs on the stream. On a GPU the new weights
    are copied into the old tensors, whose addresses captured steps contain. Raises as `Runner.load_weights`."""
    assert isinstance(served, PagedTransformer)
    _check_replaceable(backend)
    replacement = open_replacement(config, models, model_path)
    refuse_orbax(replacement.main)
    unloaded = backend.build(replacement)
    check_room(backend, unloaded)
    unloaded.load()
    if backend.device.type == "cpu" or served.transformer is None:
        return PagedTransformer(unloaded.model, served.kv)
    targets, values = _tensors(served.transformer), _tensors(unloaded.model)
    ours, theirs = ([(each.shape, each.dtype) for each in tensors] for tensors in (targets, values))
    if ours != theirs:
        raise ConfigError(f"{model_path} stores its weights in another way than the model served: see quantization")
    with torch.inference_mode():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    return served


def _without_weights(backend: TorchBackend, served: Model) -> Model:
    assert isinstance(served, PagedTransformer)
    _check_replaceable(backend)
    if not isinstance(served.transformer, Transformer):
        raise ConfigError("weights cannot be released with --model-impl transformers; stop the server")
    return served.without_weights()


def _check_replaceable(backend: TorchBackend) -> None:
    if backend.kv_form.keys != backend.dtype:
        raise ConfigError("weights cannot be replaced with an 8-bit KV cache on the torch backend; restart the server")


def _tensors(model: Transformer | TracedTransformer) -> list[torch.Tensor]:
    assert isinstance(model, Transformer)
    return [*model.parameters(), *model.buffers()]


def _allocate_main(
    backend: TorchBackend, assembly: Assembly[UnloadedModel], kv_parameters: ParameterReader, factor: float | None
) -> list[LayerMemory]:
    """Allocates the layers' memory, with scales and means of keys and values, and counters of experts, if needed."""
    config, model = backend.config, assembly.model
    kv = _allocate(model, assembly.pages, config.page_size, backend.device, backend.state_dtypes)
    for number, shard in enumerate(model.shards):
        load_kv_parameters([layer.parts[number] for layer in kv], kv_parameters, shard, factor)
    means = any(pool.token_scales is not None for layer in kv for pool in layer.pools)
    if means and not kv_parameters.has(ParameterKind.MEAN):
        give_key_means(model.model, kv, model.config, dtype=backend.dtype, max_context=assembly.sizes.max_context)
    if config.enable_expert_distribution_metrics:
        kv = _with_counts(kv, model.config, backend.device)
    return kv


def _with_counts(kv: Sequence[LayerMemory], config: ModelConfig, device: torch.device) -> list[LayerMemory]:
    counts = [torch.zeros(layer.num_experts, dtype=torch.int64, device=device) for layer in config.layers]

    def counting(memory: LayerMemory, count: torch.Tensor) -> LayerMemory:
        """All shards choose the same experts, so one counts."""
        if not len(count):
            return memory
        if not memory.shards:
            return replace(memory, expert_tokens=count)
        first, *others = memory.shards
        return replace(memory, shards=(replace(first, expert_tokens=count), *others))

    return list(map(counting, kv, counts))


def _kv_factor(config: EngineConfig, checkpoint: Checkpoint, form: KVForm) -> float | None:
    """The factor for the checkpoint's KV scales: see `kv_scale_factor`. None for int8 keys, which have a scale per
    token, and a mean that the checkpoint may contain. Raises `CheckpointError` for scales and means that cannot be
    used."""
    if form.keys.itemsize == 1 and checkpoint.config.keeps_latents:
        logger.info(
            "Latent vectors are stored in %s with two scales per token",
            config.kv_cache_dtype.value,
        )
        return None
    if form.keys != torch.int8:
        return kv_scale_factor(checkpoint, config.kv_cache_dtype)
    parameters = checkpoint.kv_parameters()
    logger.info(
        "Keys%s are stored in int8 with one scale per token%s",
        " and values" if form.values == torch.int8 else "",
        "; those of the checkpoint are not used" if parameters.has(ParameterKind.SCALE) else "",
    )
    if parameters.has(ParameterKind.MEAN):
        parameters.check(ParameterKind.MEAN)
        logger.info("Using the checkpoint's means of keys")
    return None


def _capture(
    stream: Stream, config: EngineConfig, model: ModelConfig, device: torch.device, kernels: Kernels
) -> CudaCapture | None:
    if device.type == "cpu" or config.disable_cuda_graph:
        return None
    reason = None
    if not kernels.capturable:
        reason = f"{kernels.attention_name} attention reads lengths on the host"
    elif config.max_samples > 1 and model.keeps_states and kernels.states.reads_lengths:
        reason = "layers with a recurrent state read the drafts of a row on the host"
    if reason is not None:
        logger.info("Steps are not captured: %s", reason)
        return None
    return CudaCapture(cast("CudaStream", stream).stream)


def _mixed_buckets(
    config: EngineConfig, model: ModelConfig, kernels: Kernels, most_rows: int, sizes: Sizes
) -> tuple[Bucket, ...]:
    reason = None
    if model.keeps_states and kernels.states.reads_lengths:
        reason = "layers with a recurrent state read lengths on the host"
    elif config.max_samples > 1:
        reason = f"not supported with speculative_algorithm {config.speculative_algorithm.value}"
    if reason is not None:
        logger.info("Steps with prompts are not captured: %s", reason)
        return ()
    return mixed_buckets(most_rows, sizes.prompt_tokens)


def _allocate(
    model: UnloadedModel,
    num_pages: tuple[int, ...],
    page_size: int,
    device: torch.device,
    state_dtypes: StateDtypes,
) -> list[LayerMemory]:
    """Allocates pages or state slots of every layer: `num_pages` of each cache group."""
    config, form = model.config, model.kv_form
    slots = num_slots(config, num_pages)

    def of_layer(layer: LayerConfig, group: int | None) -> LayerMemory:
        parts: list[LayerMemory] = []
        pools: dict[object, KVPages] = {}
        for shard in model.shards:
            arrays = () if layer.recurrent is None else shard.recurrent(layer.recurrent).state
            states = state_dtypes.allocate(slots, arrays, device)
            pages = None
            if layer.attention is not None and group is not None:
                heads = shard.heads_of_pages(layer.attention.cached)
                if heads not in pools:
                    keys, *values = shard.cached(layer.attention.cached)
                    shape = num_pages[group], keys.heads or 1, page_size, keys.width
                    pools[heads] = KVPages.allocate(*shape, form, device, shared=not values, parts=keys.parts)
                pages = pools[heads]
            parts.append(LayerMemory(pages, states))
        return LayerMemory(shards=tuple(parts)) if model.in_shards else parts[0]

    return list(map(of_layer, config.layers, group_of_layers(config)))

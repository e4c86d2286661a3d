"""Builds a runner from options and a checkpoint: the steps that both backends share, in order.

1. `open_models` refuses options that the model does not support, and opens a draft model's checkpoint.
2. The backend chooses device, dtypes and kernels for these models: a `Backend`.
3. `settle` builds models without values, and chooses the sizes of pools and steps by the memory. It reads no weight.
4. The backend reads weights, allocates the pools of an `Assembly`, and creates its runner, whose report starts with
   `describe`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Generic, Protocol, TypeVar

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.opening import Checkpoint, open_served
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.determinism import refuse_with_determinism
from sglang_jax.runner.draft_model import open_draft, with_draft
from sglang_jax.runner.expert_load import refuse_without_experts
from sglang_jax.runner.plan import RunnerSpec
from sglang_jax.runner.quantization import describe_matrices, quantization_of, refuse_rounding
from sglang_jax.runner.sizing import (
    GroupMemory,
    Memory,
    Sizes,
    choose_sizes,
    describe_pools,
    pages_in_memory,
    pool_specs,
    refuse_ranks,
    refuse_with_states,
)

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
"""A backend's model without values, or the shard of one rank."""


@dataclass(frozen=True, slots=True)
class Models:
    """The checkpoints of a runner: of its model, and of a draft model or None. `quantization`: of the model's matrices
    while they are read; a draft model is loaded as it is stored."""

    main: Checkpoint
    draft: Checkpoint | None
    quantization: Quantization | None

    @property
    def all(self) -> tuple[Checkpoint, ...]:
        return (self.main,) if self.draft is None else (self.main, self.draft)


def open_models(config: EngineConfig, checkpoint: Checkpoint) -> Models:
    """The models of a runner. Raises `ConfigError` for options that the model does not support, or that exclude each
    other; `CheckpointError` for a draft model that cannot be read."""
    refuse_with_states(config, checkpoint.config)
    refuse_ranks(config, checkpoint.config)
    refuse_without_experts(config, checkpoint.config)
    refuse_with_determinism(config, checkpoint.config)
    return Models(checkpoint, open_draft(config, checkpoint), quantization_of(config, checkpoint))


def open_replacement(config: EngineConfig, models: Models, model_path: str | None) -> Models:
    """Opens a checkpoint whose weights may replace those of `models`, without the draft model; None for that of
    `models`. Raises `ConfigError` unless its config describes the same model; `CheckpointError` if it cannot be
    read."""
    if model_path is None:
        return replace(models, draft=None)
    found = open_served(config, model_path)
    served = models.main
    if found.transformers_config is not None or served.transformers_config is not None:
        raise ConfigError("weights cannot be replaced with --model-impl transformers; restart the server")
    ours, theirs = (replace(each.config, eos_token_ids=(), bos_token_id=None) for each in (served, found))
    different = [each.name for each in fields(ours) if getattr(ours, each.name) != getattr(theirs, each.name)]
    if different:
        raise ConfigError(
            f"{model_path} is another model than the one served: its config differs in {', '.join(different)}"
        )
    return Models(found, None, quantization_of(config, found))


def check_room(backend: Backend[Model], model: Model) -> None:
    """Raises `ConfigError` if the devices have no room for the weights of one more model."""
    needed, free = backend.weights_of(model), backend.available()
    if needed > free:
        raise ConfigError(
            f"the new weights need {needed / 2**20:.0f} MiB on each device, and {free / 2**20:.0f} MiB are free; "
            "release the KV cache before, or start the server with a lower --mem-fraction-static"
        )


class Backend(Protocol[Model]):
    """A backend that has chosen its device, dtypes and kernels."""

    @property
    def platform(self) -> str:
        """`cpu`, `gpu`, `cuda` or `tpu`."""
        ...

    @property
    def place(self) -> str:
        """Devices and dtypes, for the log."""
        ...

    def build(self, models: Models) -> Model:
        """The model, without values. Raises `ConfigError` for a model that the devices cannot compute."""
        ...

    def build_draft(self, draft: Checkpoint) -> Model:
        """A draft model, whose keys and values have the dtype of activations."""
        ...

    def available(self) -> int:
        """Bytes of memory on each device for weights and pools, before these are allocated."""
        ...

    def weights_of(self, model: Model) -> int:
        """Bytes of a model's weights on a device, the largest of all devices."""
        ...

    def groups_of(self, model: Model) -> tuple[GroupMemory, ...]:
        """The memory of each cache group of a model on one device."""
        ...

    def mixed_shapes(self, sizes: Sizes) -> tuple[tuple[int, int], ...]:
        """See `RunnerSpec`."""
        ...


@dataclass(frozen=True, slots=True)
class Assembly(Generic[Model]):
    """A model, and a draft model or None, without values, and sizes on which all devices agree. `memory`: of one
    device, with both models; `pages`: pages, or slots, of each of the model's cache groups in memory; `draft_pages`: of
    the draft model's."""

    model: Model
    draft: Model | None
    memory: Memory
    sizes: Sizes
    spec: RunnerSpec
    pages: tuple[int, ...]
    draft_pages: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pools on one device."""
        counts = zip(self.memory.groups, pages_in_memory(self.memory, self.sizes), strict=True)
        return sum(group.page * pages for group, pages in counts)


def settle(config: EngineConfig, models: Models, backend: Backend[Model]) -> Assembly[Model]:
    """Builds models without values, chooses sizes, and logs both. Raises `ConfigError` if memory cannot hold the
    weights and one request, and for options that the devices or the model do not support."""
    refuse_rounding(config, backend.platform)
    model = backend.build(models)
    draft = None if models.draft is None else backend.build_draft(models.draft)
    memory = Memory(backend.platform, backend.available(), backend.weights_of(model), backend.groups_of(model))
    if draft is not None:
        memory = with_draft(memory, backend.weights_of(draft), backend.groups_of(draft))
    served = models.main.config
    sizes = choose_sizes(
        config, served.default_context, memory, served.longest_context, whole_prompts=not served.causal
    )
    logger.info("%s", served.describe())
    logger.info(
        "%s: %.0f MiB of weights, %s, %d rows, %d tokens a step",
        backend.place,
        memory.weights / 2**20,
        describe_pools(memory, sizes, config.page_size),
        sizes.max_rows,
        sizes.token_budget,
    )
    counts = list(zip(memory.groups, pages_in_memory(memory, sizes), strict=True))
    pages, draft_pages = (tuple(count for group, count in counts if group.draft is own) for own in (False, True))
    spec = runner_spec(config, served, memory, sizes, backend.mixed_shapes(sizes))
    return Assembly(model, draft, memory, sizes, spec, pages, draft_pages)


def runner_spec(
    config: EngineConfig,
    model: ModelConfig,
    memory: Memory,
    sizes: Sizes,
    mixed_shapes: tuple[tuple[int, int], ...] = (),
) -> RunnerSpec:
    return RunnerSpec(
        pools=pool_specs(memory, sizes, config.page_size),
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=sizes.max_context,
        vocab_size=model.vocab_size,
        mixed_shapes=mixed_shapes,
        max_samples=config.max_samples,
        drafts_with_prompts=False,
        max_drafts=sizes.draft_slots if model.keeps_states else None,
        prompt_tokens=sizes.prompt_tokens,
        pooling=None if model.pooler is None else model.pooler.pooling,
        pooled_width=0 if model.pooler is None else model.pooler.width(model.hidden_size),
        whole_prompts=not model.causal,
        dp_ranks=config.dp_ranks,
    )


def describe(config: EngineConfig, models: Models, as_stored: Mapping[ParameterName, str]) -> dict[str, str]:
    """The details of a runner's report on its models. `as_stored`: the matrices in memory in the dtype in
    which they are stored, and not in that of activations, and these dtypes."""
    details = {"tp_size": str(config.tp_size)}
    if models.main.transformers_config is not None:
        details["model_impl"] = config.model_impl.value
    if (matrices := describe_matrices(models.main.config, as_stored)) is not None:
        details["weights"] = matrices
    if models.draft is not None:
        details["speculative_draft_model_path"] = str(config.speculative_draft_model_path)
    if models.main.config.keeps_states:
        details["mamba_ssm_dtype"] = config.mamba_ssm_dtype.value
    return details

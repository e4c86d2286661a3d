"""Fields that families with mixtures of experts share: the number of experts, and which layers have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.errors import CheckpointError, quote

MAX_EXPERTS = 1 << 16
"""Limit for the experts of all layers together, which may have a tensor each; far above that of any model."""

_COUNTS = ("num_experts", "num_local_experts")
"""transformers accepts either name for the number of experts."""


def read_experts(
    common: CommonFields,
    *,
    num_experts: int,
    chosen: int,
    size: str = "intermediate_size",
    default_size: int = 0,
    counts: Sequence[str] = _COUNTS,
    of_token: str = "num_experts_per_tok",
) -> ExpertsConfig:
    """As `read_expert_sizes`, with the common activation."""
    experts = read_expert_sizes(
        common.fields,
        common.num_layers,
        num_experts=num_experts,
        chosen=chosen,
        size=size,
        default_size=default_size,
        counts=counts,
        of_token=of_token,
    )
    return replace(experts, activation=common.activation())


def read_expert_sizes(
    fields: JsonFields,
    num_layers: int,
    *,
    num_experts: int,
    chosen: int,
    size: str = "intermediate_size",
    default_size: int = 0,
    counts: Sequence[str] = _COUNTS,
    of_token: str = "num_experts_per_tok",
) -> ExpertsConfig:
    """The experts of a config.json; families replace fields that differ. `num_experts` and `chosen` are defaults.
    `size`: the field with an expert's columns, required if `default_size` is 0. `counts`: fields with `num_experts`;
    `of_token`: the one with `chosen`.

    **Raises:** `CheckpointError` for no experts, too many, or fewer than a token chooses.
    """
    count = _count(fields, counts) or num_experts
    if count * num_layers > MAX_EXPERTS:
        raise CheckpointError(
            f"{fields.file}: {quote(count)} experts in each of {num_layers} layers; the limit for all layers "
            f"together is {MAX_EXPERTS}"
        )
    chosen = fields.size(of_token, chosen)
    if chosen > count:
        raise CheckpointError(
            f"{fields.file}: {of_token} is {chosen}, it must be at most the number of experts ({count})"
        )
    columns = fields.size(size, default_size) if default_size else fields.required_integer(size)
    return ExpertsConfig(num_experts=count, chosen=chosen, size=columns)


def sparse_layers(
    common: CommonFields, experts: ExpertsConfig, dense_size: int
) -> list[ExpertsConfig | FeedForwardConfig]:
    """The feed-forward part of each layer in Qwen's models: `experts` in every `decoder_sparse_step`-th layer that is
    not in `mlp_only_layers`; the others are dense, with `intermediate_size` columns (default: `dense_size`)."""
    fields = common.fields
    step = fields.size("decoder_sparse_step", 1)
    without = set(fields.integers("mlp_only_layers"))
    size = fields.size("intermediate_size", dense_size)
    dense = FeedForwardConfig(size=size, activation=experts.activation)
    sparse = [(number + 1) % step == 0 and number not in without for number in range(common.num_layers)]
    return [experts if has_experts else dense for has_experts in sparse]


def _count(fields: JsonFields, names: Sequence[str]) -> int | None:
    found = {name: fields.required_integer(name) for name in names if fields.value(name) is not None}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{fields.file}: {' and '.join(f'{name} is {count}' for name, count in found.items())}; they must be equal"
        )
    return next(iter(found.values()), None)

"""What families with mixtures of experts read alike: how many experts there are, and which layers have them."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.errors import CheckpointError, shown

MOST_EXPERTS = 1 << 16
"""A limit for those of all layers together, which may have a tensor each. Far above that of any model."""

_COUNTS = ("num_experts", "num_local_experts")
"""transformers takes either name for a number of experts."""


def read_experts(
    common: CommonFields,
    *,
    num_experts: int,
    chosen: int,
    size: str = "intermediate_size",
    default_size: int = 0,
    counts: Sequence[str] = _COUNTS,
) -> ExpertsConfig:
    """Experts with the file's numbers, or those given where it is silent; families change what is theirs. `size`: the
    field with the columns of one; `default_size` 0: it must be there. `counts`: fields with the number of experts.

    **Raises:** `CheckpointError` for no experts, for too many, and for more chosen ones than there are.
    """
    fields = common.fields
    count = _count(fields, counts) or num_experts
    if count * common.num_layers > MOST_EXPERTS:
        raise CheckpointError(
            f"{fields.file}: {shown(count)} experts in each of {common.num_layers} layers; the limit for all layers "
            f"together is {MOST_EXPERTS}"
        )
    of_token = fields.size("num_experts_per_tok", chosen)
    if of_token > count:
        raise CheckpointError(
            f"{fields.file}: num_experts_per_tok is {of_token}, it must be at most the number of experts ({count})"
        )
    columns = fields.size(size, default_size) if default_size else fields.required_integer(size)
    return ExpertsConfig(num_experts=count, chosen=of_token, size=columns, activation=common.activation())


def sparse_layers(
    common: CommonFields, experts: ExpertsConfig, dense_size: int
) -> list[ExpertsConfig | FeedForwardConfig]:
    """The part of each layer in Qwen's models: experts in each `decoder_sparse_step`-th that `mlp_only_layers` does not
    have. The others are dense, of `intermediate_size` columns or, where the file is silent, `dense_size`."""
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

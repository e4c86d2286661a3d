"""Which layers rotate, for families whose other layers have no positions."""

from __future__ import annotations

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.errors import CheckpointError


def rotated_layers(common: CommonFields) -> list[bool]:
    """Whether each layer rotates: despite its name, `no_rope_layers` has 1 for a layer that does. By default, all but
    every `no_rope_layer_interval`-th do. Raises `CheckpointError` for a list that is too short."""
    fields = common.fields
    every = fields.size("no_rope_layer_interval", 4)
    given = fields.integers("no_rope_layers")
    if not given:
        return [bool((number + 1) % every) for number in range(common.num_layers)]
    if len(given) < common.num_layers:
        raise CheckpointError(
            f"{fields.file}: no_rope_layers has {len(given)} entries, it must have one for each of "
            f"{common.num_layers} layers"
        )
    return [bool(rotates) for rotates in given[: common.num_layers]]

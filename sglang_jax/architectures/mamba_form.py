"""Shared by families with Mamba-2 layers: names of tensors, and the `mamba_*` fields of hybrid models."""

from __future__ import annotations

import math
from typing import TypedDict

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.tensor_names import Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError, quote


def mamba_names(module: str, layers: str = "model.layers") -> TensorNames:
    """Names of the tensors of Mamba-2 layers, `{layers}.N.{module}.*`."""

    def name(tensor: str, *, bare: bool = False) -> TensorName:
        return TensorName(f"{module}.{tensor}", bare=bare, layers=layers)

    return {
        Part.STATE_INPUT: name("in_proj"),
        Part.STATE_OUTPUT: name("out_proj"),
        Part.STATE_NORM: name("norm"),
        Part.CONVOLUTION: name("conv1d"),
        Part.DECAY_BIAS: name("dt_bias", bare=True),
        Part.DECAY_LOG: name("A_log", bare=True),
        Part.SKIP: name("D", bare=True),
    }


def mamba_of_hybrid(fields: JsonFields, hidden_size: int, inner: int | None = None) -> Mamba2Config:
    """Reads a Mamba-2 layer, without its norm, from `mamba_*` fields. `inner`: numbers of all heads; by default
    `mamba_expand` * `hidden_size`.

    **Raises:** `CheckpointError` for inconsistent fields.
    """
    heads = fields.size("mamba_n_heads", 128)
    inner = inner or fields.size("mamba_expand", 2) * hidden_size
    declared = fields.value("mamba_d_head")
    head_dim = inner // heads if declared in (None, "auto") else fields.required_integer("mamba_d_head")
    mamba = Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state", 256),
        num_groups=fields.size("mamba_n_groups", 1),
        width=fields.size("mamba_d_conv", 4),
        norm=None,
        conv_bias=is_set(fields, "mamba_conv_bias", default=True),
        bias=is_set(fields, "mamba_proj_bias", default=False),
        out_bias=is_set(fields, "mamba_proj_bias", default=False),
        **step_limits(fields),
    )
    check_mamba(fields, mamba, inner)
    return mamba


def check_mamba(fields: JsonFields, mamba: Mamba2Config, inner: int, activation: str = "hidden_act") -> None:
    """Raises `CheckpointError` unless all heads together have `inner` numbers, groups divide the heads, and the field
    `activation` is silu."""
    if mamba.inner != inner or mamba.num_heads % mamba.num_groups:
        raise CheckpointError(
            f"{fields.file}: {mamba.num_heads} heads of {mamba.head_dim} in {mamba.num_groups} groups; there must be "
            f"{inner} numbers in total, and the same number of heads in each group"
        )
    if (found := fields.string(activation) or "silu") != "silu":
        raise CheckpointError(
            f"{fields.file}: {activation} {found!r} of a Mamba-2 layer is not supported; supported: silu"
        )


def is_set(fields: JsonFields, name: str, *, default: bool) -> bool:
    """Reads a boolean field."""
    found = fields.boolean(name)
    return default if found is None else found


class StepLimits(TypedDict):
    """Bounds of step sizes, as fields of `Mamba2Config`."""

    least_step: float
    most_step: float


def step_limits(fields: JsonFields) -> StepLimits:
    """Reads `time_step_limit`. Raises `CheckpointError` unless it is two numbers."""
    limits = fields.value("time_step_limit")
    if limits is None:
        return {"least_step": 0.0, "most_step": math.inf}
    # JSON has no infinity; transformers 5 writes it as an object.
    found = [math.inf if x == {"__float__": "Infinity"} else x for x in limits] if isinstance(limits, list) else []
    if len(found) != 2 or not all(isinstance(x, (int, float)) for x in found):
        raise CheckpointError(f"{fields.file}: time_step_limit is {quote(limits)}, it must be two numbers")
    return {"least_step": float(found[0]), "most_step": float(found[1])}

"""Converts the rotary parameters of config.json to `RopeConfig`, and back.

transformers up to 4 writes `rope_theta` and `rope_scaling: {"rope_type" | "type": ...}`; transformers 5 writes both
into `rope_parameters`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.errors import CheckpointError, cut

DEFAULT_THETA = 10000.0
MAX_POSITIONS = 1 << 27

_ROTATIONS = ("beta_fast", "beta_slow")
"""YaRN's bounds, as numbers of full rotations within the original context."""

_ROTATE_IN_PART = (RopeKind.DEFAULT, RopeKind.LINEAR, RopeKind.LLAMA3)
"""Kinds that support heads of which only a part rotates. The others scale the rotated numbers, or need whole heads."""


def partial_rope_from_hf(
    fields: JsonFields, max_position: int, default_theta: float, default_share: float
) -> RopeConfig:
    """As `rope_from_hf`, for families with `partial_rotary_factor` (default: `default_share`). Raises `CheckpointError`
    also for a factor outside (0, 1], and for a kind that rotates whole heads."""
    scaling = rope_parameters(fields)
    share = scaling.number("partial_rotary_factor") or fields.number("partial_rotary_factor") or default_share
    whole = JsonFields({**scaling.values, "partial_rotary_factor": None}, fields.file, scaling.within)
    rest = JsonFields({**fields.values, "partial_rotary_factor": None}, fields.file, fields.within, fields.accessed)
    rope = rope_from_hf(rest, max_position, default_theta, whole)
    if not 0.0 < share <= 1.0 or (share < 1.0 and rope.kind not in _ROTATE_IN_PART):
        raise CheckpointError(
            f"{fields.file}: partial_rotary_factor {share} of rope scaling {rope.kind} is not supported: a share in "
            f"(0, 1], with {', '.join(_ROTATE_IN_PART)}"
        )
    return replace(rope, partial_rotary_factor=share)


def rope_parameters(fields: JsonFields) -> JsonFields:
    """The rotary parameters from the field of transformers 5 or of earlier versions; an empty object without any."""
    found = [fields.nested("rope_parameters"), fields.nested("rope_scaling")]
    return next((one for one in found if one is not None and one.values), JsonFields({}, fields.file))


def rope_from_hf(
    fields: JsonFields, max_position: int, default_theta: float = DEFAULT_THETA, scaling: JsonFields | None = None
) -> RopeConfig:
    """Reads the rotary embedding. `max_position`: the config's `max_position_embeddings`; `scaling`: the set of
    parameters to read, for families with several.

    **Raises:** `CheckpointError` for an unknown kind, a missing or impossible parameter, partially rotated heads, or
    several sets of parameters.
    """
    if scaling is None:
        scaling = rope_parameters(fields)
    several = [name for name, value in scaling.values.items() if isinstance(value, dict)]
    if several:
        raise CheckpointError(
            f"{fields.file}: separate rotary parameters for {cut(', '.join(several))} are not supported; "
            "all layers must have the same"
        )
    name = scaling.string("rope_type") or scaling.string("type") or "default"
    kinds = [kind.value for kind in RopeKind]
    if name not in kinds:
        raise CheckpointError(f"{fields.file}: rope scaling {name!r} is not supported; supported: {', '.join(kinds)}")
    if name != RopeKind.PROPORTIONAL:
        _refuse_partial(fields, scaling)
    thetas = (scaling.number("rope_theta"), fields.number("rope_theta"))
    theta = next((theta for theta in thetas if theta is not None), default_theta)
    _check_numbers(fields, scaling, name, theta, max_position)
    original = (
        fields.count("original_max_position_embeddings")
        or scaling.count("original_max_position_embeddings")
        or max_position
    )
    match RopeKind(name):
        case RopeKind.DEFAULT:
            return RopeConfig(theta=theta)
        case RopeKind.LINEAR:
            factor = scaling.required_number("factor")
            # Without this field, max_position_embeddings may be the context before or after scaling.
            stated = scaling.count("original_max_position_embeddings")
            return RopeConfig(kind=RopeKind.LINEAR, theta=theta, factor=factor, original_max_position=stated)
        case RopeKind.DYNAMIC:
            # Scaling starts at max_position_embeddings, whatever the original context was.
            factor = scaling.required_number("factor")
            return RopeConfig(kind=RopeKind.DYNAMIC, theta=theta, factor=factor, original_max_position=max_position)
        case RopeKind.PROPORTIONAL:
            return RopeConfig(
                kind=RopeKind.PROPORTIONAL,
                theta=theta,
                factor=scaling.number("factor") or 1.0,
                rotated_pairs=scaling.number_or("partial_rotary_factor", 1.0) or 0.0,
            )
        case RopeKind.LLAMA3:
            return RopeConfig(
                kind=RopeKind.LLAMA3,
                theta=theta,
                factor=scaling.required_number("factor"),
                original_max_position=original,
                low_freq_factor=scaling.required_number("low_freq_factor"),
                high_freq_factor=scaling.required_number("high_freq_factor"),
            )
        case RopeKind.YARN:
            return _yarn(scaling, theta, original, max_position)


def length_independent_longrope(
    fields: JsonFields, *, max_position: int, default_theta: float, rotary_dim: int
) -> RopeConfig:
    """As `rope_from_hf`, for families with `longrope` scaling that never switches to its long factors. There is one
    factor for each pair of the `rotary_dim` rotated numbers of a head.

    **Raises:** `CheckpointError` also if rotations or their scale depend on the length, and for a wrong number of
    factors.
    """
    scaling = rope_parameters(fields)
    if "longrope" not in (scaling.string("rope_type"), scaling.string("type")):
        return rope_from_hf(fields, max_position, default_theta, scaling)
    divisors = _factors(scaling, "short_factor", rotary_dim)  # long factors are for sequences beyond max_position
    original = (
        scaling.count("original_max_position_embeddings")
        or fields.count("original_max_position_embeddings")
        or max_position
    )
    factor = scaling.number("factor") or max_position / original
    if original < max_position or factor > 1.0 or scaling.number("attention_factor") not in (None, 1.0):
        raise CheckpointError(
            f"{fields.file}: rope scaling 'longrope' from {original} to {max_position} tokens, by factor {factor:g}, "
            "is not supported: rotations would depend on the length; supported: an original context of "
            "max_position_embeddings or more, and no factor"
        )
    plain = {name: value for name, value in scaling.values.items() if name in ("rope_theta", "partial_rotary_factor")}
    rope = rope_from_hf(fields, max_position, default_theta, JsonFields(plain, fields.file, scaling.within))
    return replace(rope, divisors=divisors)


def _factors(scaling: JsonFields, name: str, rotary_dim: int) -> tuple[float, ...]:
    values = scaling.value(name)
    numbers = [value for value in values if _is_factor(value)] if isinstance(values, list) else []
    if not isinstance(values, list) or len(numbers) != len(values) or 2 * len(values) != rotary_dim:
        raise CheckpointError(
            f"{scaling.file}: {scaling.within}{name} must be a list of {rotary_dim // 2} numbers above 0, one for each "
            "pair that rotates"
        )
    return tuple(float(number) for number in numbers)


def _is_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_POSITIONS


def _yarn(scaling: JsonFields, theta: float, original: int, max_position: int) -> RopeConfig:
    """Reads YaRN (Peng et al. 2023). The default factor is the ratio of the context lengths."""
    truncate = scaling.boolean("truncate")
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=scaling.number("factor") or max_position / original,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast") or 32.0,
        beta_slow=scaling.number("beta_slow") or 1.0,
        mscale=scaling.number("mscale"),
        mscale_all_dim=scaling.number("mscale_all_dim"),
        attention_factor=scaling.number("attention_factor"),
        truncate=True if truncate is None else truncate,
    )


def _check_numbers(fields: JsonFields, scaling: JsonFields, kind: str, theta: float, max_position: int) -> None:
    """Raises `CheckpointError` for numbers that give impossible frequencies or context lengths."""
    numbers = {name: scaling.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor", *_ROTATIONS)}
    impossible = {name: value for name, value in numbers.items() if value is not None and value <= 0.0}
    factor = numbers["factor"]
    if factor is not None and not 1.0 / MAX_POSITIONS <= factor <= MAX_POSITIONS:
        impossible["factor"] = factor
    if theta <= 0.0 or (theta == 1.0 and kind == RopeKind.YARN):
        impossible["rope_theta"] = theta
    for name, value in impossible.items():
        raise CheckpointError(
            f"{fields.file}: {name} of rope scaling {kind} is {value:g}; it must be a positive number that gives a "
            f"context of {max_position} tokens and more"
        )


def _refuse_partial(fields: JsonFields, scaling: JsonFields) -> None:
    for share in (fields.number("partial_rotary_factor"), scaling.number("partial_rotary_factor")):
        if share not in (None, 1.0):
            raise CheckpointError(
                f"{fields.file}: partial_rotary_factor {share} is not supported; these architectures rotate whole heads"
            )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` from which `rope_from_hf` reads the same config."""
    values: dict[str, Any] = {"rope_type": str(rope.kind), "rope_theta": rope.theta}
    if rope.kind is not RopeKind.DEFAULT:
        values["factor"] = rope.factor
    if rope.kind is RopeKind.PROPORTIONAL:
        values["partial_rotary_factor"] = rope.rotated_pairs
    if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN) or (rope.kind is RopeKind.LINEAR and rope.original_max_position):
        values["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind is RopeKind.LLAMA3:
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind is RopeKind.YARN:
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "attention_factor": rope.attention_factor,
        }
        values |= {name: value for name, value in optional.items() if value is not None}
    return values

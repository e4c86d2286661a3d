"""What `quantization_config` of a Hugging Face config.json says of keys and values, where weights are plain."""

from __future__ import annotations

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError

_FIELD = "quantization_config"
_TYPES = {("float", 8): KVCacheDtype.FLOAT8_E4M3, ("int", 8): KVCacheDtype.INT8}


def refuse_quantised_weights(fields: JsonFields) -> None:
    """Lets pass what quantises keys and values alone: compressed-tensors with a `kv_cache_scheme` and no group that has
    weights.

    **Raises:** `CheckpointError` for all else.
    """
    quantization = fields.values.get(_FIELD)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "compressed-tensors" and quantization.get("kv_cache_scheme") and not _has_weights(quantization):
        return
    raise CheckpointError(
        f"{fields.file}: weights quantised by {method!r} are not supported; give a checkpoint in bfloat16, "
        "float16 or float32, or a GGUF file"
    )


def kv_scales_made_for(fields: JsonFields) -> KVCacheDtype | None:
    """The type that the checkpoint's scales of keys and values were made for; None where config.json does not say.

    **Raises:** `CheckpointError` for a scheme that one scale for each kv head cannot express.
    """
    quantization = fields.nested(_FIELD)
    scheme = None if quantization is None else quantization.nested("kv_cache_scheme")
    if scheme is None:
        return None
    kind = (scheme.string("type") or "int", scheme.integer("num_bits") or 8)
    if kind not in _TYPES or scheme.boolean("symmetric") is False or scheme.boolean("dynamic"):
        raise CheckpointError(
            f"{fields.file}: {scheme.within}type {kind[0]!r} of {kind[1]} bits, symmetric "
            f"{scheme.boolean('symmetric')}, dynamic {scheme.boolean('dynamic')} is not supported; supported: float or "
            "int of 8 bits, symmetric, not dynamic (or --kv-cache-dtype auto, which uses no scales)"
        )
    return _TYPES[kind]


def _has_weights(quantization: dict[str, object]) -> bool:
    groups = quantization.get("config_groups") or {}
    return not isinstance(groups, dict) or any(
        not isinstance(group, dict) or group.get("weights") is not None for group in groups.values()
    )

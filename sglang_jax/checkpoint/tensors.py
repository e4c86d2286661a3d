"""Whether a checkpoint has exactly the tensors that its model needs."""

from __future__ import annotations

from collections.abc import Container, Sequence

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import Kind, Part, hf_name
from sglang_jax.checkpoint.kv_scale_names import KVScaleNames
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.errors import CheckpointError

_HARMLESS_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies, which follow from the config."""

HARMLESS_PREFIX = "mtp."
"""Layers that guess further tokens, which some checkpoints (Qwen3.5) bring; nothing here uses them."""

_MOST_TOLD = 500
"""Faults that an error names: a model with experts may lack very many tensors."""


def expected_tensors(config: ModelConfig, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that a checkpoint of the model has; matrices are [out, in].
    `present`: see `Manifest.tensors`."""
    return manifest_of(config).tensors(present)


def check_tensors(reader: TensorReader, config: ModelConfig) -> None:
    """Compares what a checkpoint holds with what its config calls for; reads no values.

    An output matrix beside tied embeddings, stored rotary frequencies, layers that guess, and scales of keys and values
    are let pass; of scales there must be none, or all (see `KVScaleNames.faults`).

    **Raises:** `CheckpointError` naming the missing, extra and misshapen tensors, all or the first 500 of them.
    """
    expected = expected_tensors(config, reader.names())
    present = {
        name for name in reader.names() if not name.endswith(_HARMLESS_SUFFIX) and not name.startswith(HARMLESS_PREFIX)
    }
    if config.tie_word_embeddings:
        head = family_named(config.architecture).names[Part.HEAD]
        present.discard(hf_name(head, Kind.WEIGHT, None))
    kv_scales = KVScaleNames.find(present, config.num_layers)
    present -= kv_scales.all()
    faults = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in present]
    faults += [f"extra: {name} {reader.shape(name)}" for name in sorted(present - expected.keys())]
    for name, shape in expected.items():
        if name in present and reader.shape(name) != shape:
            faults.append(f"misshapen: {name} is {reader.shape(name)}, the config requires {shape}")
    faults += kv_scales.faults(reader, config)
    if faults:
        raise CheckpointError(
            f"the tensors do not fit a {config.architecture} model of {config.num_layers} layers "
            f"({len(faults)} faults):{listed(faults)}"
        )


def listed(faults: Sequence[str]) -> str:
    """A line of an error for each fault, or for the first 500 of them."""
    more = f"\n  and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
    return "".join(f"\n  {fault}" for fault in faults[:_MOST_TOLD]) + more

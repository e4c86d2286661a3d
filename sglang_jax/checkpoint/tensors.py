"""Checks that a checkpoint has exactly the tensors that its model needs."""

from __future__ import annotations

from collections.abc import Container, Sequence

from sglang_jax.architectures.manifest import ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import HEADS, OPTIONAL, ParameterKind, Part, hf_name
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.errors import CheckpointError

_HARMLESS = (
    "rotary_emb.inv_freq",
    "self_attn.q_scale",
    "self_attn.attn.q_scale",
    "self_attn.q_proj.q_scale",
    "self_attn.q_proj.output_scale",
    "self_attn.prob_output_scale",
    "self_attn.attn.prob_scale",
)
"""Ignored endings: rotary frequencies of old checkpoints, which follow from the config, and scales of queries and
probabilities, which are never rounded to 8 bits here."""

_MTP = ("mtp.", "model.mtp_")
"""Prefixes of multi-token prediction layers in some checkpoints (Qwen3.5, ERNIE 4.5); they are not used."""

_MAX_LISTED = 500
"""Maximum faults in an error text: a model with experts may lack very many tensors."""


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the tensors of multi-token prediction layers, which are not read."""
    behind = range(config.num_layers, config.num_layers + config.mtp_layers)
    return (*_MTP, *(f"model.layers.{number}." for number in behind))


def expected_tensors(config: ModelConfig, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that a checkpoint of the model must have, by Hugging Face name; matrices are [out, in].
    `present`: see `Manifest.tensors`."""
    return manifest_of(config).tensors(present)


def check_tensors(reader: TensorReader, config: ModelConfig) -> None:
    """Checks names and shapes of a checkpoint's tensors against its config; reads no values.

    Ignores an output matrix next to tied embeddings, one that a pooler replaces, rotary frequencies, multi-token
    prediction layers, and scales of queries and probabilities. Optional parameters of one kind must be all present or
    all absent. Raises
    `CheckpointError` naming the missing, extra and misshapen tensors, at most 500 of them.
    """
    expected = expected_tensors(config, reader.names())
    unused = mtp_prefixes(config)
    present = {name for name in reader.names() if not name.endswith(_HARMLESS) and not name.startswith(unused)}
    names = family_named(config.architecture).names
    if config.tie_word_embeddings:
        present.discard(hf_name(names[Part.HEAD], ParameterKind.WEIGHT, None))
    if config.pooler is not None:
        heads = (hf_name(name, kind, None) for part, name in names.items() if part in HEADS for kind in ParameterKind)
        present -= set(heads) - expected.keys()
    optional = list(manifest_of(config).optional.values())
    further = {name for spec in optional for name in spec.spellings} & present
    present -= further
    faults = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in present]
    faults += [f"extra: {name} {reader.shape(name)}" for name in sorted(present - expected.keys())]
    for name, shape in expected.items():
        if name in present and reader.shape(name) != shape:
            faults.append(f"misshapen: {name} is {reader.shape(name)}, the config requires {shape}")
    for kind in OPTIONAL:
        faults += _faults_of_optional([spec for spec in optional if spec.name.kind is kind], further, reader)
    if faults:
        raise CheckpointError(
            f"the tensors do not fit a {config.architecture} model of {config.num_layers} layers "
            f"({len(faults)} faults):{listed(faults)}"
        )


def _faults_of_optional(specs: Sequence[ParameterSpec], present: Container[str], reader: TensorReader) -> list[str]:
    """Describes faults of optional parameters of one kind, if any is present: missing ones, two tensors for one
    parameter, and wrong shapes. A parameter with a number per head may also be stored as one number."""
    found = [[at for at, name in enumerate(spec.spellings) if name in present] for spec in specs]
    used = next((at[0] for at in found if at), None)
    if used is None:
        return []
    faults = []
    for spec, at in zip(specs, found, strict=True):
        names = sorted(spec.spellings[each] for each in at)
        if not names:
            faults.append(f"missing: {spec.spellings[used]} (other {OPTIONAL[spec.name.kind]} are present)")
        if len(names) > 1:
            faults.append(f"extra: {' and '.join(names)} are {spec.name.kind}s of the same {spec.name.part}s")
        one_or_all, heads = len(spec.shape) == 1, spec.shape[0]
        wanted = f"one number, or one for each of {heads} kv heads" if one_or_all else spec.shape
        for name in names:
            shape = reader.shape(name)
            if shape != spec.shape and not (one_or_all and [n for n in shape if n != 1] in ([], [heads])):
                faults.append(f"misshapen: {name} is {shape}, it must be {wanted}")
    return list(dict.fromkeys(faults))  # a tensor may be shared by keys and values


def listed(faults: Sequence[str]) -> str:
    more = f"\n  and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
    return "".join(f"\n  {fault}" for fault in faults[:_MAX_LISTED]) + more

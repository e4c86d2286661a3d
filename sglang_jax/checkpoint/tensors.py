"""Whether a checkpoint has exactly the tensors that its model needs."""

from __future__ import annotations

from collections.abc import Container, Sequence

from sglang_jax.architectures.manifest import ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import OPTIONAL, Kind, Part, hf_name
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
"""Old checkpoints store the rotary frequencies, which follow from the config. Some quantisers write scales of queries
and probabilities: neither is ever rounded to 8 bits here."""

_GUESSING = "mtp."
"""Layers that predict further tokens, which some checkpoints (Qwen3.5) bring; nothing here uses them."""

_MOST_TOLD = 500
"""Faults that an error names: a model with experts may lack very many tensors."""


def of_guessing_layers(config: ModelConfig) -> tuple[str, ...]:
    """What names of tensors begin with that belong to layers which predict further tokens: nothing reads them."""
    behind = range(config.num_layers, config.num_layers + config.mtp_layers)
    return (_GUESSING, *(f"model.layers.{number}." for number in behind))


def expected_tensors(config: ModelConfig, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that a checkpoint of the model has; matrices are [out, in].
    `present`: see `Manifest.tensors`."""
    return manifest_of(config).tensors(present)


def check_tensors(reader: TensorReader, config: ModelConfig) -> None:
    """Compares what a checkpoint holds with what its config calls for; reads no values.

    An output matrix beside tied embeddings, stored rotary frequencies, layers that guess, and scales of queries are let
    pass. Of a kind of optional parameters there must be none, or all.

    **Raises:** `CheckpointError` naming the missing, extra and misshapen tensors, all or the first 500 of them.
    """
    expected = expected_tensors(config, reader.names())
    guessing = of_guessing_layers(config)
    present = {name for name in reader.names() if not name.endswith(_HARMLESS) and not name.startswith(guessing)}
    if config.tie_word_embeddings:
        head = family_named(config.architecture).names[Part.HEAD]
        present.discard(hf_name(head, Kind.WEIGHT, None))
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
    """What is wrong with optional parameters of one kind, if a checkpoint has any: one that it lacks, two tensors for
    the same, shapes that are neither the parameter's nor, where it has a number for each head, one number."""
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
    return list(dict.fromkeys(faults))  # a tensor may be of keys and values


def listed(faults: Sequence[str]) -> str:
    """A line of an error for each fault, or for the first 500 of them."""
    more = f"\n  and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
    return "".join(f"\n  {fault}" for fault in faults[:_MOST_TOLD]) + more

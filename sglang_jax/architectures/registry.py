"""The supported model families: the `FAMILY` of every module in `families/`.

A new family of existing layer types needs only a new file there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sglang_jax.architectures import families
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.pooling import OF_DECODERS, ClassifierHead
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, TensorNames, with_model_prefix
from sglang_jax.errors import CheckpointError


def _no_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufForm:
    """How GGUF files store a family.

    - `name`: `general.architecture`.
    - `fields`: metadata keys in addition to the common ones, by the equivalent fields of config.json.
    - `derive`: computes fields without a key from the common ones.
    - `interleaved`: q and k are stored for adjacent rotary pairs; in other formats, for halves.
    - `norms_hold_offset`: stored norm weights include the offset, unlike those in Hugging Face's folders.
    - `windowed`: if two families have the same name, this is the one with a window.
    - `experts`: files have mixtures of experts; this also distinguishes families with the same name.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_fields
    interleaved: bool = False
    norms_hold_offset: bool = False
    windowed: bool = False
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """Checkpoints for text and images whose text model is of a family.

    - `class_name`: the entry of config.json's `architectures`.
    - `text_type`: `model_type` of `text_config`; None if it is the family's name.
    - `defaults`: fields of `text_config` that published files lack.
    """

    class_name: str
    text_type: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Checkpoints of one architecture.

    - `name`: `model_type` of config.json, and `ModelConfig.architecture`.
    - `class_name`: the entry of config.json's `architectures`.
    - `configure`: reads a config.json, or a GGUF file's metadata with the same names. Raises `CheckpointError` for
      missing, mistyped or unsupported fields.
    - `multimodal`: checkpoints for text and images, of which the text model is served; None without.
    - `to_hf`: writes the fields of config.json for a model; None if unsupported.
    - `classifier`: the head of `...ForSequenceClassification`; None if that class is not supported.
    - `without_head`: for the tensors of a checkpoint without a head, or whose head is not used: the names that `names`
      defines → names in the checkpoint.
    """

    name: str
    class_name: str
    configure: Callable[[JsonFields], ModelConfig]
    names: TensorNames = field(default_factory=lambda: LLAMA_NAMES)
    gguf: GgufForm | None = None
    multimodal: Multimodal | None = None
    to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None
    classifier: ClassifierHead | None = OF_DECODERS
    without_head: Callable[[Collection[str]], dict[str, str]] = with_model_prefix


@cache
def known_families() -> tuple[Family, ...]:
    """All families, by name."""
    found = []
    for module in pkgutil.iter_modules(families.__path__):
        family = importlib.import_module(f"{families.__name__}.{module.name}").FAMILY
        assert isinstance(family, Family), f"{module.name}.FAMILY is {family!r}"
        found.append(family)
    return tuple(sorted(found, key=lambda family: family.name))


@cache
def family_named(name: str) -> Family:
    """The family of `ModelConfig.architecture`. Raises `CheckpointError` for an unknown one."""
    for family in known_families():
        if family.name == name:
            return family
    raise CheckpointError(f"architecture {name} is not supported; supported: {supported_classes()}")


_DECODER, _ENCODER = "ForCausalLM", "ForMaskedLM"


def _classes(family: Family) -> tuple[str, ...]:
    base = family.class_name.removesuffix(_ENCODER).removesuffix(_DECODER)
    classes = (family.class_name, base + _BARE)
    return classes if family.classifier is None else (*classes, base + CLASSIFIER)


def family_of_hf(fields: JsonFields) -> Family | None:
    """The family of a config.json: by `architectures` or, without that field, by `model_type`. None if it is not
    supported."""
    match fields.value("architectures"):
        case [str(seen)]:
            found = [family for family in known_families() if seen in _classes(family)]
        case None:
            found = [family for family in known_families() if family.name == fields.string("model_type")]
        case _:
            found = []
    return found[0] if found else None


CLASSIFIER = "ForSequenceClassification"
_BARE = "Model"


def pooled_class(fields: JsonFields) -> str | None:
    """The ending of the class in a config.json if it is that of a family's model without its head: with a matrix of
    labels (`CLASSIFIER`) or without. None for other classes."""
    match fields.value("architectures"):
        case [str(seen)]:
            return next((end for end in (CLASSIFIER, _BARE) if seen.endswith(end)), None)
        case _:
            return None


def supported_classes() -> str:
    """The class names of all families, for errors."""
    text = ", ".join(family.class_name for family in known_families())
    others = ", ".join(each.multimodal.class_name for each in known_families() if each.multimodal is not None)
    return f"{text}; and, without images, {others}"

"""The families of models that are known: every module of `families/`, by the `FAMILY` that it defines.

A new family of known kinds of layers is a new file there, and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sglang_jax.architectures import families
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, TensorNames
from sglang_jax.errors import CheckpointError


def _nothing_more(values: Mapping[str, Any]) -> dict[str, Any]:
    """No further fields."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufForm:
    """How GGUF files hold a family.

    - `name`: `general.architecture`.
    - `fields`: metadata keys apart from the common ones, by the fields of config.json that they stand for.
    - `derive`: fields that no key holds, from the common ones.
    - `interleaved`: q and k are stored for rotary pairs of neighbours, and in halves elsewhere.
    - `norms_hold_offset`: norms are stored as they multiply, whatever Hugging Face's folders hold.
    - `windowed`: of two families under one name, the one whose files have a window.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing_more
    interleaved: bool = False
    norms_hold_offset: bool = False
    windowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Checkpoints that are read in the same way.

    - `name`: `model_type` of config.json, and `ModelConfig.architecture`. `class_name`: what `architectures` there has.
    - `configure`: the model that a config.json describes, or a GGUF file's metadata under the same names. Raises
      `CheckpointError` for what is missing, mistyped or unsupported.
    - `to_hf`: fields of config.json that describe a model, or None if config.json cannot be written.
    """

    name: str
    class_name: str
    configure: Callable[[JsonFields], ModelConfig]
    names: TensorNames = field(default_factory=lambda: LLAMA_NAMES)
    gguf: GgufForm | None = None
    to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None


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


def family_of_hf(fields: JsonFields) -> Family | None:
    """The family of a config.json: by `architectures`, or, where that is silent, by `model_type`. None if no family of
    that name is known."""
    match fields.value("architectures"):
        case [str(seen)]:
            found = [family for family in known_families() if family.class_name == seen]
        case None:
            found = [family for family in known_families() if family.name == fields.string("model_type")]
        case _:
            found = []
    return found[0] if found else None


def supported_classes() -> str:
    """The class names of all families, for errors."""
    return ", ".join(family.class_name for family in known_families())

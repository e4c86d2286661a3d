"""Converts Hugging Face's config.json (and generation_config.json) to `ModelConfig`, and back."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named, family_of_hf
from sglang_jax.checkpoint.hf_quantization import MODELOPT_FILE, kv_scales_made_for, read_quantization
from sglang_jax.checkpoint.hf_unknown_fields import check_unread, unknown_family
from sglang_jax.checkpoint.stored_quantization import StoredQuantization
from sglang_jax.checkpoint.text_part import text_part, with_quantization
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError
from sglang_jax.sampling.defaults import GenerationDefaults

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


def load_hf_config(folder: Path) -> ModelConfig:
    """Reads a folder's config.json, and adds the end tokens of its generation_config.json. Raises `CheckpointError`
    naming the file, the value, and what is supported."""
    fields = JsonFields.read(folder / CONFIG_FILE)
    return model_config_from_hf(fields, _generation_fields(folder))


def has_text_part(folder: Path) -> bool:
    """Whether the folder has a model for text and images, of which the text model is served."""
    return text_part(JsonFields.read(folder / CONFIG_FILE)) is not None


def load_quantization(folder: Path) -> StoredQuantization | None:
    found = read_quantization(with_quantization(JsonFields.read(folder / CONFIG_FILE)), _fields_of_modelopt(folder))
    return None if found is None else replace(found, of_text_part=has_text_part(folder))


def load_kv_scales_made_for(folder: Path) -> KVCacheDtype | None:
    return kv_scales_made_for(JsonFields.read(folder / CONFIG_FILE), _fields_of_modelopt(folder))


def _fields_of_modelopt(folder: Path) -> JsonFields | None:
    file = folder / MODELOPT_FILE
    return JsonFields.read(file) if file.is_file() else None


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Sampling defaults from generation_config.json; empty if there is no such file."""
    fields = _generation_fields(folder)
    top_k = fields.integer("top_k")
    return GenerationDefaults(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=-1 if top_k == 0 else top_k,  # in transformers, 0 keeps all tokens
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
    )


def _generation_fields(folder: Path) -> JsonFields:
    file = folder / GENERATION_CONFIG_FILE
    return JsonFields.read(file) if file.is_file() else JsonFields({}, file)


def model_config_from_hf(fields: JsonFields, generation: JsonFields) -> ModelConfig:
    """Converts parsed files. Raises `CheckpointError` for missing, mistyped or unsupported fields."""
    family, text = family_of_hf(fields), fields
    if family is None:
        found = text_part(fields)
        if found is None:
            raise unknown_family(fields)
        family, text = found
        logger.info("%s: only the text model is served, without images", fields.file)
    if text.boolean("is_causal") is False:
        raise CheckpointError(
            f"{text.file}: is_causal is false, which is not supported for this class: its attention is causal here"
        )
    read_quantization(with_quantization(fields))  # reports unsupported quantisation before other faults
    config = family.configure(text)
    check_unread(text)
    if config.shortened:
        logger.warning("%s: %s", fields.file, config.shortened)
    ends = (*config.eos_token_ids, *generation.integers("eos_token_id"))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))


def model_config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The values of a config.json from which `load_hf_config` makes the same `ModelConfig`. Raises `CheckpointError`
    for a family without this conversion, and if Hugging Face's format cannot express `config`."""
    family = family_named(config.architecture)
    if family.to_hf is None:
        raise CheckpointError(
            f"config.json of {family.class_name} cannot be made from a GGUF file: take the model's Hugging Face folder"
        )
    values: dict[str, Any] = {"architectures": [family.class_name], **family.to_hf(config)}
    written = model_config_from_hf(JsonFields(values, Path(CONFIG_FILE)), JsonFields({}, Path(GENERATION_CONFIG_FILE)))
    if written != config:
        raise CheckpointError(f"config.json of {family.class_name} cannot express {config}; it would read {written}")
    return values


def write_hf_config(config: ModelConfig, folder: Path) -> None:
    """Writes config.json into `folder`. Raises as `model_config_to_hf`."""
    text = json.dumps(model_config_to_hf(config), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

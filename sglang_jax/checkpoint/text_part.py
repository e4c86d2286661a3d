"""The text model inside a checkpoint for text and images: its fields of config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Collection

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.registry import Family, Multimodal, known_families
from sglang_jax.errors import CheckpointError, quote

_OF_MODEL = "model.language_model."
_OF_WHOLE = "language_model."
_HEAD = "lm_head."
_TEXT = "text_config"
_TIED, _QUANTIZATION = "tie_word_embeddings", "quantization_config"
_OUTER = ("bos_token_id", "dtype", "eos_token_id", "torch_dtype")
"""Fields that `text_config` may lack and the whole config.json has."""


def text_part(fields: JsonFields) -> tuple[Family, JsonFields] | None:
    """The family of the text model of a config.json for text and images, and the fields of the text model. None if it
    has no such model. Raises `CheckpointError` if `text_config` is not an object, or of another family than in the
    supported models of this class."""
    match fields.value("architectures"):
        case [str(seen)]:
            pass
        case _:
            return None
    for family in known_families():
        form = family.multimodal
        if form is None or form.class_name != seen or (text := fields.nested(_TEXT)) is None:
            continue
        found, wanted = text.string("model_type"), form.text_type or family.name
        if found not in (None, wanted):
            raise CheckpointError(f"{fields.file}: {_TEXT}.model_type of {seen} is {quote(found)}; supported: {wanted}")
        return family, JsonFields(_merged(fields, text, form), fields.file, f"{_TEXT}.")
    return None


def with_quantization(fields: JsonFields) -> JsonFields:
    """A config.json whose `quantization_config` is that of its text model, if the whole has none."""
    text = fields.values.get(_TEXT)
    if fields.values.get(_QUANTIZATION) is not None or not isinstance(text, dict) or _QUANTIZATION not in text:
        return fields
    values = {**fields.values, _QUANTIZATION: text[_QUANTIZATION]}
    return JsonFields(values, fields.file, fields.within, fields.accessed)


def _merged(fields: JsonFields, text: JsonFields, form: Multimodal) -> dict[str, object]:
    outer = {name: fields.values[name] for name in _OUTER if name in fields.values}
    # transformers ties embeddings by the field of the whole model.
    tied = {_TIED: fields.values[_TIED]} if _TIED in fields.values else {}
    return {**form.defaults, **outer, **text.values, **tied}


def text_names(names: Collection[str]) -> dict[str, str]:
    """The tensors of the text model among those of a checkpoint for text and images: names in a text checkpoint → names
    in this one. All if the checkpoint has already the names of a text checkpoint."""
    if not any(name.startswith((_OF_MODEL, _OF_WHOLE)) for name in names):
        return {name: name for name in names}
    found = {}
    for name in names:
        if name.startswith(_OF_MODEL):
            found["model." + name.removeprefix(_OF_MODEL)] = name
        elif name.startswith(_OF_WHOLE):
            found[name.removeprefix(_OF_WHOLE)] = name
        elif name.startswith(_HEAD):
            found[name] = name
    return found


def spellings_of(layer: str) -> tuple[str, str, str]:
    """The names that a layer of the text model may have in lists of a checkpoint for text and images."""
    inner = layer.removeprefix("model.") if layer.startswith("model.") else None
    return layer, _OF_WHOLE + layer, layer if inner is None else _OF_MODEL + inner

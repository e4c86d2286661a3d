"""Finds what a checkpoint gives for a text: next tokens, a vector, or scores of labels.

Vectors are described by sentence-transformers' files (`modules.json` and those that it names), by the class in
config.json, or by the metadata of a GGUF file; labels by the class and its `id2label`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from sglang_jax.architectures.files import read_file
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.pooling import OF_DECODERS, Activation, ClassifierHead, Pooler, Pooling
from sglang_jax.architectures.registry import CLASSIFIER, pooled_class
from sglang_jax.checkpoint.gguf_file import GgufFile
from sglang_jax.config import PoolingType, Task
from sglang_jax.errors import CheckpointError, ConfigError, quote

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_FOLDER = re.compile(r"(?!\.)[\w.-]{1,100}(/(?!\.)[\w.-]{1,100})?", re.ASCII)
_MAX_BYTES = 1 << 20
_MAX_LABELS = 65536

_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Fields of a pooling's config.json up to sentence-transformers 5, and their names in `pooling_mode` since."""

_POOLINGS = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "last": Pooling.LAST}

_OF_GGUF = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_RANK_OF_GGUF = 4

_ACTIVATIONS = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX}


def pooler_of_folder(
    folder: Path,
    task: Task,
    pooling: PoolingType,
    *,
    causal: bool = True,
    classifier: ClassifierHead | None = OF_DECODERS,
) -> Pooler | None:
    """What a Hugging Face folder gives, None for next tokens; `task` and `pooling` decide where they are not auto.
    `causal`: see `ModelConfig`. `classifier`: see `Family`.
    Raises `CheckpointError` for a pooling that is not supported, `ConfigError` for options that do not fit."""
    fields = JsonFields.read(folder / "config.json")
    kind = pooled_class(fields)
    stored = _of_sentence_transformers(folder)
    if task is Task.AUTO:
        task = _task_of(kind, stored)
        if task is Task.GENERATE and not causal:
            task = Task.EMBED
    if task is Task.GENERATE and not causal:
        raise ConfigError(f"{folder}: the model is an encoder, which generates no text: use model_task embed")
    match task:
        case Task.GENERATE:
            _refuse_pooling(pooling)
            return None
        case Task.CLASSIFY:
            if kind != CLASSIFIER or classifier is None:
                raise ConfigError(
                    "model_task classify needs a checkpoint with a matrix of labels, a class that ends with "
                    f"{CLASSIFIER}; {folder / 'config.json'} has {quote(fields.value('architectures'))}"
                )
            return _classifier(folder, fields, pooling, classifier)
    for what in _added_to_texts(folder):
        logger.warning("%s: sentence-transformers adds %s to each text. Here it is part of the request.", folder, what)
    found = stored or Pooler(pooling=Pooling.LAST if causal else Pooling.MEAN)
    return found if pooling is PoolingType.AUTO else Pooler(pooling=Pooling(pooling.value), normalised=found.normalised)


def pooler_of_gguf(file: GgufFile, task: Task, pooling: PoolingType) -> Pooler | None:
    """The same of a GGUF file. Raises as `pooler_of_folder`."""
    name = file.require("general.architecture", str)
    stored = file.get(f"{name}.pooling_type", int) or 0
    if task is Task.CLASSIFY or (task is Task.AUTO and stored == _RANK_OF_GGUF):
        raise ConfigError(f"{file.path}: labels of GGUF files are not supported; give the Hugging Face folder")
    if task is Task.GENERATE or (task is Task.AUTO and stored == 0):
        _refuse_pooling(pooling)
        return None
    if pooling is PoolingType.AUTO and stored and stored not in _OF_GGUF:
        raise CheckpointError(f"{file.path}: {name}.pooling_type is {stored}; supported: {sorted(_OF_GGUF)}")
    return Pooler(pooling=_OF_GGUF.get(stored, Pooling.LAST) if pooling is PoolingType.AUTO else Pooling(pooling.value))


def pooler_files(folder: Path) -> list[str]:
    """Names of the files of a folder that, with config.json, say how vectors and scores are made."""
    poolings = sorted(file.relative_to(folder).as_posix() for file in folder.glob("*_Pooling/config.json"))
    names = (_MODULES, _SETTINGS, _TRANSFORMER, *poolings)
    return [name for name in names if (folder / name).is_file()]


def _task_of(kind: str | None, stored: Pooler | None) -> Task:
    if kind == CLASSIFIER:
        return Task.CLASSIFY
    return Task.GENERATE if kind is None and stored is None else Task.EMBED


def _refuse_pooling(pooling: PoolingType) -> None:
    if pooling is not PoolingType.AUTO:
        raise ConfigError(f"pooling {pooling.value} needs model_task embed: this model generates text")


def _classifier(folder: Path, fields: JsonFields, pooling: PoolingType, head: ClassifierHead) -> Pooler:
    labels = fields.nested("id2label")
    names = ["LABEL_0", "LABEL_1"]  # transformers' default
    if labels is not None:
        numbers = [str(number) for number in range(len(labels.values))]
        if not 0 < len(numbers) <= _MAX_LABELS or labels.values.keys() != set(numbers):
            raise CheckpointError(
                f"{fields.file}: id2label must name 1 to {_MAX_LABELS} labels, numbered from 0; got "
                f"{quote(list(labels.values))}"
            )
        names = [str(labels.values[number]) for number in numbers]
    supported = [head.pooling.value] if head.dense else ["last", "cls"]
    if pooling is not PoolingType.AUTO and pooling.value not in supported:
        raise ConfigError(
            f"pooling {pooling.value} is not supported with model_task classify and this model; supported: "
            f"{', '.join(supported)}"
        )
    return Pooler(
        pooling=head.pooling if pooling is PoolingType.AUTO else Pooling(pooling.value),
        labels=tuple(names),
        bias=head.bias,
        dense=head.dense,
        activation=_activation(folder, fields, len(names)),
    )


def _activation(folder: Path, fields: JsonFields, labels: int) -> Activation:
    for file, field, stored in _stored_activations(folder, fields):
        if stored is None:
            continue
        name = stored.rsplit(".", 1)[-1]
        if name not in _ACTIVATIONS:
            raise CheckpointError(f"{file}: {field} is {quote(stored)}; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]
    match fields.string("problem_type"):
        case "regression":
            return Activation.NONE
        case "multi_label_classification":
            return Activation.SIGMOID
        case _:
            return Activation.SIGMOID if labels == 1 else Activation.SOFTMAX


def _added_to_texts(folder: Path) -> Iterator[str]:
    """What sentence-transformers adds to texts by itself, by the files of releases 3 and later."""
    settings, transformer = folder / _SETTINGS, folder / _TRANSFORMER
    if settings.is_file():
        fields = JsonFields.read(settings)
        name, prompts = fields.string("default_prompt_name"), fields.nested("prompts")
        prompt = None if name is None or prompts is None else prompts.string(name)
        if prompt:
            yield f"the prompt {quote(prompt)}"
    modalities = JsonFields.read(transformer).nested("modality_config") if transformer.is_file() else None
    if modalities is not None and modalities.nested("message") is not None:
        yield "its chat template"


def _stored_activations(folder: Path, fields: JsonFields) -> Iterator[tuple[Path, str, str | None]]:
    """Where releases 5 and later, 4, and up to 3 of sentence-transformers keep the activation of a cross-encoder: file,
    field, value. The first that is there counts."""
    file = folder / _SETTINGS
    if file.is_file():
        yield file, "activation_fn", JsonFields.read(file).string("activation_fn")
    own = fields.nested("sentence_transformers")
    yield fields.file, "sentence_transformers.activation_fn", None if own is None else own.string("activation_fn")
    old = "sbert_ce_default_activation_function"
    yield fields.file, old, fields.string(old)


def _of_sentence_transformers(folder: Path) -> Pooler | None:
    file = folder / _MODULES
    if not file.is_file():
        return None
    try:
        modules = json.loads(read_file(file, _MAX_BYTES))
        kinds = [(str(each["type"]).rsplit(".", 1)[-1], str(each.get("path", ""))) for each in modules]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a list of sentence-transformers' modules: {error}") from error
    pooling = [path for kind, path in kinds if kind == "Pooling"]
    if not pooling:
        return None
    others = [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or len(pooling) > 1 or any(path for kind, path in kinds if kind == "Transformer"):
        raise CheckpointError(
            f"{file}: modules {', '.join(kind for kind, _ in kinds)} are not supported; supported: a Transformer in "
            "this folder, a Pooling, and Normalize"
        )
    # Only the name is checked: in the cache of the hub, files are links out of the folder.
    if not _FOLDER.fullmatch(pooling[0]):
        raise CheckpointError(f"{file}: {quote(pooling[0])}, the path of its Pooling, is not a folder in this one")
    normalised = any(kind == "Normalize" for kind, _ in kinds)
    return Pooler(pooling=_stored_pooling(JsonFields.read(folder / pooling[0] / "config.json")), normalised=normalised)


def _stored_pooling(fields: JsonFields) -> Pooling:
    mode = fields.value("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [name for field, name in _OLD_MODES.items() if fields.boolean(field)]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(_POOLINGS):
        raise CheckpointError(f"{fields.file}: the pooling is {quote(modes)}; supported: one of {', '.join(_POOLINGS)}")
    if fields.boolean("include_prompt") is False:
        raise CheckpointError(f"{fields.file}: include_prompt false is not supported")
    return _POOLINGS[modes[0]]

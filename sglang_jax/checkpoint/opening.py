"""Opens a checkpoint of any format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.pooling import Pooler
from sglang_jax.architectures.registry import family_named
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.end_tokens import end_token_ids, separator_id
from sglang_jax.checkpoint.gguf_config import gguf_generation_defaults, gguf_model_config
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.gguf_reader import GgufReader
from sglang_jax.checkpoint.group_reader import GroupReader, find_groups, tensors_of_groups
from sglang_jax.checkpoint.hf_config import (
    has_text_part,
    load_generation_defaults,
    load_hf_config,
    load_kv_scales_made_for,
    load_quantization,
    model_config_to_hf,
)
from sglang_jax.checkpoint.orbax_marker import read_orbax_kv_scales
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.poolers import pooler_of_folder, pooler_of_gguf
from sglang_jax.checkpoint.quantized_reader import QuantizedReader
from sglang_jax.checkpoint.reader import TensorReader, TensorsInMemory
from sglang_jax.checkpoint.resolve import DEMO, ModelSource, SourceKind, resolve_model, resolve_tokenizer
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.checkpoint.stored_quantization import StoredQuantization
from sglang_jax.checkpoint.tensors import check_tensors
from sglang_jax.checkpoint.text_part import text_names
from sglang_jax.checkpoint.tied_head import as_tied_in_file
from sglang_jax.checkpoint.transformers_config import load_transformers_config
from sglang_jax.config import EngineConfig, KVCacheDtype, LoadFormat, ModelImpl, PoolingType, Task
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.sampling.defaults import GenerationDefaults

logger = logging.getLogger(__name__)

DEMO_SAMPLING = GenerationDefaults(temperature=0.2, top_p=0.9)
"""From the model card of the embedded model; its file has no sampling values."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk or in a bucket; its tensors are checked against its config, but not read yet.

    - `reader`: None for an Orbax checkpoint, which the backend restores directly to its devices.
    - `transformers_config`: values of config.json for a model that transformers builds, otherwise None. Its tensors are
      not checked, and for dummy weights `reader` is None.
    """

    source: ModelSource
    config: ModelConfig
    reader: TensorReader | None
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    transformers_config: Mapping[str, Any] | None = None

    @property
    def tokenizer_source(self) -> ModelSource:
        """The argument of `load_tokenizer`: all formats store the tokenizer with the weights."""
        return self.source

    @property
    def reads_gguf(self) -> bool:
        return isinstance(self.reader, GgufReader)

    def kv_parameters(self) -> ParameterReader:
        """A reader of the optional parameters of the KV cache. Raises `CheckpointError` for a damaged Orbax
        checkpoint."""
        if self.reader is None and self.transformers_config is None:
            return ParameterReader(read_orbax_kv_scales(self.source.path, self.config)[0], self.config)
        return ParameterReader(self.reader or TensorsInMemory({}), self.config)

    def kv_scales_made_for(self) -> KVCacheDtype | None:
        """The KV cache type for which its KV scales were made; None if it does not say. Raises `CheckpointError` for a
        scheme that one scale per kv head cannot express."""
        if self.reader is None:
            return read_orbax_kv_scales(self.source.path, self.config)[1]
        # GGUF files have no KV scales, so this is a folder.
        return load_kv_scales_made_for(self.source.path)


def open_checkpoint(
    model_path: str,
    load_format: LoadFormat = LoadFormat.AUTO,
    *,
    seed: int = 0,
    revision: str | None = None,
    model_impl: ModelImpl = ModelImpl.NATIVE,
    task: Task = Task.AUTO,
    pooling: PoolingType = PoolingType.AUTO,
) -> Checkpoint:
    """Finds the checkpoint (see `resolve_model`), reads its config, and checks names and shapes of its tensors.

    With `LoadFormat.DUMMY`, only the config is read, and weights are random, a function of `seed`. With
    `ModelImpl.TRANSFORMERS`, the family need not be known, and tensors are checked when the model is built. Special
    token ids outside the vocabulary are removed, with a warning. `task`, `pooling`: what the model is used for. Raises
    `CheckpointError` naming the file, field or tensors at fault, and `ConfigError` for a task that the model lacks.
    """
    source = resolve_model(model_path, load_format, revision)
    if model_impl is ModelImpl.TRANSFORMERS:
        if task not in (Task.AUTO, Task.GENERATE):
            raise ConfigError(f"model_task {task.value} needs model_impl native")
        found = _open_for_transformers(source, load_format is LoadFormat.DUMMY, demo=model_path == DEMO)
    else:
        found = _open(model_path, source, load_format, seed, task, pooling)
    return replace(found, config=_with_known_ids(found.config, found.source))


def open_served(config: EngineConfig, model_path: str | None = None) -> Checkpoint:
    """Opens the checkpoint of an engine's options, or with `model_path` another one for the same use. Raises as
    `open_checkpoint`, and `CheckpointError` if a classifier needs a separator that the tokenizer does not have."""
    found = open_checkpoint(
        config.model_path if model_path is None else model_path,
        config.load_format,
        seed=config.random_seed,
        revision=config.revision if model_path is None else None,
        model_impl=config.model_impl,
        task=config.model_task,
        pooling=config.pooling,
    )
    learnt, pooler = found.config.learnt_positions, found.config.pooler
    if learnt is None or not learnt.marks_pairs or pooler is None or not pooler.labels:
        return found
    separator = separator_id(tokenizer_source(config))
    return replace(found, config=replace(found.config, learnt_positions=replace(learnt, separator=separator)))


def tokenizer_source(config: EngineConfig) -> ModelSource:
    """Finds the tokenizer that `config` names. Raises `CheckpointError`."""
    if config.tokenizer_path is None:
        return resolve_tokenizer(config.model_path, config.tokenizer_revision or config.revision, of_model=True)
    return resolve_tokenizer(config.tokenizer_path, config.tokenizer_revision)


def with_end_tokens(checkpoint: Checkpoint, tokenizer: ModelSource) -> Checkpoint:
    """Adds the end tokens of its tokenizer to a checkpoint's. Raises `CheckpointError` for a damaged tokenizer."""
    config = checkpoint.config
    further = [token for token in end_token_ids(tokenizer) if token < config.vocab_size]
    ends = tuple(dict.fromkeys((*config.eos_token_ids, *further)))
    return replace(checkpoint, config=replace(config, eos_token_ids=ends))


def _with_known_ids(config: ModelConfig, source: ModelSource) -> ModelConfig:
    ends = tuple(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
    begin = config.bos_token_id
    if begin is not None and not 0 <= begin < config.vocab_size:
        begin = None
    if (ends, begin) == (config.eos_token_ids, config.bos_token_id):
        return config
    logger.warning(
        "%s has token ids outside its vocabulary of %d tokens, which are ignored: eos_token_id %s, bos_token_id %s",
        source.address,
        config.vocab_size,
        list(config.eos_token_ids),
        config.bos_token_id,
    )
    return replace(config, eos_token_ids=ends, bos_token_id=begin)


def _open(
    model_path: str, source: ModelSource, load_format: LoadFormat, seed: int, task: Task, pooling: PoolingType
) -> Checkpoint:
    dummy = load_format is LoadFormat.DUMMY
    if source.kind is SourceKind.GGUF:
        file = open_gguf(source.path)
        config = _with_pooler(gguf_model_config(file), pooler_of_gguf(file, task, pooling))
        reader: TensorReader = DummyReader(config, seed) if dummy else GgufReader(file, config)
        check_tensors(reader, config)
        defaults = DEMO_SAMPLING if model_path == DEMO else gguf_generation_defaults(file)
        return Checkpoint(source, config, reader, defaults)
    config = load_hf_config(source.path)
    family = family_named(config.architecture)
    found = pooler_of_folder(source.path, task, pooling, causal=config.causal, classifier=family.classifier)
    config = _with_pooler(config, found)
    defaults = load_generation_defaults(source.path)
    if source.kind is SourceKind.ORBAX and not dummy:
        return Checkpoint(source, config, None, defaults)
    quantization = load_quantization(source.path)
    if dummy:
        reader = DummyReader(config, seed, quantization)
    else:
        files = SafetensorsReader(source.path, source.remote)
        if has_text_part(source.path):
            files = files.renamed(text_names(files.names()))
        if config.pooler is not None:
            files = files.renamed(family.without_head(files.names()))
        reader = files if quantization is None else _quantized(files, quantization, config)
        config = as_tied_in_file(config, reader)
    check_tensors(reader, config)
    return Checkpoint(source, config, reader, defaults)


def _with_pooler(config: ModelConfig, pooler: Pooler | None) -> ModelConfig:
    return config if pooler is None else config.pooled(pooler)


def _quantized(files: SafetensorsReader, quantization: StoredQuantization, config: ModelConfig) -> TensorReader:
    grouped = find_groups(files, quantization, config)
    others = QuantizedReader(files.without(tensors_of_groups(grouped)), quantization, config)
    return GroupReader(others, grouped) if grouped else others


def _open_for_transformers(source: ModelSource, dummy: bool, *, demo: bool) -> Checkpoint:
    """Opens a checkpoint for transformers. Raises `CheckpointError` for Orbax, which it cannot read."""
    if source.kind is SourceKind.GGUF:
        file = open_gguf(source.path)
        config = gguf_model_config(file)
        reader = None if dummy else GgufReader(file, config)
        defaults = DEMO_SAMPLING if demo else gguf_generation_defaults(file)
        return Checkpoint(source, config, reader, defaults, transformers_config=model_config_to_hf(config))
    if source.kind is SourceKind.ORBAX:
        raise CheckpointError(f"{source.address} is an Orbax checkpoint, which model_impl transformers cannot read")
    values, config = load_transformers_config(source.path)
    tensors = None if dummy else SafetensorsReader(source.path, source.remote)
    return Checkpoint(source, config, tensors, load_generation_defaults(source.path), transformers_config=values)

"""`convert`: writes a checkpoint in a format that loads faster."""

from __future__ import annotations

import json
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field

from sglang_jax.cli.options import options_of
from sglang_jax.config import Device, LoadFormat, WeightQuantization
from sglang_jax.errors import ConfigError


class TargetFormat(StrEnum):
    ORBAX = "orbax"


class StoredDtype(StrEnum):
    """The dtype in which the backend that reads the converted weights computes."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class ConvertConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str | None = Field(None, description="`demo`, a folder, a .gguf file, a hub id, or gs://BUCKET/PATH")
    revision: str | None = Field(None, description="branch, tag or commit of a repository on the hub")
    load_format: LoadFormat = Field(LoadFormat.AUTO, description="how the weights are stored")
    to: TargetFormat = Field(description="format to write")
    output: Path = Field(description="output folder; created if missing")
    dtype: StoredDtype = Field(
        StoredDtype.AUTO,
        description="type of the weights written; auto: bfloat16 for a bfloat16 checkpoint or GGUF file, else float32",
    )
    quantization: WeightQuantization = Field(
        WeightQuantization.AUTO,
        description="quantise the matrices of layers to int8 or fp8, with a scale for each row; auto: as they are "
        "stored in the checkpoint",
    )


@click.command(short_help="Write a checkpoint that loads faster.")
@click.argument("model", required=False)
@options_of(config=ConvertConfig)
def convert(config: ConvertConfig, model: str | None) -> int:
    """Write MODEL (as for --model-path) in another format: weights, config and tokenizer."""
    path = _the_model(config, model)
    # Imported late: --help must be fast, and other commands must not import a backend.
    import jax.numpy as jnp

    from sglang_jax.architectures.tensor_names import ParameterKind
    from sglang_jax.checkpoint import open_checkpoint, write_hf_config
    from sglang_jax.checkpoint.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE, load_hf_config
    from sglang_jax.checkpoint.orbax_marker import kv_scales_to_json
    from sglang_jax.checkpoint.tokenizer import load_tokenizer
    from sglang_jax.jax_runner.devices import select_device
    from sglang_jax.jax_runner.orbax_checkpoint import save_orbax
    from sglang_jax.jax_runner.weights import load_weights
    from sglang_jax.layers.sharding import make_mesh
    from sglang_jax.models import AttentionImplementation, build_model
    from sglang_jax.runner.quantization import encodings_of, kept_encodings, quantization_for

    checkpoint = open_checkpoint(path, config.load_format, revision=config.revision)
    if checkpoint.reader is None:
        raise ConfigError(f"{checkpoint.source.address} is an Orbax checkpoint already")
    if config.quantization is WeightQuantization.INT4:
        raise ConfigError("quantization int4 cannot be stored in Orbax: choose int8 or fp8, or give it to the server")
    quantization = quantization_for(checkpoint, config.quantization)
    encodings = encodings_of(checkpoint, quantization)
    dtype = _dtype(config.dtype, checkpoint.config.dtype)
    device = select_device(Device.CPU)
    model = build_model(
        checkpoint.config,
        dtype=jnp.dtype(dtype.value),
        attention=AttentionImplementation.REFERENCE,
        platform=device.platform,
        encodings=encodings,
    )
    kv_scales, kv_parameters = None, checkpoint.kv_parameters()
    if kv_parameters.has(ParameterKind.SCALE):
        kv_parameters.check(ParameterKind.SCALE)
        kv_scales = kv_scales_to_json(kv_parameters, checkpoint.kv_scales_made_for())
    load_weights(model, checkpoint.reader, checkpoint.config, make_mesh([device]), quantization)
    with tempfile.TemporaryDirectory() as folder:
        extra_files = Path(folder)
        stored_config = checkpoint.source.path / CONFIG_FILE
        if stored_config.is_file():
            own_head = not checkpoint.config.tie_word_embeddings
            if own_head and load_hf_config(checkpoint.source.path).tie_word_embeddings:
                # The checkpoint has its own head although its config ties it. The output keeps the head.
                untied = json.loads(stored_config.read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
                (extra_files / CONFIG_FILE).write_text(json.dumps(untied, indent=2), encoding="utf-8")
            else:
                shutil.copy(stored_config, extra_files)
        else:
            write_hf_config(checkpoint.config, extra_files)
        load_tokenizer(checkpoint.tokenizer_source).save(extra_files)
        generation_config = checkpoint.source.path / GENERATION_CONFIG_FILE
        if generation_config.is_file():
            shutil.copy(generation_config, extra_files)
        elif recommended := checkpoint.generation_defaults.recommended():
            (extra_files / GENERATION_CONFIG_FILE).write_text(json.dumps(recommended, indent=2), encoding="utf-8")
        save_orbax(
            config.output,
            checkpoint.config,
            model,
            sorted(extra_files.iterdir()),
            kv_scales,
            kept_encodings(checkpoint.config, encodings),
        )
    click.echo(f"{checkpoint.source.address} is now {config.output} in {dtype.value}: serve it with --model-path")
    return 0


def _the_model(config: ConvertConfig, model: str | None) -> str:
    if None not in (model, config.model_path) and model != config.model_path:
        raise click.UsageError(f"two models are given: {model} and --model-path {config.model_path}")
    path = model or config.model_path
    if path is None:
        raise click.UsageError("Missing argument 'MODEL': what to convert, as for --model-path")
    return path


def _dtype(wanted: StoredDtype, stored: str) -> StoredDtype:
    """Returns the dtype to write. float16 becomes float32, which has all its values."""
    if wanted is not StoredDtype.AUTO:
        return wanted
    return StoredDtype.BFLOAT16 if stored == StoredDtype.BFLOAT16.value else StoredDtype.FLOAT32

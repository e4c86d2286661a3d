"""`convert`: writes a checkpoint in another format: one that loads faster, or that is quantised."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field

from sglang_jax.cli.options import options_of
from sglang_jax.config import LoadFormat, WeightQuantization
from sglang_jax.errors import ConfigError

MEASURED_TOKENS = 64
"""On which the errors of layers are measured."""


class TargetFormat(StrEnum):
    ORBAX = "orbax"
    COMPRESSED_TENSORS = "compressed-tensors"


class StoredDtype(StrEnum):
    """The dtype in which the backend that reads the converted weights computes."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    def of(self, stored: str) -> StoredDtype:
        """The dtype to write. float16 becomes float32, which has all its values."""
        if self is not StoredDtype.AUTO:
            return self
        return StoredDtype.BFLOAT16 if stored == StoredDtype.BFLOAT16.value else StoredDtype.FLOAT32


class ConvertConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str | None = Field(None, description="`demo`, a folder, a .gguf file, a hub id, or gs://BUCKET/PATH")
    revision: str | None = Field(None, description="branch, tag or commit of a repository on the hub")
    load_format: LoadFormat = Field(LoadFormat.AUTO, description="how the weights are stored")
    to: TargetFormat | None = Field(
        None,
        description="format to write: orbax, for the JAX backend, or compressed-tensors, a Hugging Face folder of "
        "quantised weights, which is the default with quantize",
    )
    output: Path = Field(description="output folder; created if missing")
    dtype: StoredDtype = Field(
        StoredDtype.AUTO,
        description="type of the weights that are not quantised; auto: bfloat16 for a bfloat16 checkpoint or GGUF "
        "file, else float32, and in a Hugging Face folder as they are stored",
    )
    quantize: WeightQuantization = Field(
        WeightQuantization.AUTO,
        description="quantise the matrices of layers: to int8 or fp8 with a scale for each row, or to int4 with one "
        "for each 128, 64 or 32 weights of a row; auto: as they are stored in the checkpoint",
    )
    error_layers: int = Field(
        64,
        ge=0,
        description="with quantize, maximum layers whose error is measured and printed, evenly spaced, by computing "
        f"{MEASURED_TOKENS} tokens once for each on the CPU; 0 to measure nothing",
    )


@click.command(short_help="Write a checkpoint that loads faster, or quantised.")
@click.argument("model", required=False)
@options_of(config=ConvertConfig)
def convert(config: ConvertConfig, model: str | None) -> int:
    """Write MODEL (as for --model-path) in another format: weights, config and tokenizer."""
    path, target = _the_model(config, model), _target(config)
    # Imported late: --help must be fast, and other commands must not import a backend.
    from sglang_jax.checkpoint import open_checkpoint
    from sglang_jax.cli.conversion import print_errors, write_folder, write_orbax
    from sglang_jax.runner.quantization import quantization_for

    if target is TargetFormat.COMPRESSED_TENSORS:
        _check_empty(config.output)
    checkpoint = open_checkpoint(path, config.load_format, revision=config.revision)
    if checkpoint.reader is None:
        raise ConfigError(f"{checkpoint.source.address} is an Orbax checkpoint already")
    quantization = quantization_for(checkpoint, config.quantize, option="quantize")
    if quantization is None or target is TargetFormat.ORBAX:
        written = write_orbax(config.output, checkpoint, quantization, config.dtype)
    else:
        written = write_folder(config.output, checkpoint, quantization, config.dtype)
    click.echo(f"{checkpoint.source.address} is now {config.output} in {written}: serve it with --model-path")
    if quantization is not None and config.error_layers:
        print_errors(checkpoint, quantization, config.error_layers)
    return 0


def _the_model(config: ConvertConfig, model: str | None) -> str:
    if None not in (model, config.model_path) and model != config.model_path:
        raise click.UsageError(f"two models are given: {model} and --model-path {config.model_path}")
    path = model or config.model_path
    if path is None:
        raise click.UsageError("Missing argument 'MODEL': what to convert, as for --model-path")
    return path


def _target(config: ConvertConfig) -> TargetFormat:
    """Raises `UsageError` for a format without what it needs."""
    stays = config.quantize is WeightQuantization.AUTO
    if config.to is None and stays:
        raise click.UsageError("Missing option --to (orbax) or --quantize (int8, fp8, int4)")
    target = config.to or TargetFormat.COMPRESSED_TENSORS
    if target is TargetFormat.COMPRESSED_TENSORS and stays:
        raise click.UsageError("--to compressed-tensors needs --quantize: int8, fp8 or int4")
    if target is TargetFormat.ORBAX and config.quantize is WeightQuantization.INT4:
        raise click.UsageError(
            "--quantize int4 cannot be stored in Orbax: choose int8 or fp8, or --to compressed-tensors"
        )
    return target


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists already, and is not an empty folder: remove it, or choose another --output")

"""Options of an offline batch run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sglang_jax.config import LogLevel, PositiveInt

Location = Annotated[str, BeforeValidator(str)]
"""A path, or with `--engine ray` the URL of an object store, in which every slash counts."""


class Runner(StrEnum):
    """What runs a batch: this machine, or a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


class BatchConfig(BaseModel):
    """What a run has besides an engine. Field names are the command line's flags, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Location = Field(description="file of requests: JSON lines, or Parquet where its name ends in .parquet")
    output: Location = Field(description="file of answers, one a line; Parquet where its name ends in .parquet")
    error_file: Path | None = Field(
        None, description="file of the lines that failed; default: the output's name and .errors.jsonl"
    )
    ordered: bool = Field(False, description="write answers in the order of the input, not as they come")
    no_reorder: bool = Field(
        False, description="ask in the order of the input; default: lines that share a prefix together"
    )
    lookahead: PositiveInt = Field(4096, description="lines among which those that share a prefix are looked for")
    defaults: str | None = Field(
        None, description="JSON object of body fields for lines that leave them out, such as '{\"max_tokens\": 64}'"
    )
    max_retries: int = Field(3, ge=0, description="how often a line is asked again after its engine was lost")
    served_model_name: str | None = Field(None, description="name that lines may give as model; default: model_path")
    chat_template: str | None = Field(None, description="a Jinja file, or the template; default: the tokenizer's")
    log_level: LogLevel = Field(LogLevel.WARNING, description="minimum log level")

    @property
    def input_path(self) -> Path:
        """The input, where it is a local file."""
        return Path(self.input)

    @property
    def output_path(self) -> Path:
        """The output, where it is a local file."""
        return Path(self.output)

    @property
    def errors(self) -> Path:
        """Where failed lines go."""
        return self.error_file or self.output_path.with_name(self.output_path.name + ".errors.jsonl")

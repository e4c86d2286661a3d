"""Options of an offline batch run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sglang_jax.config import LogLevel, PositiveInt

Location = Annotated[str, BeforeValidator(str)]
"""A path, or, with `--engine ray`, a URL of an object store, in which every slash counts."""


class Runner(StrEnum):
    """Where a batch runs: on this machine, or on a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


class BatchConfig(BaseModel):
    """Options of a run apart from the engine's. Field names are the command line's flags, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Location = Field(description="file of requests: JSON lines, or Parquet if the name ends in .parquet")
    output: Location = Field(description="file for the responses: JSON lines, or Parquet if the name ends in .parquet")
    error_file: Path | None = Field(
        None, description="file for failed lines; default: the output's name plus .errors.jsonl"
    )
    ordered: bool = Field(False, description="write responses in input order instead of as they finish")
    no_reorder: bool = Field(False, description="run in input order; default: group lines that share a prefix")
    lookahead: PositiveInt = Field(4096, description="number of lines to search for shared prefixes")
    defaults: str | None = Field(None, description="JSON object of default body fields, such as '{\"max_tokens\": 64}'")
    max_retries: int = Field(3, ge=0, description="maximum retries of a line whose engine was lost")
    served_model_name: str | None = Field(None, description="model name in requests; default: model_path")
    chat_template: str | None = Field(None, description="Jinja file, or the template itself; default: the tokenizer's")
    log_level: LogLevel = Field(LogLevel.WARNING, description="minimum log level")

    @property
    def input_path(self) -> Path:
        return Path(self.input)

    @property
    def output_path(self) -> Path:
        return Path(self.output)

    @property
    def errors(self) -> Path:
        return self.error_file or self.output_path.with_name(self.output_path.name + ".errors.jsonl")

"""Options of an offline batch run, on one machine or on a Ray cluster. Does not import Ray, so that flags work without
it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sglang_jax.config import LogLevel, PositiveInt

PositiveFloat = Annotated[float, Field(gt=0.0)]

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


class RayOptions(BaseModel):
    """How a run uses a cluster. Field names are the command line's flags, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = Field(
        None,
        description="with --engine ray: the cluster, HOST:PORT or auto; default: RAY_ADDRESS, or one on this machine",
    )
    min_replicas: PositiveInt = Field(1, description="with --engine ray: minimum number of engines")
    max_replicas: PositiveInt | None = Field(
        None, description="with --engine ray: maximum number of engines; default: as many as fit the cluster"
    )
    cpus_per_replica: PositiveFloat = Field(
        1.0,
        description="with --engine ray: CPU cores reserved per engine, in addition to tp_size GPUs or TPU chips",
    )
    tpu_slice: str | None = Field(
        None,
        pattern="^[a-z0-9]+:[0-9]+(x[0-9]+)+$",
        description="with --engine ray: TPU slice of an engine with --nnodes, VERSION:TOPOLOGY such as v6e:4x4",
    )
    rows_per_batch: PositiveInt = Field(
        32, description="with --engine ray: lines per batch, the unit that is sent to an engine and retried"
    )
    batches_per_replica: PositiveInt = Field(16, description="with --engine ray: concurrent batches per engine")
    rows_per_file: PositiveInt = Field(
        256, description="with --engine ray: minimum lines per output file, except for the last"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) must not be less than min_replicas ({self.min_replicas})"
            )
        return self


def describe_lack_of_nodes(needs: Mapping[str, float], nodes: int, found: int) -> str:
    """Describes what a run without an engine waits for, without a full stop. An engine takes `needs` of each of `nodes`
    nodes, and the cluster has `found` such nodes."""
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    if nodes == 1:
        return f"No node of the cluster has the {amounts} that an engine needs"
    return f"An engine needs {nodes} nodes with {amounts}, but the cluster has {found}"

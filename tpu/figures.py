"""Requests to the compiling process, and its answers: figures of a deployment and of each of its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.config import EngineConfig
from tpu.estimate import Estimate
from tpu.hlo import Collective, Kernel
from tpu.topologies import Topology


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on a slice, as the runner would configure it. Bytes are those of one device.

    - `devices`: those that JAX sees in the slice. `box`: chips that a tensor-parallel group spans along each of its
      axes.
    - `hbm`: bytes that programs may use; `weights`; `page`: one KV page over all layers.
    - `slot`: the recurrent states of one row, over all layers that have them; 0 if none do.
    - `num_pages`: of the first cache group, including the pad page; slots if all layers have recurrent states.
    - `ranks`: of data-parallel attention, each with its own pages.
    - `kv`: bytes of the pools of all groups; `pools`: their contents, in words.
    - `programs`: those to compile, of `all_programs` that the runner would have.
    """

    config: ModelConfig
    device_kind: str
    devices: int
    box: tuple[int, ...]
    hbm: int
    weights: int
    page: int
    page_size: int
    slot: int
    num_pages: int
    kv: int
    pools: str
    max_rows: int
    token_budget: int
    max_context: int
    dtype: str
    kv_dtype: str
    attention: str
    programs: tuple[str, ...]
    all_programs: int
    ranks: int = 1

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the pages of all ranks hold; None if no layer has pages."""
        return (self.num_pages - 1) * self.page_size * self.ranks if self.page else None


@dataclass(frozen=True, slots=True)
class ProgramFigures:
    """One compiled program. Bytes are those of one device.

    - `tokens`, `rows`: the bucket of a step program; 0 for programs that change a few rows of the state.
    - `temporaries`: allocated while it runs; `aliased`: outputs that overwrite arguments; `code`: instructions, in HBM.
    - `flops`, `accessed`: by XLA's cost analysis, which counts a loop's body once.
    - `collectives`, `kernels`, `estimate`: None if the compiler returned no text.
    """

    name: str
    tokens: int
    rows: int
    seconds: float
    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    code: int
    flops: float
    accessed: float
    collectives: tuple[Collective, ...] | None
    kernels: tuple[Kernel, ...] | None
    estimate: Estimate | None

    @property
    def running(self) -> int:
        """HBM that the device needs while it runs, without its code."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """A program that did not compile, and the compiler's message."""

    name: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """An invalid deployment: a model that leaves no room for KV, or, `of_options`, invalid options."""

    reason: str
    of_options: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning of the programs' own code while they were built."""

    text: str


@dataclass(frozen=True, slots=True)
class CacheEntries:
    """Compiled programs in the requested folder: all entries, and the new ones."""

    entries: int
    written: int


class Selection(StrEnum):
    """The programs of the runner to compile: `QUICK` the largest of each kind, `ENDS` the largest, the smallest, and
    those that change a few rows of the state, `ALL` all."""

    QUICK = "quick"
    ENDS = "ends"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile: `options` are those of the server. `encodings`: of quantised matrices."""

    model: ModelConfig
    options: EngineConfig
    topology: Topology
    selection: Selection
    encodings: Mapping[ParameterName, Encoding] = field(default_factory=dict)


Message = Deployment | ProgramFigures | ProgramFailure | Refusal | Notice | CacheEntries

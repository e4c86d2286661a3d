"""Runs passes over a traced model in order, and checks that each finds as many places as the model implies."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang_jax.config import CompilePass
from sglang_jax.errors import ConfigError
from torch_backend.compilation.drawing import write_graphs
from torch_backend.compilation.expected_matches import ExpectedMatches
from torch_backend.compilation.graph import Program
from torch_backend.compilation.passes.collectives import fuse_all_reduces, insert_collectives
from torch_backend.compilation.passes.linears import fuse_gated_activations, merge_linears
from torch_backend.compilation.passes.no_ops import remove_no_ops
from torch_backend.compilation.passes.norms import fuse_norms, fuse_sums_with_norms
from torch_backend.compilation.passes.paged_attention import page_attention
from torch_backend.compilation.passes.rope import fuse_head_norms, fuse_rope

logger = logging.getLogger(__name__)

Rewrite = Callable[[Program], int]
"""Rewrites a program in place and returns how many places it found. A second run finds none."""


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A named rewriting."""

    name: CompilePass
    rewrite: Rewrite


PASSES = (
    GraphPass(CompilePass.NO_OPS, remove_no_ops),
    GraphPass(CompilePass.PAGED_ATTENTION, page_attention),
    GraphPass(CompilePass.COLLECTIVES, insert_collectives),
    GraphPass(CompilePass.NORM, fuse_norms),
    GraphPass(CompilePass.ROPE, fuse_rope),
    GraphPass(CompilePass.HEAD_NORM, fuse_head_norms),
    GraphPass(CompilePass.GATED_ACTIVATION, fuse_gated_activations),
    GraphPass(CompilePass.MERGE_LINEARS, merge_linears),
    GraphPass(CompilePass.ADD_NORM, fuse_sums_with_norms),
    GraphPass(CompilePass.ALL_REDUCE_ADD_NORM, fuse_all_reduces),
)
"""In the order in which they run: each matches the results of those before it. Passes whose operations overwrite their
inputs are last, because they check that no later operation reads these, and no operation may move afterwards."""


@dataclass(frozen=True, slots=True)
class PassCount:
    """How many places a pass found, and the minimum expected."""

    name: CompilePass
    expected: int
    found: int


class PassManager:
    """Passes in order, of which `chosen` run. A pass is held to its minimum only if all passes before it run too.
    No-ops are removed between passes, if that pass is chosen, so that each sees a clean graph."""

    def __init__(self, chosen: Collection[CompilePass], passes: Sequence[GraphPass] = PASSES) -> None:
        self._passes = [each for each in passes if each.name in chosen]
        self._cleans = CompilePass.NO_OPS in chosen

    def run(self, program: Program, expected: ExpectedMatches, dump: Path | None = None) -> tuple[PassCount, ...]:
        """Rewrites `program`; its graphs before and after each pass are written to the folder `dump`. Raises
        `ConfigError` naming a pass that finds fewer places than the model implies."""
        if dump is not None:
            write_graphs(program, dump, "00-traced")
        counts: list[PassCount] = []
        for number, each in enumerate(self._passes, 1):
            found = each.rewrite(program)
            if self._cleans and each.rewrite is not remove_no_ops:
                remove_no_ops(program)
            for graph in program.graphs:
                graph.lint()
            counts.append(PassCount(each.name, expected.minimum[each.name] if self._complete(number) else 0, found))
            if dump is not None:
                write_graphs(program, dump, f"{number:02d}-{each.name.value}")
        summary = ", ".join(f"{each.name.value} {each.found}" for each in counts)
        logger.info("Passes %s over %s: %s", self.uuid()[:8], program.model_type, summary)
        few = [each for each in counts if each.found < each.expected]
        if few:
            raise ConfigError(
                f"model_impl transformers: the pass {few[0].name.value} found {few[0].found} matches in "
                f"{program.model_type}, but its modules imply {few[0].expected}: this release of transformers "
                "implements "
                "the model differently. Leave the pass out of --compile-passes to serve the model without it, slower"
            )
        return tuple(counts)

    def _complete(self, number: int) -> bool:
        """Whether all passes up to this one run: a pass matches the results of those before it."""
        return [each.name for each in self._passes[:number]] == list(CompilePass)[:number]

    def uuid(self) -> str:
        """A key of the passes that run: of their names and the source of this package's rewritings."""
        names = "\n".join(each.name.value for each in self._passes)
        return hashlib.sha256(f"{names}\n{self._cleans}\n{_sources(tuple(self._passes))}".encode()).hexdigest()


@cache
def _sources(passes: tuple[GraphPass, ...]) -> str:
    modules = {inspect.getmodule(each.rewrite) for each in passes}
    return "\n".join(sorted(inspect.getsource(module) for module in modules if module is not None))

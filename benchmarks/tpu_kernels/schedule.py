"""Reads the TPU compiler's own schedule of a kernel: instruction bundles, loops, spills.

The compiler's last text dump has one line per bundle, which issues in one cycle or more, with one `>` for each
enclosing loop. A loop's own bundles are those at its depth; those of inner loops belong to these. The compiler moves a
loop's last steps between the bundles of an inner loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.* "
    "--xla_mosaic_enable_llo_source_annotations=true"
)
"""For LIBTPU_INIT_ARGS, which libtpu reads when it is loaded."""

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*: ((?:> ?)*)\s*\{(.*)")


@dataclass
class Loop:
    """A loop of the schedule, or at depth 0 the whole schedule."""

    depth: int
    bundles: list[str] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Indices of the first bundle of each region: of a branch, or of what follows a branch or an inner loop."""

    def regions(self) -> list[list[str]]:
        """The loop's own bundles by region."""
        ends = [*self.starts[1:], len(self.bundles)]
        return [self.bundles[first:last] for first, last in zip(self.starts, ends, strict=True)]

    def count(self, operation: str) -> int:
        """Number of occurrences of an operation in the loop's own bundles."""
        return sum(bundle.count(operation) for bundle in self.bundles)

    @property
    def products(self) -> int:
        return self.count("= vmatmul")

    @property
    def vector_spills(self) -> int:
        """Stores of spilled vector registers."""
        return sum(len(re.findall(r"= vst \[vmem:\[#allocation\d+_spill\]", bundle)) for bundle in self.bundles)

    def walk(self) -> list[Loop]:
        """The loop and all inner loops."""
        return [self, *(found for loop in self.loops for found in loop.walk())]


def read_schedule(folder: Path, kernel: str) -> Loop:
    """The schedule of a kernel, by its name, as dumped last.

    **Raises:** `FileNotFoundError` if the compiler wrote none.
    """
    files = sorted(
        file for file in folder.glob(f"*-{kernel}*-final_bundles.txt") if "schedule-analysis" not in file.name
    )
    if not files:
        raise FileNotFoundError(f"no schedule of {kernel} in {folder}: was libtpu started with the flags to dump it?")
    whole = Loop(0)
    latest = [whole]  # the last loop at each depth
    depth = 0
    for line in files[-1].read_text(errors="replace").splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        tag, marks, bundle = match.groups()
        if not bundle.startswith("}"):  # an empty bundle has no marks: its depth is the previous one's
            depth = marks.count(">")
        if tag == "LB" or depth >= len(latest):
            inner = Loop(depth)
            latest[depth - 1].loops.append(inner)
            latest[depth:] = [inner]
        if tag is not None or not latest[depth].starts:
            latest[depth].starts.append(len(latest[depth].bundles))
        latest[depth].bundles.append(bundle)
    return whole

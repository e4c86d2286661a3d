"""Compiles kernels for this processor by numba, and keeps the machine code in a folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba

logger = logging.getLogger(__name__)

_FAST_ARITHMETIC = {"reassoc", "contract", "nsz", "arcp"}
"""Sums in any order and products fused with them, but NaN and infinity as they are."""


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """**Arguments:** `folder`: where machine code is kept from start to start; None keeps none."""

    folder: Path | None

    @classmethod
    def keeping(cls, folder: Path, *packages: Path) -> KernelCompiler:
        """Keeps machine code below `folder`, apart for every version of the kernels, which are those of this package
        and of `packages`, folders; keeps none, which the log says, where no file can be written."""
        below = folder / f"cpu-kernels-{version_of_kernels(*packages)}"
        try:
            below.mkdir(parents=True, exist_ok=True)
            probe = below / "probe"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            logger.info("CPU kernels are compiled again at each start: %s", error)
            return cls(None)
        return cls(below)

    def __call__(self, kernel: Callable[[Any], None]) -> CompiledKernel:
        """Compiles a kernel (see `work`), whose constants may be integers of the function around it."""
        before = numba.config.CACHE_DIR
        if self.folder is not None:
            numba.config.CACHE_DIR = str(self.folder)
        try:
            function = numba.cfunc(
                numba.void(numba.types.CPointer(numba.int64)),
                fastmath=_FAST_ARITHMETIC,
                error_model="numpy",
                cache=self.folder is not None,
            )(kernel)
        finally:
            numba.config.CACHE_DIR = before
        return CompiledKernel(function.address, function)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code at `address`, which lives as long as `owner`."""

    address: int
    owner: object


def version_of_kernels(*packages: Path) -> str:
    """Of every file of this package and of `packages`: numba itself looks at the file alone that a kernel stands in."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *packages):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]

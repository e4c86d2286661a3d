"""Compiles kernels for this processor with numba, and caches the machine code in a folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba

logger = logging.getLogger(__name__)

_FAST_ARITHMETIC = {"contract", "nsz", "arcp"}
"""Sums may be fused with products, but NaN and infinity are preserved."""


_KERNEL = numba.void(numba.types.CPointer(numba.int64))


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """Compiles kernels. `folder`: where machine code is cached between starts; None for no cache."""

    folder: Path | None

    @classmethod
    def keeping(cls, folder: Path, *packages: Path) -> KernelCompiler:
        """Caches machine code in a subfolder of `folder` for each version of the kernels in this package and in the
        folders `packages`. If no file can be written there, nothing is cached, which is logged."""
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

    def __call__(
        self, kernel: Callable[[Any], Any], signature: Any = _KERNEL, *, in_order: bool = False
    ) -> CompiledKernel:
        """Compiles a kernel (see `work`), or another function of C with a signature of numba. Its constants may be
        integers and names of the function around it. Sums and products are computed `in_order`, or as is fastest."""
        before = numba.config.CACHE_DIR
        if self.folder is not None:
            numba.config.CACHE_DIR = str(self.folder)
        try:
            function = numba.cfunc(
                signature,
                fastmath=_FAST_ARITHMETIC if in_order else _FAST_ARITHMETIC | {"reassoc"},
                error_model="numpy",
                cache=self.folder is not None,
            )(kernel)
        finally:
            numba.config.CACHE_DIR = before
        return CompiledKernel(function.address, function)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code at `address`, valid as long as `owner` exists."""

    address: int
    owner: object


def name_function(name: str, address: int) -> None:
    """Lets functions that are compiled or loaded afterwards find the machine code at an address by a name, so that what
    is cached contains no addresses: see `language.address_of`."""
    llvmlite.binding.add_symbol(name, address)


def version_of_kernels(*packages: Path) -> str:
    """A hash of all files of this package and of `packages`: numba itself checks only a kernel's own file."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *packages):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]

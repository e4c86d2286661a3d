"""Compiler options for single programs: remedies for faults of releases, by chip. Options in the environment
(`LIBTPU_INIT_ARGS`, `XLA_FLAGS`) apply to all programs, so a remedy for one would slow others down."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, known_chip

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Releases:
    """Releases of one package from `since` on and before `until`, if given."""

    since: Version
    until: Version | None = None

    def contain(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed versions; that of libtpu is None if pip did not install it."""

    jax: Version
    libtpu: Version | None

    @staticmethod
    def here() -> Installed:
        try:
            libtpu: Version | None = numbers_of(importlib.metadata.version("libtpu"))
        except importlib.metadata.PackageNotFoundError:
            libtpu = None
        return Installed(jax.__version_info__, libtpu)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options for steps, or only decode steps, on one chip. `jax`, `libtpu`: the releases that need it. For a fault of
    libtpu, its version decides, and that of JAX only if libtpu's is unknown, since either may be newer than the version
    released with the other."""

    chip: Chip
    jax: Releases
    libtpu: Releases | None
    decode_only: bool
    options: Mapping[str, str]
    reason: str

    def fits(self, chip: Chip, installed: Installed, decode_only: bool) -> bool:
        if self.libtpu is None or installed.libtpu is None:
            released = self.jax.contain(installed.jax)
        else:
            released = self.libtpu.contain(installed.libtpu)
        return chip is self.chip and released and (decode_only or not self.decode_only)


REMEDIES = (
    Remedy(
        chip=Chip.TPU7X,
        jax=Releases((0, 11, 1)),
        libtpu=Releases((0, 0, 46)),
        decode_only=True,
        options={"xla_tpu_offload_gather_to_sparsecore": "false"},
        reason="the SparseCore gathers few rows slowly: others measured decode steps 57 % slower; for long "
        "prompts it is faster (jax-ml/jax#40553)",
    ),
)


def numbers_of(version: str) -> Version:
    """`0.0.51.dev3` as (0, 0, 51)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def options_of_step(
    platform: str, device_kind: str, decode_only: bool, installed: Installed | None = None
) -> dict[str, str]:
    """Compiler options of a step's program, in addition to the environment's; none on an unknown TPU. `decode_only`:
    whether it is a decode step, or has as few rows. `installed`: None for the versions of this process."""
    chip = known_chip(device_kind)
    if platform != "tpu" or chip is None:
        return {}
    installed = installed or Installed.here()
    fitting = [remedy.options for remedy in REMEDIES if remedy.fits(chip, installed, decode_only)]
    return {name: value for options in fitting for name, value in options.items()}

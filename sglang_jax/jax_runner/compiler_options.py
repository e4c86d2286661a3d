"""Options of the compiler for single programs: remedies for what a release does to some of them, by chip.

They are given to one program's compilation. The environment's (`LIBTPU_INIT_ARGS`, `XLA_FLAGS`) count for all programs,
where a remedy for one would cost another.
"""

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
    """Of one package, from `since` on and before `until`; None for all that follow."""

    since: Version
    until: Version | None = None

    def have(self, version: Version) -> bool:
        """Whether a release is one of them."""
        return self.since <= version and (self.until is None or version < self.until)


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions of JAX, and of the compiler that belongs to TPUs; None where pip did not install it."""

    jax: Version
    libtpu: Version | None

    @staticmethod
    def here() -> Installed:
        """What this process has."""
        try:
            libtpu: Version | None = numbers_of(importlib.metadata.version("libtpu"))
        except importlib.metadata.PackageNotFoundError:
            libtpu = None
        return Installed(jax.__version_info__, libtpu)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options for steps on one chip.

    - `jax`, `libtpu`: the releases that need it. Where the fault is libtpu's these decide, and JAX's only where nobody
      knows which libtpu there is: either may be newer than what the other came with.
    - `decode_only`: steps with prompts keep the compiler's choice.
    """

    chip: Chip
    jax: Releases
    libtpu: Releases | None
    decode_only: bool
    options: Mapping[str, str]
    reason: str

    def fits(self, chip: Chip, installed: Installed, decode_only: bool) -> bool:
        """Whether it is for such a step."""
        if self.libtpu is None or installed.libtpu is None:
            released = self.jax.have(installed.jax)
        else:
            released = self.libtpu.have(installed.libtpu)
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
    """What a step's program is compiled with, or one of as few rows as a decode step has (`decode_only`), beside what
    the environment says. Nothing on a TPU that is not known here. `installed`: None for what is here."""
    chip = known_chip(device_kind)
    if platform != "tpu" or chip is None:
        return {}
    installed = installed or Installed.here()
    fitting = [remedy.options for remedy in REMEDIES if remedy.fits(chip, installed, decode_only)]
    return {name: value for options in fitting for name, value in options.items()}

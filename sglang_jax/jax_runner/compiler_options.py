"""Options of the compiler for single programs: remedies for what a release does to some of them, by chip.

They are given to one program's compilation. The environment's (`LIBTPU_INIT_ARGS`, `XLA_FLAGS`) count for all programs,
where a remedy for one would cost another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, chip_of

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options for steps on one chip.

    - `since`, `until`: versions of JAX, the second not among them; None for all that follow.
    - `decode_only`: steps with prompts keep the compiler's choice.
    """

    chip: Chip
    since: Version
    until: Version | None
    decode_only: bool
    options: Mapping[str, str]
    reason: str

    def fits(self, chip: Chip, version: Version, bucket: Bucket) -> bool:
        """Whether it is for such a step."""
        released = self.since <= version and (self.until is None or version < self.until)
        return chip is self.chip and released and (bucket.decode_only or not self.decode_only)


REMEDIES = (
    Remedy(
        chip=Chip.TPU7X,
        since=(0, 11, 1),
        until=None,
        decode_only=True,
        options={"xla_tpu_offload_gather_to_sparsecore": "false"},
        reason="gathers of few rows are sent to the SparseCore: others measured decode steps 57 % slower; of long "
        "prompts that pays (jax-ml/jax#40553)",
    ),
)


def options_of_step(platform: str, device_kind: str, bucket: Bucket, version: Version | None = None) -> dict[str, str]:
    """What a step's program is compiled with, beside what the environment says. `version`: of JAX; None for this one's.

    **Raises:** `ConfigError` for a TPU that nobody knows.
    """
    if platform != "tpu":
        return {}
    chip, version = chip_of(device_kind), jax.__version_info__ if version is None else version
    fitting = [remedy.options for remedy in REMEDIES if remedy.fits(chip, version, bucket)]
    return {name: value for options in fitting for name, value in options.items()}

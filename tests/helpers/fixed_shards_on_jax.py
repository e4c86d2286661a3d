"""Counts logits that differ by the number of devices on JAX, and then by the step, with the options of users'
processes: `python -m helpers.fixed_shards_on_jax FOLDER DTYPE PAGE_SIZE SHARDS STATES`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from helpers.fixed_rows import differences
from helpers.paged_model import MIXED_TOKENS, PagedModel
from helpers.parity_steps import prompts

from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation

STEPS = ({0: 20, 1: 11}, {0: 1, 1: 9, 2: 7}, {0: 1, 2: 1, 1: 14}, {0: 1, 1: 1, 2: 1})


def main(folder: str, dtype: str, page_size: str, shards: str, states: str) -> None:
    sequences = prompts()[:3]

    def model(devices: int, shards: int | None = int(shards)) -> PagedModel:
        return PagedModel(
            Path(folder),
            dtype=dtype,
            attention=AttentionImplementation.XLA_FIXED,
            page_size=int(page_size),
            columns=-(-64 // int(page_size)),
            mesh=make_mesh(jax.devices()[:devices]),
            num_shards=shards,
        )

    sizes = [size for size in range(1, int(shards) + 1) if int(shards) % size == 0]
    models = [model(size) for size in sizes]
    first, *others = [each.run(sequences, STEPS) for each in models]
    for logits, whole in zip(first, model(1, None).run(sequences, STEPS), strict=True):
        np.testing.assert_allclose(
            logits, whole, rtol=0, atol=(1e-4 if dtype == "float32" else 0.05) * np.abs(whole).max()
        )
    for logits in others:
        print(sum(int((mine != theirs).sum()) for mine, theirs in zip(logits, first, strict=True)), end=" ")
    print(differences(models[-1], sequences, MIXED_TOKENS, states=states == "True"))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Counts logits that differ from step to step on JAX, with the options of users' processes: `python -m
helpers.fixed_rows_on_jax FOLDER DTYPE PAGE_SIZE FIXED STATES`. Kernels for TPUs run in JAX's interpreter."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from helpers.fixed_rows import differences
from helpers.paged_model import MIXED_TOKENS, PagedModel
from helpers.parity_steps import prompts
from helpers.tpu_interpreter import CopyMode, interpreter

from sglang_jax.models import AttentionImplementation


def main(folder: str, dtype: str, page_size: str, attention: str, states: str) -> None:
    implementation, columns = AttentionImplementation(attention), -(-64 // int(page_size))
    model = PagedModel(
        Path(folder),
        dtype=dtype,
        attention=implementation,
        page_size=int(page_size),
        columns=columns,
        platform="tpu" if implementation.for_tpu else None,
    )
    with interpreter(CopyMode.ON_WAIT, detect_races=False) if implementation.for_tpu else nullcontext():
        print(differences(model, prompts(), MIXED_TOKENS, states=states == "True"))


if __name__ == "__main__":
    main(*sys.argv[1:])

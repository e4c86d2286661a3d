"""Sampling values that a GGUF file recommends."""

from __future__ import annotations

from sglang_jax.checkpoint.gguf_file import GgufFile
from sglang_jax.sampling import GenerationDefaults


def gguf_generation_defaults(file: GgufFile) -> GenerationDefaults:
    """The file's `general.sampling.*`; empty where it says nothing.

    The repetition penalty is left out: GGUF's looks at the last `penalty_last_n` tokens alone.

    **Raises:** `CheckpointError` for a value of another type.
    """
    top_k = file.get("general.sampling.top_k", int)
    return GenerationDefaults(
        temperature=_number(file, "temp"),
        top_p=_number(file, "top_p"),
        top_k=-1 if top_k is not None and top_k <= 0 else top_k,  # GGUF's way to keep all tokens
        min_p=_number(file, "min_p"),
    )


def _number(file: GgufFile, name: str) -> float | None:
    """As short as it was written: the file holds 32 bits of 0.9."""
    value = file.get(f"general.sampling.{name}", float)
    return None if value is None else float(f"{value:.7g}")

"""Sampling values that a GGUF file recommends."""

from __future__ import annotations

from sglang_jax.checkpoint.gguf_file import GgufFile
from sglang_jax.sampling import GenerationDefaults


def gguf_generation_defaults(file: GgufFile) -> GenerationDefaults:
    """The file's `general.sampling.*`. The repetition penalty is left out, because GGUF's covers only the last
    `penalty_last_n` tokens. Raises `CheckpointError` for a value of a wrong type."""
    top_k = file.get("general.sampling.top_k", int)
    return GenerationDefaults(
        temperature=_number(file, "temp"),
        top_p=_number(file, "top_p"),
        top_k=-1 if top_k is not None and top_k <= 0 else top_k,  # in GGUF, 0 keeps all tokens
        min_p=_number(file, "min_p"),
    )


def _number(file: GgufFile, name: str) -> float | None:
    """Rounds to 7 digits: the file stores 0.9 as a float32."""
    value = file.get(f"general.sampling.{name}", float)
    return None if value is None else float(f"{value:.7g}")

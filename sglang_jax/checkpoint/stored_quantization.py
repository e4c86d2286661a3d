"""Which layers of a Hugging Face folder are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.grouped_tensors import GroupScheme
from sglang_jax.checkpoint.layer_patterns import NO_LAYERS, LayerPatterns
from sglang_jax.checkpoint.text_part import spellings_of
from sglang_jax.errors import CheckpointError, quote

_INSTEAD = (
    "give a checkpoint in bfloat16, float16 or float32, one of GPTQ, AWQ or compressed-tensors in 4 or 8 bits, one of "
    "MXFP4 or NVFP4, one of FP8 with scales per row, per matrix or per block (compressed-tensors, ModelOpt, or "
    "quant_method fp8), or a GGUF file"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some layers are stored.

    - `per_row`: one scale per row; otherwise one per matrix.
    - `packed`: four values per 32-bit word (see `QuantizedReader`).
    """

    encoding: Encoding
    per_row: bool
    packed: bool = False


AnyScheme = Scheme | GroupScheme


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Which layers of a folder are quantised, and how.

    - `file`: the source of this information.
    - `targets`: schemes by layer name or torch class; None for plain weights. Layer names take precedence over
      patterns, and patterns over classes.
    - `patterns`: schemes by pattern; the first match counts.
    - `ignored`: layers that are plain in any case.
    - `of_text_part`: names may be those of the text model inside a checkpoint for text and images.
    - `by_tensors`: the scheme of all layers that have its tensors, in formats without such lists.
    """

    file: Path
    targets: Mapping[str, AnyScheme | None]
    patterns: tuple[tuple[re.Pattern[str], AnyScheme | None], ...] = ()
    ignored: LayerPatterns = NO_LAYERS
    by_tensors: GroupScheme | None = None
    of_text_part: bool = False

    def scheme(self, layer: str, layer_class: str) -> AnyScheme | None:
        """The scheme of a layer such as `model.layers.0.mlp.up_proj`, of a class such as `Linear`; None if plain."""
        names = spellings_of(layer) if self.of_text_part else (layer,)
        if any(self.ignored.match(name, layer_class) for name in names):
            return None
        for name in names:
            if name in self.targets:
                return self.targets[name]
        for pattern, scheme in self.patterns:
            if any(pattern.match(name) for name in names):
                return scheme
        return self.by_tensors if self.by_tensors and layer_class == "Linear" else self.targets.get(layer_class)


def refuse_method(fields: JsonFields, method: object) -> NoReturn:
    """Raises `CheckpointError` for a tool whose weights are not read."""
    raise CheckpointError(f"{fields.file}: weights quantised by {quote(method)} are not supported; {_INSTEAD}")


def refuse(fields: JsonFields, name: str, supported: str) -> NoReturn:
    """Raises `CheckpointError` for the value of a field; `supported`: other values."""
    raise CheckpointError(
        f"{fields.file}: {fields.within}{name} {quote(fields.value(name))} of quantised weights is not supported; "
        f"supported: {supported}; {_INSTEAD}"
    )

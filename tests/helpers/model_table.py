"""The table of docs/models.md: which options each family supports, from the errors of the code.

python tests/helpers/model_table.py     writes it again
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import transformers  # noqa: E402
from helpers.family_cases import FAMILIES, HYBRIDS, LATENT  # noqa: E402
from helpers.parity_cases import ARCHITECTURES  # noqa: E402
from helpers.tiny_models import tiny_fields  # noqa: E402

from sglang_jax.architectures.json_fields import JsonFields  # noqa: E402
from sglang_jax.architectures.model_config import ModelConfig  # noqa: E402
from sglang_jax.architectures.registry import Family, known_families  # noqa: E402
from sglang_jax.config import EngineConfig, KVCacheDtype  # noqa: E402
from sglang_jax.errors import ConfigError  # noqa: E402
from sglang_jax.runner.sizing import refuse_with_latents, refuse_with_states  # noqa: E402

PAGE = ROOT / "docs/models.md"
HEAD = """| Class | Cache | GGUF | 8-bit KV | Can draft |
|---|---|---|---|---|
"""
_TABLE = re.compile(r"^\| Class \| Cache .*\n(?:\|.*\n)*", re.MULTILINE)


def table_of(page: str) -> str:
    """The table that the page has."""
    found = _TABLE.search(page)
    assert found is not None, "docs/models.md has lost its table"
    return found[0]


def model_table() -> str:
    """The table according to the code."""
    families = sorted(known_families(), key=lambda family: family.class_name.lower())
    return HEAD + "".join(f"| {' | '.join(row(family))} |\n" for family in families)


def row(family: Family) -> list[str]:
    model = model_of(family)
    return [
        f"`{family.class_name}`",
        ", ".join(kinds_of_cache(model)),
        "" if family.gguf is None else f"`{family.gguf.name}`",
        support_for_8_bits(EngineConfig(kv_cache_dtype=KVCacheDtype.INT8), model),
        "yes" if model.causal and not model.keeps_states else "no",
    ]


def support_for_8_bits(config: EngineConfig, model: ModelConfig) -> str:
    """Where keys and values are stored in 8 bits."""
    if answer(refuse_with_states, config, model) == "no":
        return "no"
    return "not on TPUs" if answer(refuse_with_latents, config, model) == "no" else "yes"


def answer(refuse: Callable[[EngineConfig, ModelConfig], None], config: EngineConfig, model: ModelConfig) -> str:
    try:
        refuse(config, model)
    except ConfigError:
        return "no"
    return "yes"


def kinds_of_cache(model: ModelConfig) -> list[str]:
    """What layers keep of a sequence."""
    windows = {attention.window for attention in model.attention}
    kinds = ["all tokens"] if None in windows else []
    kinds = ["latent vectors of all tokens"] if model.keeps_latents else kinds
    kinds += ["a window"] if windows - {None} else []
    return kinds + (["a state"] if model.keeps_states else [])


def model_of(family: Family) -> ModelConfig:
    """The tiny model of the family that tests compare with transformers, with windows if the family can have any."""
    cases = [(case.architecture, case.changes) for case in (*FAMILIES.values(), *HYBRIDS.values(), *LATENT.values())]
    cases += ARCHITECTURES.values()
    changes = next((changes for architecture, changes in cases if architecture == family.name), {})
    config = transformers.AutoConfig.for_model(family.name, **tiny_fields(family.name, **changes))
    return family.configure(JsonFields(config.to_dict(), Path("config.json")))


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: model_table(), PAGE.read_text()))

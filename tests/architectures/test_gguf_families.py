"""GGUF files of families beside Llama and Qwen: the same model as from their folder, and transformers' logits. Names of
tensors and of metadata are those of the `gguf` package; the order of q and k, and which metadata there are, those of
llama.cpp's converter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.family_cases import FAMILIES, FamilyCase
from helpers.gguf_files import model_metadata, permuted, write_gguf
from helpers.parity_cases import TOLERANCE, prompts, transformers_logits
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from helpers.torch_paged_model import TorchPagedModel

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.checkpoint import ModelConfig, ParameterReader, open_checkpoint

_KEYS = gguf.Keys
_GRANITE_KEYS = {
    _KEYS.LLM.EMBEDDING_SCALE: "embedding_multiplier",
    _KEYS.LLM.RESIDUAL_SCALE: "residual_multiplier",
    _KEYS.Attention.SCALE: "attention_multiplier",
    _KEYS.LLM.LOGIT_SCALE: "logits_scaling",
}


_WINDOW_KEY = {_KEYS.Attention.SLIDING_WINDOW: "sliding_window"}
_GEMMA2_KEYS = {
    _KEYS.Attention.SLIDING_WINDOW: "sliding_window",
    _KEYS.LLM.ATTN_LOGIT_SOFTCAPPING: "attn_logit_softcapping",
    _KEYS.LLM.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
}
_CHANGES: dict[str, dict[str, Any]] = {
    # Files do not say which layers rotate: it is every fourth that does not.
    "smollm3": {"num_hidden_layers": 4},
    # Nor what scores are scaled by, and every how many layers one sees all.
    "gemma2": FAMILIES["gemma2"].changes | {"query_pre_attn_scalar": 16},
    "gemma3": {
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": FAMILIES["gemma3"].changes["rope_parameters"],
    },
    # Files have no biases: it is an error of the converter if they are not zero.
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.3},
}
_ARCHITECTURES = {"olmo3": "olmo2", "phi3_without_window": "phi3"}
"""Of files, where they do not have the family's name."""

_CASES = {**FAMILIES, "phi3_without_window": FamilyCase("phi3", 16, {"sliding_window": None})}


def _as_they_multiply(config: ModelConfig) -> str:
    """The config without what it says of how norms are stored."""
    return repr(config).replace("offset=1.0", "offset=0.0")


@pytest.mark.parametrize(
    ("family", "keys", "is_permuted"),
    [
        ("phi3", _WINDOW_KEY, False),
        ("phi3_without_window", _WINDOW_KEY, False),
        ("olmo2", {}, False),
        ("olmo3", _WINDOW_KEY, False),
        ("exaone4", _WINDOW_KEY, False),
        ("cohere2", {**_WINDOW_KEY, _KEYS.LLM.LOGIT_SCALE: "logit_scale"}, False),
        ("seed_oss", {}, False),
        ("ernie4_5", {}, False),
        ("gemma", {}, False),
        ("gemma2", _GEMMA2_KEYS, False),
        ("gemma3", _WINDOW_KEY, False),
        ("smollm3", {}, True),
        ("granite", _GRANITE_KEYS, True),
    ],
)
def test_the_file_is_the_model_of_the_folder(
    family: str, keys: dict[str, str], is_permuted: bool, tmp_path: Path
) -> None:
    changes = _CHANGES.get(family) or _CASES[family].changes
    architecture = _CASES[family].architecture
    stored_as = _ARCHITECTURES.get(family, family)
    model = make_tiny_model(architecture, **changes)
    config = model.config
    # The converter writes 0 for a window that is null.
    metadata: dict[str, Any] = model_metadata(model, stored_as) | {
        key.format(arch=stored_as): getattr(config, name) or 0 for key, name in keys.items()
    }
    metadata |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2}
    metadata |= {f"{stored_as}.{key}": value for key, value in _more_metadata(family, config.to_dict()).items()}
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == stored_as)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if is_permuted and f".{projection}." in name:
                values = permuted(values, heads)
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = (values, GGMLQuantizationType.F32)
    path = write_gguf(tmp_path / f"{family}.gguf", stored_as, metadata, tensors)

    file = open_checkpoint(str(path))
    folder = open_checkpoint(str(make_tiny_checkpoint(tmp_path / "folder", architecture, **changes)))
    assert file.reader is not None
    assert folder.reader is not None
    assert _as_they_multiply(replace(file.config, dtype="float32")) == _as_they_multiply(folder.config)
    readers = [ParameterReader(opened.reader, opened.config) for opened in (file, folder)]
    for name in manifest_of(folder.config).specs:
        found, expected = (reader.read(name) for reader in readers)
        np.testing.assert_array_equal(found, expected, err_msg=str(name))
    tokens = prompts()[1]
    (logits,) = TorchPagedModel(path).run([tokens], ({0: 30}, {0: 1}, {0: len(tokens) - 31}))
    assert np.abs(logits - transformers_logits(architecture, tokens, **changes)).max() < TOLERANCE


def _more_metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have windows, in the files that say it, and what layers have for ropes of their own."""
    found: dict[str, Any] = {}
    if family in ("exaone4", "olmo3"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    ropes = config["rope_parameters"]
    if "sliding_attention" in ropes:
        found["rope.freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
        scaling = ropes["full_attention"]
        found |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if scaling["rope_type"] == "yarn":
            found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return found

"""GGUF files of families other than Llama and Qwen: the same model as from their folder, and transformers' logits.
Names of tensors and metadata are those of the `gguf` package; the order of q and k and the set of metadata are those
of llama.cpp's converter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.family_cases import EXPERTS, FAMILIES, FamilyCase
from helpers.gguf_files import model_metadata, permuted, write_gguf
from helpers.parity_cases import TOLERANCE, prompts, transformers_logits
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from helpers.torch_paged_model import TorchPagedModel

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ModelConfig, ParameterReader, open_checkpoint

_KEYS = gguf.Keys
_F32 = GGMLQuantizationType.F32
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
    # Files do not say which layers rotate: every fourth does not.
    "smollm3": {"num_hidden_layers": 4},
    # Nor the scale of scores, nor how often a layer has full attention.
    "gemma2": FAMILIES["gemma2"].changes | {"query_pre_attn_scalar": 16},
    "gemma3": {
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": FAMILIES["gemma3"].changes["rope_parameters"],
    },
    # Files have no biases: the converter fails if they are not zero.
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.3},
    # Files do not say which layers have experts: all do.
    "qwen3_moe": {"head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {"moe_intermediate_size": 64},
    "mixtral": {"head_dim": 24},
    # Nor the clamp of the gate, nor that YaRN's limits are not rounded.
    "gpt_oss": {
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "rope_parameters": FAMILIES["gpt_oss"].changes["rope_parameters"],
    },
    "granitemoe": FAMILIES["granitemoe"].changes,
}
_ARCHITECTURES = {
    "olmo3": "olmo2",
    "phi3_without_window": "phi3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
}
"""Architecture names in files, where they differ from the family's name."""

_CASES = {**FAMILIES, "phi3_without_window": FamilyCase("phi3", 16, {"sliding_window": None})}


def _as_they_multiply(config: ModelConfig) -> str:
    """The config without how norms are stored."""
    return repr(config).replace("offset=1.0", "offset=0.0")


def _model(family: str) -> tuple[str, dict[str, Any]]:
    """Its architecture in transformers, and changes to the tiny model."""
    return _CASES[family].architecture, _CHANGES.get(family) or _CASES[family].changes


def written(
    family: str,
    keys: dict[str, str],
    is_permuted: bool,
    folder: Path,
    of_experts: GGMLQuantizationType = _F32,
) -> Path:
    """A file as llama.cpp's converter writes it; `of_experts`: the type of the experts' matrices."""
    folder.mkdir(exist_ok=True)
    architecture, changes = _model(family)
    stored_as = _ARCHITECTURES.get(family, family)
    model = make_tiny_model(architecture, **changes)
    config = model.config
    # the converter writes 0 for a window that is null
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
        if name.endswith(".sinks"):
            layer = name.split(".")[2]
            tensors[f"blk.{layer}.attn_sinks.weight"] = (values, _F32)
            continue
        if family in EXPERTS and (experts := _of_experts(family, name, values)):
            tensors |= {each: _stored(each, part, of_experts) for each, part in experts.items()}
            continue
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = (values, _F32)
    return write_gguf(folder / f"{family}.gguf", stored_as, metadata, tensors)


def _stored(name: str, values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    kind = kind if name.endswith("_exps.weight") else _F32
    return gguf.quantize(values, kind), kind


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
        ("qwen3_moe", {}, False),
        ("qwen2_moe", {}, False),
        ("mixtral", {}, True),
        ("olmoe", {}, False),
        ("gpt_oss", _WINDOW_KEY, False),
        ("granitemoe", _GRANITE_KEYS, True),
    ],
)
def test_the_file_is_the_model_of_the_folder(
    family: str, keys: dict[str, str], is_permuted: bool, tmp_path: Path
) -> None:
    path = written(family, keys, is_permuted, tmp_path)
    architecture, changes = _model(family)
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


def test_shards_of_quantised_experts_equal_the_whole(tmp_path: Path) -> None:
    """Dequantised, and in blocks."""
    kind = GGMLQuantizationType.Q8_0
    files = [open_checkpoint(str(written("qwen2_moe", {}, False, tmp_path / each.name, each))) for each in (kind, _F32)]
    quantised, plain = (ParameterReader(file.reader, file.config) for file in files)
    rng = np.random.default_rng(0)
    for name, spec in manifest_of(files[0].config).specs.items():
        values = plain.read(name)
        if spec.places:
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(quantised.read(name), values, err_msg=str(name))
        if spec.places or name.part is Part.SHARED_ROUTER:
            ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in spec.shape]
            index = tuple(slice(int(first), int(last)) for first, last in ends)
            np.testing.assert_array_equal(quantised.read(name, index), values[index], err_msg=str(name))
        if spec.places:
            blocks = (*index[:-1], slice(32, 64))
            np.testing.assert_array_equal(quantised.read_stored(name, blocks).widened(), values[blocks])


def _of_experts(family: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a file for a transformers tensor of experts or routers; none for other tensors."""
    if not name.startswith("model.layers."):
        return {}
    _, _, layer, module = name.split(".", 3)
    module = module.replace("block_sparse_moe.", "mlp.")
    if module in ("mlp.gate.weight", "mlp.router.weight", "mlp.router.bias"):
        found = {f"ffn_gate_inp.{module.rpartition('.')[2]}": values}
    elif module == "mlp.shared_expert_gate.weight":
        found = {"ffn_gate_inp_shexp.weight": values[0]}
    elif module.startswith("mlp.experts."):
        stem, _, bias = module.removeprefix("mlp.experts.").partition("_proj")
        kind = "bias" if bias else "weight"
        if family == "gpt_oss" and not bias:
            values = values.swapaxes(1, 2)
        parts = {"down": values}
        if stem == "gate_up":
            halves = (values[:, ::2], values[:, 1::2]) if family == "gpt_oss" else np.split(values, 2, axis=1)
            parts = dict(zip(("gate", "up"), halves, strict=True))
        found = {f"ffn_{part}_exps.{kind}": np.ascontiguousarray(of_part) for part, of_part in parts.items()}
    else:
        found = {}
    return {f"blk.{layer}.{each}": tensor for each, tensor in found.items()}


def _more_metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of some files: windowed layers, separate rotary parameters, and experts."""
    found: dict[str, Any] = {}
    if family in EXPERTS:
        found["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        found["expert_used_count"] = config["num_experts_per_tok"]
        sizes = {"moe_intermediate_size": "expert", "shared_expert_intermediate_size": "expert_shared"}
        found |= {f"{key}_feed_forward_length": config[name] for name, key in sizes.items() if name in config}
        if family == "gpt_oss":
            found["expert_feed_forward_length"] = config["intermediate_size"]
    if family in ("exaone4", "olmo3"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    ropes = config["rope_parameters"]
    if "sliding_attention" in ropes:
        found["rope.freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    if ropes["rope_type"] != "default":
        found |= {"rope.scaling.type": ropes["rope_type"], "rope.scaling.factor": ropes["factor"]}
        if ropes["rope_type"] == "yarn":
            found["rope.scaling.original_context_length"] = ropes["original_max_position_embeddings"]
    return found

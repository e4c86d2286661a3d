"""Mixtures of experts in checkpoints: each parameter equals transformers', in every layout of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.family_cases import EXPERTS, HYBRIDS
from helpers.tiny_models import make_tiny_model
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint import ParameterReader, open_checkpoint
from sglang_jax.checkpoint.hf_config import load_hf_config, load_quantization
from sglang_jax.checkpoint.stored_quantization import StoredQuantization
from sglang_jax.errors import CheckpointError

_OTHER_ROWS = {
    **{name: EXPERTS[name] for name in ("glm4_moe", "ernie4_5_moe", "minimax_m2", "llama4_text")},
    **{name: HYBRIDS[name] for name in ("lfm2_moe", "qwen3_5_moe", "granite_hybrid_experts")},
}
"""Families whose parameters have the rows of transformers' in another order; tests of logits compare them."""

_OF_TRANSFORMERS = [name for name in EXPERTS if name not in _OTHER_ROWS]
_STACKED = sorted(set(_OF_TRANSFORMERS) - {"gpt_oss"})
"""Families whose folders may have the stacked layout that transformers 5 has in memory; gpt-oss's always do."""

_MODULES = {
    Part.ATTENTION_NORM: "input_layernorm",
    Part.FEED_FORWARD_NORM: "post_attention_layernorm",
    Part.QUERY: "self_attn.q_proj",
    Part.KEY: "self_attn.k_proj",
    Part.VALUE: "self_attn.v_proj",
    Part.OUTPUT: "self_attn.o_proj",
    Part.QUERY_NORM: "self_attn.q_norm",
    Part.KEY_NORM: "self_attn.k_norm",
    Part.GATE: "mlp.gate_proj",
    Part.UP: "mlp.up_proj",
    Part.DOWN: "mlp.down_proj",
    Part.SHARED_GATE: "mlp.shared_expert.gate_proj",
    Part.SHARED_UP: "mlp.shared_expert.up_proj",
    Part.SHARED_DOWN: "mlp.shared_expert.down_proj",
    Part.SHARED_ROUTER: "mlp.shared_expert_gate",
}
_WHOLE = {Part.EMBEDDING: "model.embed_tokens", Part.FINAL_NORM: "model.norm", Part.HEAD: "lm_head"}


def tiny_model(family: str) -> PreTrainedModel:
    return make_tiny_model(EXPERTS[family].architecture, **EXPERTS[family].changes)


def of_transformers(model: PreTrainedModel, name: ParameterName) -> np.ndarray:
    """A parameter, matrices as [out, in], from transformers' model in memory."""
    values = {key: value.numpy() for key, value in model.state_dict().items()}
    if name.layer is None:
        return values[f"{_WHOLE[name.part]}.{name.kind}"]
    layer = f"model.layers.{name.layer}"
    if name.part is Part.SINKS:
        return values[f"{layer}.self_attn.sinks"]
    if name.part in _MODULES:
        return values[f"{layer}.{_MODULES[name.part]}.{name.kind}"]
    family = model.config.model_type
    module = f"{layer}.block_sparse_moe" if family == "granitemoe" else f"{layer}.mlp"
    if name.part is Part.ROUTER:
        router = "router" if family in ("granitemoe", "gpt_oss") else "gate"
        return values[f"{module}.{router}.{name.kind}"]
    ending = "_bias" if name.kind is ParameterKind.BIAS else ""
    stem = "down_proj" if name.part is Part.EXPERT_DOWN else "gate_up_proj"
    stacked = values[f"{module}.experts.{stem}{ending}"]
    if family == "gpt_oss" and not ending:
        stacked = stacked.swapaxes(1, 2)
    if name.part is Part.EXPERT_DOWN:
        return stacked
    second = name.part is Part.EXPERT_UP
    return stacked[:, second::2] if family == "gpt_oss" else np.split(stacked, 2, axis=1)[second]


def saved(model: PreTrainedModel, folder: Path, *, stacked: bool = False) -> Path:
    """`stacked`: experts in one tensor, as in memory, instead of one tensor each."""
    model.save_pretrained(folder, save_original_format=not stacked)
    return folder


def changed(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def parameters(folder: Path) -> ParameterReader:
    opened = open_checkpoint(str(folder))
    assert opened.reader is not None
    return ParameterReader(opened.reader, opened.config)


def faults(model: PreTrainedModel, folder: Path) -> list[ParameterName]:
    """Parameters that differ from transformers', whole or as shards."""
    rng = np.random.default_rng(0)
    reader = parameters(folder)
    wrong = []
    for name, spec in manifest_of(reader.config).specs.items():
        expected = of_transformers(model, name)
        assert spec.shape == expected.shape
        ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in spec.shape]
        index = tuple(slice(int(first), int(last)) for first, last in ends)
        if name.part in (Part.QUERY, Part.KEY, Part.VALUE, Part.QUERY_NORM, Part.KEY_NORM):
            index = (slice(None), *index[1:])  # where rows make up heads, whole heads are read
        if not (
            np.array_equal(reader.read(name), expected) and np.array_equal(reader.read(name, index), expected[index])
        ):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("family", "stacked"), [(name, False) for name in _OF_TRANSFORMERS] + [(name, True) for name in _STACKED]
)
def test_parameters_are_those_of_transformers(family: str, stacked: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    folder = saved(model, tmp_path, stacked=stacked)
    names = load_file(folder / "model.safetensors").keys()
    assert any("experts.gate_up_proj" in name for name in names) is (stacked or family == "gpt_oss")
    assert not faults(model, folder)


@pytest.mark.parametrize("family", _OTHER_ROWS)
def test_stacked_folders_have_the_same_parameters_as_others(family: str, tmp_path: Path) -> None:
    model = make_tiny_model(_OTHER_ROWS[family].architecture, **_OTHER_ROWS[family].changes)
    plain, stacked = (parameters(saved(model, tmp_path / str(kind), stacked=kind)) for kind in (False, True))
    for name in manifest_of(plain.config).specs:
        np.testing.assert_array_equal(plain.read(name), stacked.read(name))


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = make_tiny_model(EXPERTS["ernie4_5_moe"].architecture, **EXPERTS["ernie4_5_moe"].changes)
    further = {"model.mtp_block.0.mlp.up_proj.weight": np.ones((4, 4), np.float32)}
    changed(saved(model, tmp_path), lambda tensors: tensors.update(further))
    open_checkpoint(str(tmp_path))


def test_experts_in_another_order_would_be_noticed(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")

    def shift(tensors: dict[str, np.ndarray]) -> None:
        before = dict(tensors)
        for expert in range(6):
            stem = "model.layers.2.mlp.experts.{}.down_proj.weight"
            tensors[stem.format(expert)] = before[stem.format((expert + 1) % 6)]

    assert faults(model, changed(saved(model, tmp_path), shift)) == [ParameterName(Part.EXPERT_DOWN, layer=2)]


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_gates_swapped_with_ups_would_be_noticed(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)

    def swap(tensors: dict[str, np.ndarray]) -> None:
        if family == "gpt_oss":
            stem = "model.layers.1.mlp.experts.gate_up_proj"
            of_pairs = tensors[stem].reshape(6, 64, -1, 2)
            tensors[stem] = np.ascontiguousarray(of_pairs[..., ::-1]).reshape(tensors[stem].shape)
        else:
            stem = "model.layers.1.block_sparse_moe.input_linear.weight"
            tensors[stem] = np.concatenate(np.split(tensors[stem], 2, axis=1)[::-1], axis=1)

    wrong = faults(model, changed(saved(model, tmp_path), swap))
    assert wrong == [ParameterName(part, layer=1) for part in (Part.EXPERT_GATE, Part.EXPERT_UP)]


@pytest.mark.parametrize(
    ("family", "stacked", "tensor"),
    [
        ("qwen3_moe", False, "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("qwen3_moe", True, "model.layers.2.mlp.experts.gate_up_proj"),
        ("qwen2_moe", False, "model.layers.3.mlp.shared_expert_gate.weight"),
        ("mixtral", False, "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("olmoe", False, "model.layers.0.mlp.gate.weight"),
        ("gpt_oss", False, "model.layers.1.mlp.experts.down_proj_bias"),
        ("granitemoe", False, "model.layers.1.block_sparse_moe.output_linear.weight"),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    family: str, stacked: bool, tensor: str, tmp_path: Path
) -> None:
    folder = saved(tiny_model(family), tmp_path, stacked=stacked)

    def check() -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(folder))
        return str(caught.value)

    changed(folder, lambda tensors: tensors.update({tensor: np.ascontiguousarray(tensors[tensor][:-1])}))
    assert f"misshapen: {tensor} is" in check()
    assert "(1 faults)" in check()
    changed(folder, lambda tensors: tensors.pop(tensor))
    # without it, there is no sign that a folder stacks its experts
    one_each = tensor.replace("gate_up_proj", "0.gate_proj.weight") if stacked else tensor
    assert f"missing: {one_each}" in check()


def test_of_many_missing_tensors_only_the_first_are_named(tmp_path: Path) -> None:
    folder = saved(tiny_model("olmoe"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 1000}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    lines = str(caught.value).splitlines()
    # the tensors of 994 experts of both layers, and the routers' shape
    assert f"({2 * 994 * 3 + 2} faults)" in lines[0]
    assert (len(lines), lines[-1]) == (502, f"  and {2 * 994 * 3 + 2 - 500} more")


_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def configured(folder: Path, family: str, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(_SHAPE | {"model_type": family} | values))
    return load_hf_config(folder)


@pytest.mark.parametrize("family", sorted(EXPERTS.keys() - {"ernie4_5_moe"}))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 0}, "num_local_experts is 0, it must be at least 1"),
        ({"num_experts": -3}, "num_experts is -3, it must be at least 1"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4 and num_local_experts is 8; they must be equal"),
        ({"num_local_experts": 5, "num_experts_per_tok": 6}, r"per_tok is 6, it must be at most .* experts \(5\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, it must be at least 1"),
        ({"num_experts": "8"}, "num_experts is '8', it must be an integer"),
        ({"num_experts": 100000}, "100000 experts in each of 4 layers; the limit for all layers together is 65536"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        configured(tmp_path, family, change)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, it must be at least 1"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is .*, it must be an integer or a list"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, it must be at least 1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, it must be"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; only 0 is supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8; only null is supported"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0, it must be greater than 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "quark"}}, "quantised by 'quark' are not supported"),
        ("ernie4_5_moe", {"moe_num_experts": 4}, r"moe_k is 6, it must be at most the number of experts \(4\)"),
        ("granitemoe", {"intermediate_size": None}, "intermediate_size is missing"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling is 0, it must be greater than 0"),
        ("granitemoe", {"residual_multiplier": -1.0}, "residual_multiplier is -1, it must be greater than 0"),
    ],
)
def test_unsupported_fields_are_refused(family: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        configured(tmp_path, family, change)


def test_the_file_says_which_layers_have_experts(tmp_path: Path) -> None:
    def sparse(**values: Any) -> list[bool]:
        layers = configured(tmp_path, "qwen3_moe", values).layers
        return [isinstance(layer.feed_forward, ExpertsConfig) for layer in layers]

    assert sparse() == [True] * 4
    assert sparse(decoder_sparse_step=3) == [False, False, True, False]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]


@pytest.mark.parametrize("types", [{}, {"layer_types": None}])
def test_windows_of_qwen2_without_types_of_layers(types: dict[str, Any], tmp_path: Path) -> None:
    """As in transformers: every second layer has one, whether the field is null or missing."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}
    layers = configured(tmp_path, "qwen2_moe", window | types).layers
    assert [layer.attention.window for layer in layers] == [4, None, 4, None]


def test_the_rotation_of_gpt_oss_in_each_spelling(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    old = configured(tmp_path, "gpt_oss", {"rope_scaling": scaling, "rope_theta": 150000})
    assert old == configured(tmp_path, "gpt_oss", {"rope_parameters": scaling | {"rope_theta": 150000.0}})
    assert old == configured(tmp_path, "gpt_oss", {})
    plain = configured(tmp_path, "gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert plain.layers[0].mixer.rope.theta == 500.0
    assert plain != old


def test_the_float8_of_minimax_is_that_of_deepseek(tmp_path: Path) -> None:
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def read(word: str) -> StoredQuantization | None:
        configured(tmp_path, "minimax_m2", {"quantization_config": blocks | {"fmt": word}})
        return load_quantization(tmp_path)

    assert read("float8_e4m3fn") == read("e4m3")
    with pytest.raises(CheckpointError, match="fmt 'e5m2' of quantised weights is not supported; supported: e4m3"):
        read("e5m2")

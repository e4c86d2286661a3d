"""The files of well-known quantised repositories of the Hugging Face hub, without values: config.json and the headers
of the weights, in files that occupy no space.

Facts are from the repositories' cards, from documentation and issues that quote their files, and from the tools that
wrote them. `RedHatAI` was `neuralmagic`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers import published_models as models
from helpers.published_models import Fields, Model, Shape

from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales

Stored = tuple[str, Shape]
"""A tensor's dtype, in the words of safetensors, and its shape."""

Headers = dict[str, Stored]
Quantiser = Callable[..., Headers]
"""The tensors of a layer with a weight of some shape, by the end of their names."""

_BYTES = {"I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
_SHARDS = 2


@dataclass(frozen=True)
class Repository:
    """A repository.

    - `quantization`: of config.json; `beside`: hf_quant_config.json, which ModelOpt writes.
    - `quantise`: the tensors of each quantised layer. `dtype`: of other tensors, except those whose names end as in
      `others`.
    - `kept`: the encoding of quantised matrices; None for those that are dequantised when they are read.
    - `optional`: ends of the names of tensors that it could lack.
    - `scales_of_keys`: for a cache of 8 bits. `only_experts`: are quantised.
    """

    name: str
    fields: Fields
    model: Callable[[Fields], Model]
    quantise: Quantiser
    kept: Encoding | None
    quantization: Fields | None
    beside: Fields | None = None
    dtype: str = "BF16"
    others: dict[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    scales_of_keys: bool = False
    only_experts: bool = False

    def cut(self, layers: int, experts: int | None = None) -> Repository:
        """The same with fewer layers, and perhaps fewer experts, and with as many layers with experts as fit."""
        changes: Fields = {"num_hidden_layers": layers}
        if "first_k_dense_replace" in self.fields:
            changes["first_k_dense_replace"] = min(self.fields["first_k_dense_replace"], layers - 1)
        if "layer_types" in self.fields:
            changes["layer_types"] = self.fields["layer_types"][:layers]
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if experts is not None and name in self.fields:
                changes[name] = experts
        return replace(self, fields=self.fields | changes)

    def unquantised(self) -> Model:
        return self.model(self.fields)

    def headers(self) -> Headers:
        model, found = self.unquantised(), Headers()
        for name, shape in model.plain.items():
            dtype = next((each for ending, each in self.others.items() if name.endswith(ending)), self.dtype)
            found[name] = dtype, shape
        for layer, shape in model.linear.items():
            tensors = self.quantise(*shape).items()
            found |= {f"{layer}{'' if ending[0] == '_' else '.'}{ending}": stored for ending, stored in tensors}
            if self.scales_of_keys and layer.endswith(("k_proj", "v_proj")):
                found[f"{layer}.{layer[-6]}_scale"] = "F32", ()
        return found

    def write_config(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        quantization = {} if self.quantization is None else {"quantization_config": self.quantization}
        (folder / "config.json").write_text(json.dumps(self.fields | quantization))
        if self.beside is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.beside))

    def write(self, folder: Path, headers: Headers | None = None) -> Path:
        """Writes config.json and weights with `headers`, or its own, into a new folder. Values are holes of files, so
        they take no space, and read as zeros."""
        self.write_config(folder)
        wanted = list((self.headers() if headers is None else headers).items())
        files: dict[str, str] = {}
        for number in range(_SHARDS):
            shard = dict(wanted[number::_SHARDS])
            file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
            files |= dict.fromkeys(shard, file)
            _write_header(folder / file, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        return folder


def _write_header(file: Path, headers: Headers) -> None:
    entries, end = {}, 0
    for name, (dtype, shape) in headers.items():
        size = math.prod(shape) * _BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def _gptq(size: int, *, useless_biases: bool = False) -> Quantiser:
    """`useless_biases`: of zeros, in every layer. -1: a row is one group."""

    def tensors(rows: int, columns: int) -> Headers:
        groups = 1 if size == -1 else columns // size
        return {
            "qweight": ("I32", (columns // 8, rows)),
            "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows)),
            "g_idx": ("I32", (columns,)),
            **({"bias": ("F16", (rows,))} if useless_biases else {}),
        }

    return tensors


def _awq(rows: int, columns: int) -> Headers:
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // 128, rows // 8)),
        "scales": ("F16", (columns // 128, rows)),
    }


def _float8_blocks(scales: str) -> Quantiser:
    def tensors(rows: int, columns: int) -> Headers:
        return {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale_inv": (scales, (-(-rows // 128), -(-columns // 128))),
        }

    return tensors


def _packed_with_zeros(size: int) -> Quantiser:
    def tensors(rows: int, columns: int) -> Headers:
        return {
            "weight_packed": ("I32", (rows, columns // 8)),
            "weight_scale": ("BF16", (rows, columns // size)),
            "weight_zero_point": ("I32", (rows // 8, columns // size)),
            "weight_shape": ("I64", (2,)),
        }

    return tensors


def _by_row(values: str) -> Quantiser:
    return lambda rows, columns: {"weight": (values, (rows, columns)), "weight_scale": ("BF16", (rows, 1))}


def _by_matrix(scale: Stored) -> Quantiser:
    return lambda *shape: {"weight": ("F8_E4M3", shape), "weight_scale": scale, "input_scale": scale}


def _mxfp4(experts: int, rows: int, columns: int) -> Headers:
    groups = columns // 32
    return {"_blocks": ("U8", (experts, rows, groups, 16)), "_scales": ("U8", (experts, rows, groups))}


_FLOAT8_BLOCKS: Fields = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
_FLOAT8_BLOCKS |= {"weight_block_size": [128, 128]}
_AWQ: Fields = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}


def _of_gptq(**changes: object) -> Fields:
    """As AutoGPTQ writes it."""
    fields = {"bits": 4, "damp_percent": 0.1, "desc_act": True, "group_size": 128, "model_file_base_name": None}
    fields |= {"model_name_or_path": None, "quant_method": "gptq", "sym": True, "true_sequential": True}
    return fields | changes


def _of_compressed(packing: str, weights: Fields, inputs: Fields | None, status: str = "frozen") -> Fields:
    """As llm-compressor writes it."""
    numbers = {"block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": "minmax"}
    numbers |= {"observer_kwargs": {}, "symmetric": True}
    group = {
        "input_activations": None if inputs is None else numbers | inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": numbers | weights,
    }
    found = {"config_groups": {"group_0": group}, "format": packing, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return found | {"quant_method": "compressed-tensors", "quantization_status": status}


def _plain_modules(fields: Fields) -> list[str]:
    """What Qwen's FP8 with experts lists as not converted."""
    named = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    return ["lm_head", *(f"model.layers.{at}.{name}" for at in range(fields["num_hidden_layers"]) for name in named)]


def _int4(size: int, scales: Scales = Scales.FLOAT16, *, zeros: bool = False) -> Encoding:
    return Encoding(GroupType(Levels.INT4, size, scales, zeros))


def _float8(scales: Scales) -> Encoding:
    return Encoding(GroupType(Levels.FLOAT8_E4M3, 128, scales))


_BY_TOKEN = {"dynamic": True, "strategy": "token", "observer": None}

REPOSITORIES = [
    Repository(
        "openai/gpt-oss-20b",
        models.GPT_OSS,
        models.gpt_oss,
        _mxfp4,
        Encoding(GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)),
        {
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
            "quant_method": "mxfp4",
        },
        only_experts=True,
    ),
    Repository(
        "deepseek-ai/DeepSeek-V3",
        models.DEEPSEEK_V3,
        models.deepseek_v3,
        _float8_blocks("F32"),
        _float8(Scales.FLOAT32),
        _FLOAT8_BLOCKS,
        others={"e_score_correction_bias": "F32"},
    ),
    Repository(
        "Qwen/Qwen3-8B-FP8",
        models.QWEN3,
        models.dense,
        _float8_blocks("BF16"),
        _float8(Scales.BFLOAT16),
        _FLOAT8_BLOCKS,
    ),
    Repository(
        "Qwen/Qwen3-30B-A3B-FP8",
        models.QWEN3_MOE,
        models.qwen3_moe,
        _float8_blocks("BF16"),
        _float8(Scales.BFLOAT16),
        _FLOAT8_BLOCKS | {"modules_to_not_convert": _plain_modules(models.QWEN3_MOE)},
    ),
    Repository(
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        models.QWEN2,
        models.dense,
        _gptq(128, useless_biases=True),
        _int4(128),
        _of_gptq(damp_percent=0.01, desc_act=False, static_groups=False, checkpoint_format="gptq"),
        dtype="F16",
        optional=(".g_idx", "o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias"),
    ),
    Repository(
        "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
        models.QWEN3_MOE,
        models.qwen3_moe,
        _gptq(128),
        _int4(128),
        _of_gptq(damp_percent=0.01, desc_act=False, static_groups=False, checkpoint_format="gptq"),
        optional=(".g_idx",),
    ),
    Repository(
        "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ",
        models.MISTRAL,
        models.dense,
        _gptq(128, useless_biases=True),
        None,  # inputs are in another order
        _of_gptq(model_file_base_name="model"),
        optional=(".bias",),
        dtype="F16",
    ),
    Repository(
        "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ",
        models.MIXTRAL,
        models.mixtral,
        _gptq(-1),
        _int4(128),
        _of_gptq(group_size=-1, model_file_base_name="model"),
        optional=(".g_idx",),
        dtype="F16",
    ),
    Repository(
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        models.QWEN2,
        models.dense,
        _awq,
        _int4(128, zeros=True),
        _AWQ | {"modules_to_not_convert": None},
        dtype="F16",
    ),
    Repository(
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        models.LLAMA,
        models.dense,
        _awq,
        _int4(128, zeros=True),
        _AWQ | {"modules_to_not_convert": None},
        dtype="F16",
    ),
    Repository(
        "casperhansen/mixtral-instruct-awq",
        models.MIXTRAL,
        models.mixtral,
        _awq,
        _int4(128, zeros=True),
        _AWQ | {"modules_to_not_convert": ["gate"]},
        dtype="F16",
    ),
    Repository(
        "RedHatAI/Qwen3-0.6B-quantized.w4a16",
        models.QWEN3_SMALL,
        models.dense,
        _packed_with_zeros(64),
        _int4(64, Scales.BFLOAT16, zeros=True),
        _of_compressed(
            "pack-quantized",
            {
                **{"actorder": "weight", "group_size": 64, "num_bits": 4, "observer": "mse", "strategy": "group"},
                **{"symmetric": False, "type": "int"},
            },
            None,
            "compressed",
        ),
    ),
    Repository(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        models.LLAMA,
        models.dense,
        _by_row("I8"),
        Encoding(ValueType.INT8, activations=ActivationScales.TOKEN),
        _of_compressed("int-quantized", {"strategy": "channel", "type": "int"}, _BY_TOKEN | {"type": "int"}),
    ),
    Repository(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
        models.LLAMA,
        models.dense,
        _by_matrix(("BF16", (1,))),
        Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TENSOR),
        _of_compressed("float-quantized", *[{"strategy": "tensor", "type": "float"}] * 2),
    ),
    Repository(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
        models.LLAMA,
        models.dense,
        _by_row("F8_E4M3"),
        Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TOKEN),
        _of_compressed("float-quantized", {"strategy": "channel", "type": "float"}, _BY_TOKEN | {"type": "float"}),
    ),
    Repository(
        "RedHatAI/Qwen2-0.5B-Instruct-FP8",
        models.QWEN2_SMALL,
        models.dense,
        _by_matrix(("F32", ())),
        Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TENSOR),
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
    ),
    Repository(
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        models.LLAMA,
        models.dense,
        _by_matrix(("F32", ())),
        Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TENSOR),
        None,
        beside={
            "producer": {"name": "modelopt", "version": "0.17.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        scales_of_keys=True,
    ),
]

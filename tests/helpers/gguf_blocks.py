"""Matrices in the blocks of GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from helpers.gguf_files import make_tiny_gguf, model_tensors, write_gguf
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_model, make_tiny_tokenizer

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader
from sglang_jax.checkpoint.encoding import Stored
from sglang_jax.checkpoint.ggml_blocks import WITH_EXACT_ACTIVATIONS, BlockType
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.gguf_reader import GgufReader
from sglang_jax.checkpoint.group_blocks import AS_GROUPS

KINDS = tuple(kind.ggml for kind in BlockType)
EXACT_KINDS = tuple(kind.ggml for kind in WITH_EXACT_ACTIVATIONS)
"""For which there are kernels that multiply bfloat16."""


def stored(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random quantised values with ordinary scales: uint8 `[rows, bytes of a row]`. Columns are rounded up to whole
    blocks."""
    random = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, -(-columns // block), block_bytes), dtype=np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        data[..., 0] = random.integers(122, 127, data.shape[:2])
    for at in BlockType[kind.name].halves:
        scales = (random.standard_normal(data.shape[:2]) / (8 if block == 32 else 256)).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def weights_around_zero(kind: GGMLQuantizationType, shape: tuple[int, int], size: float, seed: int) -> np.ndarray:
    """Blocks of random weights `[rows, columns]` of a type with factors, of about this size: `[rows, bytes]`."""
    data = stored(kind, *shape, seed).reshape(shape[0], -1, GGML_QUANT_SIZES[kind][1])
    largest = {GGMLQuantizationType.Q4_K: 15, GGMLQuantizationType.Q5_K: 31, GGMLQuantizationType.Q6_K: 127}[kind]
    # Offsets are half of the largest level.
    for at, factor in zip(BlockType[kind.name].halves, (1.0, largest / 2), strict=False):
        data[..., at : at + 2] = np.array([factor * size / 32 / largest], np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


def opened(
    folder: Path, data: np.ndarray, kind: GGMLQuantizationType, architecture: str = "llama", interleaved: bool = False
) -> tuple[ParameterReader, ParameterName]:
    """The query projection of a model of 2 heads of `rows / 2`, in a file."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    columns = data.shape[1] // block_bytes * block
    config = small_config(
        architecture=architecture,
        vocab_size=16,
        hidden_size=columns,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=len(data) // 2,
        attention_bias=False,
    )
    config = config.with_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, interleaved_rope=interleaved)))
    file = open_gguf(write_gguf(folder / "x.gguf", architecture, {}, {"blk.0.attn_q.weight": (data, kind)}))
    reader = GgufReader(file, config)
    return ParameterReader(reader, config), ParameterName(Part.QUERY, layer=0)


def blocks_of(kind: GGMLQuantizationType, outputs: int, inputs: int, folder: Path) -> tuple[Stored, np.ndarray]:
    """Blocks, and the matrix as the gguf package widens it, in bfloat16."""
    data = stored(kind, outputs, inputs)
    parameters, name = opened(folder, data, kind, "qwen2")
    return parameters.read_stored(name), dequantize(data, kind).astype(ml_dtypes.bfloat16)


def make_mixed_gguf(folder: Path, *, tied: bool, up: GGMLQuantizationType = GGMLQuantizationType.Q5_K) -> Path:
    """A tiny Llama whose matrices have types such as those of a file "Q4_K_M". `up`: that of `ffn_up`; `ffn_gate` has
    Q5_K."""
    model = make_tiny_model("llama", hidden_size=256, intermediate_size=512, tie_word_embeddings=tied, vocab_size=378)
    kinds = {"attn_v": Q6_K, "ffn_down": Q6_K, "token_embd": Q6_K, "output": Q6_K, "ffn_gate": Q5_K, "ffn_up": up}
    shapes = {
        name: data.shape for name, (data, _) in model_tensors(model, GGMLQuantizationType.F32).items() if data.ndim == 2
    }
    others = {}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = kinds.get(name.split(".")[-2], GGMLQuantizationType.Q4_K)
        others[name] = weights_around_zero(kind, shape, 0.1, number), kind
    tokenizer = make_tiny_tokenizer(folder)
    return make_tiny_gguf(folder / "model.gguf", model, tokenizer, kind=GGMLQuantizationType.Q8_0, others=others)


GROUPS = tuple(kind.ggml for kind in AS_GROUPS)
"""Types that are groups, for kernels of GPUs and TPUs."""


def make_gguf_in_groups(folder: Path, kind: GGMLQuantizationType, *, tied: bool) -> Path:
    """A tiny Llama with all matrices in blocks of a type of `GROUPS`."""
    model = make_tiny_model("llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=tied, vocab_size=378)
    others = {}
    for number, (name, (data, _)) in enumerate(model_tensors(model, GGMLQuantizationType.F32).items()):
        if data.ndim == 2:
            blocks = stored(kind, *data.shape, seed=number).reshape(data.shape[0], -1, GGML_QUANT_SIZES[kind][1])
            if kind is GGMLQuantizationType.MXFP4:
                blocks[..., 0] -= 4  # of the exponents, so that activations stay small
            else:
                scales = blocks[..., :2].copy().view(np.float16)
                blocks[..., :2] = (scales / 32).astype(np.float16).view(np.uint8)
            others[name] = blocks.reshape(data.shape[0], -1), kind
    return make_tiny_gguf(folder / "model.gguf", model, make_tiny_tokenizer(folder), others=others)


Q5_K, Q6_K = GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K

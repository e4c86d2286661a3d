"""Every tensor type of GGUF files, against a scalar dequantiser written from ggml's block layouts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize
from helpers.gguf_files import write_gguf
from helpers.small_configs import small_config

from sglang_jax.checkpoint import ModelConfig
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.gguf_reader import SUPPORTED_TYPES, GgufReader
from sglang_jax.checkpoint.reader import Role
from sglang_jax.errors import CheckpointError

ROWS, COLUMNS = 8, 512
NAME, HF_NAME = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"


def config(architecture: str = "llama", heads: int = 2, head_dim: int = 6) -> ModelConfig:
    return small_config(
        architecture=architecture,
        vocab_size=16,
        hidden_size=COLUMNS,
        intermediate_size=ROWS,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=head_dim,
        attention_bias=True,
    )


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * value for value in struct.unpack_from("<32b", block, 2)]


def nibbles(data: bytes) -> list[int]:
    """All low halves, then all high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (value - 8) for value in nibbles(block[2:18])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * value + half(block, 2) for value in nibbles(block[4:20])]


def fifth_bits(data: bytes) -> list[int]:
    (bits,) = struct.unpack("<I", data)
    return [(bits >> position & 1) << 4 for position in range(32)]


def q5_0(block: bytes) -> list[float]:
    values = zip(nibbles(block[6:22]), fifth_bits(block[2:6]), strict=True)
    return [half(block, 0) * ((low | high) - 16) for low, high in values]


def q5_1(block: bytes) -> list[float]:
    values = zip(nibbles(block[8:24]), fifth_bits(block[4:8]), strict=True)
    return [half(block, 0) * (low | high) + half(block, 2) for low, high in values]


def scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    """Six bits each of the scale and the minimum of a group of 32, packed into 12 bytes for 8 groups."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = packed[group + 4]
    return low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4


def k_quant(block: bytes, low: list[int], high: list[int]) -> list[float]:
    values = []
    for group in range(8):
        scale, minimum = scale_and_min(block[4:16], group)
        for position in range(32 * group, 32 * group + 32):
            level = low[position] | high[position]
            values.append(half(block, 0) * scale * level - half(block, 2) * minimum)
    return values


def low_halves_by_64(data: bytes) -> list[int]:
    return [value for start in range(0, 128, 32) for value in nibbles(data[start : start + 32])]


def q4_k(block: bytes) -> list[float]:
    return k_quant(block, low_halves_by_64(block[16:144]), [0] * 256)


def q5_k(block: bytes) -> list[float]:
    high = [(block[16 + position % 32] >> (position // 32) & 1) << 4 for position in range(256)]
    return k_quant(block, low_halves_by_64(block[48:176]), high)


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    values = [0.0] * 256
    for part in range(2):
        for position in range(32):
            for quarter in range(4):
                byte = low[64 * part + position + 32 * (quarter % 2)]
                nibble = byte & 15 if quarter < 2 else byte >> 4
                upper = high[32 * part + position] >> 2 * quarter & 3
                at = 128 * part + 32 * quarter + position
                values[at] = half(block, 208) * scales[at // 16] * ((nibble | upper << 4) - 32)
    return values


def mxfp4(block: bytes) -> list[float]:
    numbers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return [2.0 ** (block[0] - 127) * (-1) ** (level >> 3) * numbers[level & 7] for level in nibbles(block[1:])]


ORACLES: dict[GGMLQuantizationType, Callable[[bytes], list[float]]] = {
    GGMLQuantizationType.Q8_0: q8_0,
    GGMLQuantizationType.Q4_0: q4_0,
    GGMLQuantizationType.Q4_1: q4_1,
    GGMLQuantizationType.Q5_0: q5_0,
    GGMLQuantizationType.Q5_1: q5_1,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
    GGMLQuantizationType.MXFP4: mxfp4,
}
HALVES_AT = {GGMLQuantizationType.MXFP4: (), GGMLQuantizationType.Q6_K: (208,), GGMLQuantizationType.Q8_0: (0,)}


def random_blocks(kind: GGMLQuantizationType, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Random bits with ordinary scales: `[rows, bytes of a row]`."""
    generator = np.random.default_rng(int(kind))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        data[..., 0] = generator.integers(118, 132, data.shape[:2])
    for at in HALVES_AT.get(kind, (0, 2)):
        scales = generator.normal(0, 0.1, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def expected(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = [ORACLES[kind](block.tobytes()) for block in blocks]
    return np.array(values, dtype=np.float64).reshape(data.shape[0], -1)


def test_each_supported_type_has_an_oracle_or_is_a_float() -> None:
    plain = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
    assert ORACLES.keys() | plain == SUPPORTED_TYPES


@pytest.mark.parametrize("kind", list(ORACLES), ids=lambda kind: kind.name)
def test_blocks_are_dequantised(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    data = random_blocks(kind)
    file = write_gguf(tmp_path / "x.gguf", "llama", {}, {NAME: (data, kind)})
    reader = GgufReader(open_gguf(file), config())
    assert reader.shape(HF_NAME) == (ROWS, COLUMNS)
    values = reader.read(HF_NAME)
    assert values.dtype == np.float32
    oracle = expected(data, kind)
    np.testing.assert_allclose(values, oracle, rtol=1e-5, atol=1e-6)
    part = reader.read(HF_NAME, (slice(3, 6), slice(17, 300)))
    np.testing.assert_array_equal(part, values[3:6, 17:300])
    assert reader.read(HF_NAME, (slice(4, 4),)).shape == (0, COLUMNS)


def test_scales_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    data = random_blocks(GGMLQuantizationType.MXFP4)
    data[3, 17] = 255
    file = write_gguf(tmp_path / "x.gguf", "llama", {}, {NAME: (data, GGMLQuantizationType.MXFP4)})
    reader = GgufReader(open_gguf(file), config())
    for read in (reader.read, lambda name, index=None: reader.read_array(name, Role.VALUES, index)):
        assert read(HF_NAME, (slice(4, 8),)).size
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight in .* has a scale that is not a number"):
            read(HF_NAME)


@pytest.mark.parametrize("kind", list(ORACLES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [127, 128, 300])
def test_many_rows_are_dequantised_like_few(tmp_path: Path, kind: GGMLQuantizationType, rows: int) -> None:
    data = random_blocks(kind, rows)
    file = write_gguf(tmp_path / "x.gguf", "llama", {}, {NAME: (data, kind)})
    values = GgufReader(open_gguf(file), config()).read(HF_NAME)
    np.testing.assert_array_equal(values, gguf.dequantize(data, kind))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, np.float32),
        (GGMLQuantizationType.F16, np.float16),
        (GGMLQuantizationType.BF16, ml_dtypes.bfloat16),
    ],
)
def test_plain_types_keep_their_type(tmp_path: Path, kind: GGMLQuantizationType, dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    tensors = {
        NAME: (quantize(values, kind), kind),
        "output_norm.weight": (values[0], GGMLQuantizationType.F32),
        "blk.0.ffn_down.weight": (random_blocks(GGMLQuantizationType.Q8_0, 1)[0], GGMLQuantizationType.Q8_0),
    }
    reader = GgufReader(open_gguf(write_gguf(tmp_path / "x.gguf", "llama", {}, tensors)), config())
    read = reader.read(HF_NAME)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, values.astype(dtype))
    np.testing.assert_array_equal(reader.read(HF_NAME, (slice(2, 5),)), values[2:5].astype(dtype))
    np.testing.assert_array_equal(reader.read("model.norm.weight", (slice(1, 9),)), values[0, 1:9])
    assert reader.read("model.layers.0.mlp.down_proj.weight", (slice(5, 40),)).shape == (35,)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_q_and_k_rows_are_unpermuted_for_llama_only(tmp_path: Path, architecture: str) -> None:
    """Worked out for two heads of dimension 6: stored rows 0 to 5 are the rotary pairs (0, 1), (2, 3), (4, 5)."""
    values = np.repeat(np.arange(12, dtype=np.float32)[:, None], COLUMNS, axis=1)
    kind = GGMLQuantizationType.F32
    q8 = quantize(values, GGMLQuantizationType.Q8_0)
    tensors = {
        "blk.0.attn_q.weight": (q8, GGMLQuantizationType.Q8_0),
        "blk.0.attn_q.bias": (values[:, 0].copy(), kind),
        "blk.0.attn_k.weight": (values[:6], kind),
        "blk.0.attn_v.weight": (values[:4], kind),
    }
    reader = GgufReader(open_gguf(write_gguf(tmp_path / "x.gguf", "llama", {}, tensors)), config(architecture))
    llama = architecture == "llama"
    order = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11] if llama else list(range(12))
    prefix = "model.layers.0.self_attn"
    np.testing.assert_allclose(reader.read(f"{prefix}.q_proj.weight")[:, 9], order, rtol=1e-3)
    np.testing.assert_allclose(reader.read(f"{prefix}.q_proj.weight", (slice(1, 6),))[:, 9], order[1:6], rtol=1e-3)
    np.testing.assert_array_equal(reader.read(f"{prefix}.q_proj.bias"), order)
    np.testing.assert_array_equal(reader.read(f"{prefix}.k_proj.weight")[:, 0], order[:6])
    np.testing.assert_array_equal(reader.read(f"{prefix}.v_proj.weight")[:, 0], [0, 1, 2, 3])


def test_an_unsupported_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q2_K
    data = np.zeros((ROWS, COLUMNS // 256 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    file = open_gguf(write_gguf(tmp_path / "x.gguf", "llama", {}, {NAME: (data, kind)}))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight \(Q2_K\).*supported:.*Q6_K"):
        GgufReader(file, config())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "x.gguf", "llama", {}, {}))
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        GgufReader(file, config()).read("model.norm.weight")

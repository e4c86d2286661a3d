"""Writes a GGUF file with random weights in the shape of Llama 3.2 1B: a model to time, for engines that read GGUF.

    python benchmarks/random_gguf.py FILE [--type BF16|Q8_0|Q4_0|Q4_K] [--layers 16]

Matrices are of the type, norms in float32, embeddings tied. With Q4_K, embeddings, values and half of the down
matrices are Q6_K, as in files named Q4_K_M; nothing here quantises to these types, so their bits are random. The
tokenizer is the embedded model's, filled up to the
vocabulary. Layers share their random numbers, but not their bytes in the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter

from sglang_jax.checkpoint import resolve_model

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 8192, 32, 8, 64, 128256
UNUSED = 5
"""GGUF's type of a token that no text has."""


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, [out, in]."""
    yield "token_embd", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        yield f"blk.{layer}.attn_norm", (HIDDEN,)
        yield f"blk.{layer}.attn_q", (HEADS * HEAD_DIM, HIDDEN)
        yield f"blk.{layer}.attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"blk.{layer}.attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"blk.{layer}.attn_output", (HIDDEN, HEADS * HEAD_DIM)
        yield f"blk.{layer}.ffn_norm", (HIDDEN,)
        yield f"blk.{layer}.ffn_gate", (INNER, HIDDEN)
        yield f"blk.{layer}.ffn_up", (INNER, HIDDEN)
        yield f"blk.{layer}.ffn_down", (HIDDEN, INNER)
    yield "output_norm", (HIDDEN,)


def add_tokenizer(writer: GGUFWriter) -> None:
    """The embedded model's tokens, and unused ones up to the vocabulary."""
    fields = GGUFReader(resolve_model("demo").path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    unused = VOCABULARY - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<|unused_{number}|>" for number in range(unused))])
    writer.add_token_types([*kinds, *([UNUSED] * unused)])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def type_of(name: str, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type of a matrix in a file of a type."""
    six_bits = "token_embd" in name or "attn_v" in name or ("ffn_down" in name and int(name.split(".")[1]) % 2 == 0)
    return GGMLQuantizationType.Q6_K if kind is GGMLQuantizationType.Q4_K and six_bits else kind


def random_weights(
    shape: tuple[int, ...], kind: GGMLQuantizationType, size: float, random: np.random.Generator
) -> np.ndarray:
    """Normal weights, quantised; or, in Q4_K and Q6_K, random bits with factors for weights of about this size around
    zero."""
    if kind not in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        weights: np.ndarray = gguf.quantize(np.float32(size) * random.standard_normal(shape, dtype=np.float32), kind)
        return weights
    weights_of_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // weights_of_block, block_bytes), dtype=np.uint8)
    # Scales are up to 63 or 127, levels up to 15 or 31 from the middle; minimums are half of the largest levels.
    factors = {0: size / 400, 2: 7.5 * size / 400} if kind is GGMLQuantizationType.Q4_K else {208: size / 1500}
    for at, factor in factors.items():
        blocks[..., at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(file: Path, kind: GGMLQuantizationType, layers: int) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
    random, kept = np.random.default_rng(0), dict[tuple[tuple[int, ...], GGMLQuantizationType], np.ndarray]()
    for name, size in tensors(layers):
        plain = len(size) == 1
        own = GGMLQuantizationType.F32 if plain else type_of(name, kind)
        if (size, own) not in kept:  # quantising takes long
            kept[size, own] = np.ones(size, np.float32) if plain else random_weights(size, own, 0.02, random)
        writer.add_tensor(f"{name}.weight", kept[size, own], raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=["BF16", "Q8_0", "Q4_0", "Q4_K"], default="Q8_0")
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    write(arguments.file, GGMLQuantizationType[arguments.type], arguments.layers)
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

"""Peak host memory while weights are loaded on a CPU, next to the memory that stays in use.

    python benchmarks/loading_memory.py [--formats bfloat16 ...] [--backends torch jax] [--shapes dense experts]
        [--layers 24] [--json FILE]

Random checkpoints of 24 layers, dense (about 740 MB in bfloat16) or with 16 experts, are written to a temporary folder,
and each is loaded in a process that loaded a tiny one before. `int8` and `fp8` are folders of compressed-tensors, Q8_0
and Q4_0 GGUF files, which are dequantised to bfloat16; `quantise int8` is `--quantization int8` of the bfloat16 folder;
`float32` computes in float32, in which torch packs matrices on any CPU.

Memory is anonymous and shared memory of the process (RssAnon and RssShmem), read every 2 ms from outside. Pages of a
mapped file, which the system may reclaim, do not count. "peak" and "held", the final value, are relative to the
state before. "allowed" is the engine's own count of held memory, plus a tenth, plus the largest stored tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from machine import report
from safetensors.torch import save_file

FORMATS = ("bfloat16", "float32", "int8", "fp8", "quantise int8", "Q8_0", "Q4_0")
SHAPES = ("dense", "experts")
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 64, 32000
EXPERTS, EXPERT_INNER = 16, 192
TINY_LAYERS = 1
_INTERVAL = 0.002


def tensors(shape: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen3, dense or with experts."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (HEAD_DIM,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        stems, inner = ([f"{prefix}.mlp"], INNER)
        if shape == "experts":
            yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
            stems, inner = [f"{prefix}.mlp.experts.{expert}" for expert in range(EXPERTS)], EXPERT_INNER
        for stem in stems:
            yield f"{stem}.gate_proj.weight", (inner, HIDDEN)
            yield f"{stem}.up_proj.weight", (inner, HIDDEN)
            yield f"{stem}.down_proj.weight", (HIDDEN, inner)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_folder(folder: Path, shape: str, form: str, layers: int) -> None:
    """A Hugging Face folder with weights in `form`."""
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    random = torch.Generator().manual_seed(0)
    written = {}
    for name, size in tensors(shape, layers):
        in_8_bits = form in ("int8", "fp8") and name.endswith("_proj.weight")
        if in_8_bits and form == "int8":
            written[name] = torch.randint(-127, 128, size, generator=random, dtype=torch.int8)
        elif in_8_bits:
            written[name] = torch.randn(size, generator=random).to(torch.float8_e4m3fn)
        else:
            written[name] = torch.randn(size, generator=random).to(dtype)
        if in_8_bits:
            written[f"{name}_scale"] = torch.full((size[0], 1), 0.01, dtype=torch.bfloat16)
    save_file(written, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape == "experts" else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape == "experts" else "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if shape == "experts":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": EXPERT_INNER}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if form in ("int8", "fp8"):
        numbers = {"num_bits": 8, "type": "int" if form == "int8" else "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": numbers | {"strategy": "channel", "dynamic": False},
            "input_activations": numbers | {"strategy": "token", "dynamic": True},
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if form == "int8" else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        }
    (folder / "config.json").write_text(json.dumps(config))


_GGUF_PARTS = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.experts.0.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
}
_GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(file: Path, shape: str, kind: GGMLQuantizationType, layers: int) -> None:
    """A GGUF file whose matrices are all of one type, except routers."""
    architecture = "qwen3moe" if shape == "experts" else "qwen3"
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    if shape == "experts":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(4)
        writer.add_expert_feed_forward_length(EXPERT_INNER)
    random, kept = np.random.default_rng(0), dict[tuple[int, ...], np.ndarray]()
    for name, size in tensors(shape, layers):
        stem = name.removesuffix(".weight")
        if ".experts." in stem and ".experts.0." not in stem:
            continue
        if ".experts." in stem:
            size = (EXPERTS, *size)
        if stem in _GGUF_NAMES:
            there = _GGUF_NAMES[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            there = f"blk.{layer}.{_GGUF_PARTS[part]}"
        plain = len(size) == 1 or there.endswith("gate_inp")
        # equal shapes share one tensor: quantising takes long
        if size not in kept:
            numbers = random.standard_normal(size, dtype=np.float32)
            kept[size] = numbers if plain else gguf.quantize(numbers, kind)
        writer.add_tensor(f"{there}.weight", kept[size], raw_dtype=GGMLQuantizationType.F32 if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(folder: Path, shape: str, form: str, layers: int) -> Path:
    """Writes the checkpoint; returns the value for `--model-path`."""
    folder.mkdir()
    if form in ("Q8_0", "Q4_0"):
        write_gguf(folder / "model.gguf", shape, GGMLQuantizationType[form], layers)
        return folder / "model.gguf"
    write_folder(folder, shape, form, layers)
    return folder


def load(path: str, backend: str, form: str) -> tuple[object, int]:
    """A runner, and its own count of the bytes of its weights."""
    from sglang_jax.checkpoint import open_checkpoint
    from sglang_jax.config import EngineConfig

    options = {
        "model_path": path,
        "backend": backend,
        "device": "cpu",
        "dtype": "float32" if form == "float32" else "bfloat16",
        "skip_warmup": True,
        "context_length": 64,
        "max_running_requests": 2,
        "max_total_tokens": 128,
        "chunked_prefill_size": 64,
        "quantization": "int8" if form == "quantise int8" else "auto",
    }
    config = EngineConfig.model_validate(options)
    checkpoint = open_checkpoint(path)
    if backend == "torch":
        from torch_backend.loading import load_rank as load_torch

        runner = load_torch(config, checkpoint)
        return runner, runner.report().weight_bytes
    from sglang_jax.jax_runner.loading import load_rank as load_jax

    jax_runner = load_jax(config, checkpoint)
    return jax_runner, jax_runner.report().weight_bytes


def load_twice(backend: str, form: str, tiny: str, path: str) -> None:
    """In a separate process: reports that it is ready to load, waits, loads, and reports what it holds."""
    runner, _ = load(tiny, backend, form)
    del runner
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide new allocations
    print("ready", flush=True)
    sys.stdin.readline()
    _runner, size = load(path, backend, form)
    print(size, flush=True)
    sys.stdin.readline()


def owned(process: int) -> int:
    """Bytes of anonymous and shared memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(backend: str, form: str, tiny: Path, path: Path) -> tuple[int, int, int]:
    """Peak, held memory at the end, and the runner's count of its weights, in bytes."""
    command = [sys.executable, __file__, "--load", backend, form, str(tiny), str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if child.stdout.readline() != "ready\n":
            sys.exit(f"loading {form} with {backend} failed: see above")
        before = peak = owned(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], _INTERVAL)[0]:
            peak = max(peak, owned(child.pid))
        size = int(child.stdout.readline())
        return peak - before, owned(child.pid) - before, size
    finally:
        child.kill()
        child.wait()


def bytes_stored(path: Path) -> tuple[int, int]:
    """Bytes of all tensors of a checkpoint, and of the largest, as stored."""
    if path.suffix == ".gguf":
        sizes = [int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors]
    else:
        file = path / "model.safetensors"
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        sizes = [last - first for first, last in ends]
    return sum(sizes), max(sizes)


def row(shape: str, form: str, backend: str, path: Path, figures: tuple[int, int, int]) -> dict[str, Any]:
    """A line of the table, in MB."""
    peak, held, size = figures
    stored, largest = bytes_stored(path)
    allowed = 1.1 * size + largest
    columns = {"stored": stored, "in memory": size, "largest": largest, "held": held, "peak": peak, "allowed": allowed}
    figures_in_mb = {f"{name} MB": round(value / 1e6) for name, value in columns.items()}
    return {"shape": shape, "format": form, "backend": backend, **figures_in_mb, "peak/allowed": peak / allowed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", choices=FORMATS, nargs="*", default=FORMATS)
    parser.add_argument("--backends", choices=["torch", "jax"], nargs="*", default=["torch", "jax"])
    parser.add_argument("--shapes", choices=SHAPES, nargs="*", default=SHAPES)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load_twice(*arguments.load)
        return
    rows = []
    for shape in arguments.shapes:
        for form in arguments.formats:
            with tempfile.TemporaryDirectory(prefix="loading-memory-") as folder:
                tiny = write(Path(folder, "tiny"), shape, form, TINY_LAYERS)
                path = write(Path(folder, "model"), shape, form, arguments.layers)
                for backend in arguments.backends:
                    rows.append(row(shape, form, backend, path, measure(backend, form, tiny, path)))
                    print(rows[-1], file=sys.stderr, flush=True)
    report("Memory while weights are loaded", rows, arguments.json)


if __name__ == "__main__":
    main()

"""A decode step of a traced model next to our own on a CPU, in processor time of one thread: SmolLM2's layers, six.

    python benchmarks/traced_step_cpu.py [--layers 6] [--rows 1 8 32] [--json FILE]

Random weights, bfloat16, 128 keys a row, with logits. The two take turns, step by step, each first in every other
turn; medians of processor time, which other work on the machine changes little. `traced_cpu.py` compares whole engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import report

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import EngineConfig, LoadFormat, ModelImpl
from torch_backend.batch import ForwardBatch
from torch_backend.compilation.building import build_traced
from torch_backend.cpu_trial import CpuForm
from torch_backend.kernel_choice import choose_kernels
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.shard import ModelShard
from torch_backend.loading import PagedTransformer
from torch_backend.models import build_model
from torch_backend.weights import load_weights

PAGE, KEYS, STEPS, FIRST = 16, 128, 60, 10
CPU = torch.device("cpu")
SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


def load(folder: str, impl: ModelImpl, rows: int) -> PagedTransformer:
    """The model with pages for `rows` rows."""
    config = EngineConfig(model_path=folder)
    checkpoint = open_checkpoint(folder, LoadFormat.DUMMY, model_impl=impl)
    model_config, dtype = checkpoint.config, torch.bfloat16
    form = CpuForm(dtype, dtype, ModelShard.of(model_config, 0, 1).head_forms(model_config))
    kernels = choose_kernels(config.attention_backend, CPU, form, config.cache_folder())
    kinds = {"dtype": dtype, "device": CPU, "operations": kernels.operations, "attention": kernels.attention}
    if impl is ModelImpl.TRANSFORMERS:
        model, read = build_traced(config, checkpoint, **kinds)
        model.load(read)
    else:
        model = build_model(model_config, **kinds)
        load_weights(model, checkpoint.reader, model_config)
    pages = 1 + rows * KEYS // PAGE
    kv = [LayerMemory(KVPages.allocate(pages, 3, PAGE, 64, dtype, CPU)) for _ in model_config.layers]
    return PagedTransformer(model, kv)


def decode_step(rows: int) -> ForwardBatch:
    """One token of each row."""
    table = 1 + torch.arange(rows * KEYS // PAGE, dtype=torch.int32).view(rows, -1)
    return ForwardBatch(
        tokens=torch.arange(rows, dtype=torch.int32) + 5,
        positions=torch.full((rows,), KEYS - 1, dtype=torch.int32),
        write_slots=table[:, -1].long() * PAGE + PAGE - 1,
        page_table=table,
        kv_lens=torch.full((rows,), KEYS, dtype=torch.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        num_decode=rows,
    )


def compare(models: tuple[PagedTransformer, PagedTransformer], rows: int) -> dict[str, float]:
    """Medians of a step of each."""
    batch = decode_step(rows)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS):
        for which in (0, 1) if step % 2 else (1, 0):
            begin = time.process_time()
            models[which].logits(models[which].forward(batch))
            times[which].append(1e3 * (time.process_time() - begin))
    own, traced = (statistics.median(each[FIRST:]) for each in times)
    return {"rows": rows, "own CPU ms": own, "traced CPU ms": traced, "share": own / traced, "target": 0.9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": arguments.layers}))
        both = tuple(load(folder, impl, max(arguments.rows)) for impl in (ModelImpl.NATIVE, ModelImpl.TRANSFORMERS))
        with torch.inference_mode():
            found = [compare((both[0], both[1]), rows) for rows in arguments.rows]
    report(f"A decode step of {arguments.layers} layers, traced and our own", found, arguments.json)


if __name__ == "__main__":
    main()

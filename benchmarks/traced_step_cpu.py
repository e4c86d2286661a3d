"""A decode step of a traced model next to our own on a CPU, in processor time of one thread: SmolLM2's layers, six.

    python benchmarks/traced_step_cpu.py [--layers 6] [--rows 1 8 32] [--steps N] [--passes] [--json FILE]

Random weights, bfloat16, 128 keys a row, with logits. The models take turns, step by step, in an order that changes
with each turn; medians of processor time, which other work on the machine changes little. `--passes`: how long a traced
step takes without a pass, for each pass that can be left out, and without all of them. `traced_cpu.py` compares whole
engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import report

from sglang_jax.architectures.parallelism import ONE_DEVICE
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import ALWAYS_RUN, CompilePass, EngineConfig, LoadFormat, ModelImpl
from torch_backend.batch import ForwardBatch
from torch_backend.compilation.building import build_traced
from torch_backend.cpu_trial import CpuForm
from torch_backend.kernel_choice import choose_kernels
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.shard import ModelShard
from torch_backend.loading import PagedTransformer
from torch_backend.models import build_model
from torch_backend.weights import load_weights

PAGE, KEYS, FIRST = 16, 128, 10
CPU = torch.device("cpu")
KEPT = ALWAYS_RUN | {CompilePass.ALL_REDUCE_ADD_NORM}
"""Passes that are not left out: those that always run, and the one that needs ranks."""

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


def load(folder: str, impl: ModelImpl, rows: int, passes: str = "all") -> PagedTransformer:
    """The model with pages for `rows` rows."""
    config = EngineConfig(model_path=folder, compile_passes=passes)
    checkpoint = open_checkpoint(folder, LoadFormat.DUMMY, model_impl=impl)
    model_config, dtype = checkpoint.config, torch.bfloat16
    form = CpuForm(dtype, dtype, ModelShard.of(model_config, 0, ONE_DEVICE).head_forms(model_config))
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


def measure(models: Mapping[str, PagedTransformer], rows: int, steps: int) -> dict[str, float]:
    """Medians of a step of each, in ms."""
    batch = decode_step(rows)
    times: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for step in range(FIRST + steps):
        first = step % len(names)
        for name in names[first:] + names[:first]:
            begin = time.process_time()
            models[name].logits(models[name].forward(batch))
            times[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(each[FIRST:]) for name, each in times.items()}


def compare(folder: str, rows: list[int], steps: int) -> list[dict[str, object]]:
    """The traced model next to our own."""
    own, traced = (load(folder, impl, max(rows)) for impl in (ModelImpl.NATIVE, ModelImpl.TRANSFORMERS))
    found = {count: measure({"own": own, "traced": traced}, count, steps) for count in rows}
    return [
        {"rows": count, "own CPU ms": one["own"], "traced CPU ms": one["traced"],
         "share": one["own"] / one["traced"], "target": 0.9}
        for count, one in found.items()
    ]  # fmt: skip


def leave_out(folder: str, rows: list[int], steps: int) -> list[dict[str, object]]:
    """The traced model without each pass, relative to all passes."""
    names = [one for one in CompilePass if one not in KEPT]
    chosen = {"": "all", **{name: ",".join({*names} - {name}) for name in names}, "all": "none"}
    models = {left: load(folder, ModelImpl.TRANSFORMERS, max(rows), passes) for left, passes in chosen.items()}
    found = {count: measure(models, count, steps) for count in rows}
    return [
        {"left out": left, **{f"{count} rows, ms": found[count][left] for count in rows},
         **{f"{count} rows, times": found[count][left] / found[count][""] for count in rows}}
        for left in models
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=50, help="of each model, after the first ten")
    parser.add_argument("--passes", action="store_true", help="leave out passes instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, torch.inference_mode():
        Path(folder, "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": arguments.layers}))
        found = (leave_out if arguments.passes else compare)(folder, arguments.rows, arguments.steps)
    title = "traced without a pass" if arguments.passes else "traced and our own"
    report(f"A decode step of {arguments.layers} layers, {title}", found, arguments.json)


if __name__ == "__main__":
    main()

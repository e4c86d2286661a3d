"""The time of the parts of a step of the torch backend on a CPU: the bare model with logits and argmax, SmolLM2-135M.

    python benchmarks/torch_step_cpu.py [--dtypes bfloat16] [--rows 1 8 32] [--context 128] [--prefill 64] [--json FILE]
                                        [--attention numba|native] [--profile]
    python benchmarks/torch_step_cpu.py --prefixes 0 2000 7000 [--chunk 512] [--threads 1] [--dtypes float32 bfloat16]

Random weights. A decode row has `--context` keys, or a few less, as in a running server; `--prefill` is the number of
tokens of each row of a step of prompts. `--profile` prints torch's operators by time for each step measured.

With `--prefixes`, only attention of one chunk of a prompt after a prefix is measured, with the heads of
SmolLM2-135M and of Llama-3.2-1B, in turns with torch: processor time of all threads. "share" is the rate of products
that are needed, of the rate of torch's products of the same sizes, every query with every key, and of its
`scaled_dot_product_attention` "torch" is the time. With `NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2`, kernels are
those of a processor with AVX2; torch's are not.

Whole steps, bfloat16, 2 cores with amx_bf16, median ms, torch's operations and then kernels by numba:

                                rows 1        8             32
  decode, 128 keys a row          26.2 > 16.9   30.7 > 20.4   48.7 > 39.0
  prompts of 64 tokens            43.5 > 29.6  126.3 > 110    427 > 355

Of these the matrix products and the logits, run by themselves in a loop, take 13.3, 13.0 and 18.5 ms of the decode
steps. Calls of the kernels, us: decode attention of 128 keys, 3 kv heads of 3 queries: 10 a row and 3 a call on one
thread, 6 a row on two.

The choices by measurement among torch's operations, which `--attention native` still runs (torch 2.13, a core
with amx_bf16, processor time of one thread next to other work):

All matrix products of the layers, bfloat16, ms          rows 1      8     32    512
  plain matrices                                           25.3   29.9   36.7  116.0
  packed, whatever number of rows is named in advance      15.2   18.6   25.0   90.0
  float32: packed ones take a fifth longer for 1 row and a quarter less for 8; they are packed too.

Operations on a layer's rows, us                         rows 1             32    512
  RMS norm: functional.rms_norm                            11.6           25.9    378
    norm, scale and weight in place in float32             11.0           18.4    164
  rotation of 12 heads of 64, halves apart                 16.8           26.4    159 (two threads)
    heads times cosines plus swapped heads times sines     11.1           21.6    151 (two threads)
  attention, 3 kv heads of 3 queries, 120 keys             15.1          385.7
    the same in float32                                    16.9          417.5
  gathering 128 keys or values a row                        2.6          110.6
    by an index of two axes instead of index_select         7.3          216.5
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import report
from torch.nn import functional

from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.parallelism import ONE_DEVICE
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.config import AttentionBackend, EngineConfig
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_trial import CpuForm
from torch_backend.kernel_choice import choose_kernels
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.shard import ModelShard
from torch_backend.models import build_model
from torch_backend.weights import load_weights

PAGE_SIZE = 16
POOL_TOKENS = 16384
SPREAD = 16
"""Keys by which the lengths of decode rows differ at most."""

HEADS = ((9, 3), (32, 8))
"""Heads and kv heads of SmolLM2-135M and Llama-3.2-1B, of 64 values."""

SMOLLM2_135M = dense_decoder(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_position=8192,
    tie_word_embeddings=True,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(2,),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps of one shape."""

    dtype: str
    kind: str
    rows: int
    tokens: int
    fastest_ms: float
    median_ms: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median_ms * 1e3


class Bench:
    """A model with its pages, and the time of steps of a given shape."""

    def __init__(self, dtype: torch.dtype, attention: AttentionBackend) -> None:
        self.dtype = dtype
        form = CpuForm(dtype, dtype, ModelShard.of(SMOLLM2_135M, 0, ONE_DEVICE).head_forms(SMOLLM2_135M))
        device = torch.device("cpu")
        kernels = choose_kernels(attention, device, form, EngineConfig().cache_folder())
        self.model = build_model(
            SMOLLM2_135M, dtype=dtype, device=device, operations=kernels.operations, attention=kernels.attention
        )
        load_weights(self.model, DummyReader(SMOLLM2_135M, seed=0), SMOLLM2_135M)
        self.kv = [
            LayerMemory(KVPages.allocate(1 + POOL_TOKENS // PAGE_SIZE, 3, PAGE_SIZE, 64, dtype, torch.device("cpu")))
            for _ in range(SMOLLM2_135M.num_layers)
        ]

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """The token that each sequence samples."""
        hidden = self.model(batch, self.kv)
        last = hidden if batch.decode_only else hidden[batch.query_starts[1:].long() - 1]
        return self.model.logits(last).argmax(-1)

    def measure(self, kind: str, batch: ForwardBatch, repeats: int) -> Measurement:
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            self.step(batch)
            times.append((time.perf_counter() - start) * 1e3)
        times = times[2:]
        return Measurement(
            dtype=str(self.dtype).removeprefix("torch."),
            kind=kind,
            rows=len(batch.kv_lens),
            tokens=len(batch.tokens),
            fastest_ms=round(min(times), 2),
            median_ms=round(statistics.median(times), 2),
        )

    def profile(self, batch: ForwardBatch, repeats: int) -> str:
        """A table of operators."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(repeats):
                self.step(batch)
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)


class ChunkBench:
    """Attention of a chunk after a prefix, in one layer with some heads, and torch's products for the same."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, prefix: int, chunk: int) -> None:
        head_dim, keys = 64, prefix + chunk
        form = CpuForm(dtype, dtype, (HeadForm(head_dim, heads // kv_heads),))
        device = torch.device("cpu")
        kernels = choose_kernels(AttentionBackend.NUMBA, device, form, EngineConfig().cache_folder())
        self.name, self.prefix = f"{heads}, {kv_heads} of kv", prefix
        self.dtype = str(dtype).removeprefix("torch.")
        self.options = AttentionOptions(scale=head_dim**-0.5)
        self.kv = KVPages.allocate(1 + POOL_TOKENS // PAGE_SIZE, kv_heads, PAGE_SIZE, head_dim, dtype, device)
        self.kv.keys.normal_()
        self.kv.values.normal_()
        self.queries = torch.randn(chunk, heads, head_dim).to(dtype)
        self.attend = kernels.attention.prepare(make_batch([keys], [chunk], 0))
        self.sides = tuple(torch.randn(1, heads, tokens, head_dim).to(dtype) for tokens in (chunk, keys, keys))
        self.weights = torch.rand(1, heads, chunk, keys).to(dtype)
        hidden = torch.ones(chunk, keys, dtype=torch.bool).triu(prefix + 1)
        self.mask = torch.zeros(chunk, keys, dtype=dtype).masked_fill_(hidden, -torch.inf) if prefix else None
        self.useful = 4e-9 * head_dim * heads * (chunk * prefix + chunk * (chunk + 1) / 2)
        self.whole = 4e-9 * head_dim * heads * chunk * keys

    def by_kernel(self) -> None:
        self.attend(self.queries, self.kv, self.options)

    def products(self) -> None:
        queries, keys, values = self.sides
        torch.matmul(queries, keys.transpose(2, 3))
        torch.matmul(self.weights, values)

    def by_torch(self) -> None:
        functional.scaled_dot_product_attention(*self.sides, attn_mask=self.mask, is_causal=self.mask is None)

    @torch.inference_mode()
    def measure(self, repeats: int) -> dict[str, Any]:
        calls = (self.by_kernel, self.products, self.by_torch)
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats + 1):
            for call, found in zip(calls, times, strict=True):
                start = time.process_time()
                call()
                found.append(time.process_time() - start)
        kernel, products, whole = (statistics.median(found[1:]) for found in times)
        return {
            "dtype": self.dtype,
            "heads": self.name,
            "prefix": self.prefix,
            "ms": kernel * 1e3,
            "gflop/s": self.useful / kernel,
            "share": self.useful / kernel / (self.whole / products),
            "torch": whole / kernel,
        }


def make_batch(kv_lens: list[int], query_lens: list[int], num_decode: int) -> ForwardBatch:
    """Sequences on shuffled pages; no padding."""
    pages = 1 + np.random.default_rng(0).permutation(POOL_TOKENS // PAGE_SIZE)
    columns = POOL_TOKENS // PAGE_SIZE // len(kv_lens)
    page_table = np.zeros((len(kv_lens), columns), np.int32)
    for row, length in enumerate(kv_lens):
        used = -(-length // PAGE_SIZE)
        page_table[row, :used] = pages[row * columns : row * columns + used]
    sequences = np.repeat(np.arange(len(kv_lens)), query_lens)
    positions = np.concatenate([np.arange(kv - query, kv) for kv, query in zip(kv_lens, query_lens, strict=True)])
    slots = page_table[sequences, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return ForwardBatch(
        tokens=torch.from_numpy((np.arange(len(positions)) % SMOLLM2_135M.vocab_size).astype(np.int32)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        write_slots=torch.from_numpy(slots.astype(np.int64)),
        page_table=torch.from_numpy(page_table),
        kv_lens=torch.from_numpy(np.array(kv_lens, np.int32)),
        query_starts=torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32)),
        num_decode=num_decode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="numba", choices=["numba", "native"], help="attention and operations")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="keys of a decode row")
    parser.add_argument("--prefill", nargs="*", type=int, default=[64], help="tokens of each prompt")
    parser.add_argument(
        "--prefixes", nargs="+", type=int, help="measure attention of a chunk after prefixes of these lengths"
    )
    parser.add_argument("--chunk", type=int, default=512, help="tokens of that chunk")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    found: list[dict[str, Any]] = []
    if arguments.prefixes is not None:
        for prefix, (heads, kv_heads), dtype in product(arguments.prefixes, HEADS, arguments.dtypes):
            bench = ChunkBench(getattr(torch, dtype), heads, kv_heads, prefix, arguments.chunk)
            found.append(bench.measure(arguments.repeats // 5))
        title = f"Attention of {arguments.chunk} tokens, {torch.get_num_threads()} threads, torch {torch.__version__}"
        report(title, found, arguments.json)
        return
    for dtype in arguments.dtypes:
        model = Bench(getattr(torch, dtype), AttentionBackend(arguments.attention))
        for rows in arguments.rows:
            lens = [arguments.context - row % SPREAD for row in range(rows)]
            steps = [("decode", make_batch(lens, [1] * rows, rows), arguments.repeats)]
            for tokens in arguments.prefill:
                steps.append(("prefill", make_batch([tokens] * rows, [tokens] * rows, 0), arguments.repeats // 8 + 1))
            for kind, batch, repeats in steps:
                measurement = model.measure(kind, batch, repeats)
                found.append(asdict(measurement) | {"tok/s": measurement.tokens_per_second})
                if arguments.profile:
                    print(model.profile(batch, repeats))
    report(f"Steps of the bare torch model, torch {torch.__version__}", found, arguments.json)


if __name__ == "__main__":
    main()

"""The time of the parts of a decode step on a CPU: the bare forward pass with logits, SmolLM2-135M with random weights.

    python benchmarks/model_step_cpu.py [--dtypes bfloat16] [--rows 2 8 32] [--contexts 96] [--prefill 16] [--json FILE]

Measurements behind the choice of weight and cache layouts (2 cores with avx512_bf16, jax 0.10.2, fastest of 15,
milliseconds):

All matrix products of a step, machine quiet                     rows 1      2      8     32
  float32 x float32                                              17.1   18.2   21.7   44.5
  bfloat16 x bfloat16 → float32 (chosen; 1 row is padded to 2)  181.5   15.5   19.3   29.5
  products and sums written out, bfloat16                         860
  At 2 rows and 269 MB of weights, 15.5 ms is 17 GB/s of the 26 GB/s that memory gives; float32 reads at 31 GB/s, out of
  cache in part. To beat both at one row takes fewer bytes: int8 or 4-bit weights.

The same on 2 cores of an Intel Xeon at 2.1 GHz with amx_bf16, argmax of logits included; padded to 2 rows at least
                                                                 rows 1      2      8     16     32     64    512
  bfloat16 [in, out] on the right                                  27.1          33.4          34.5          190.7
  bfloat16 [out, in] on the right                                         18.1   17.7   20.5   25.9   34.9  185.5
  bfloat16 [out, in] on the left (chosen up to 32 rows)            10.0   10.5   12.7   16.3   26.6   42.9  375.8
  float32 [in, out] on the right                                   20.3   26.4   44.7
  float32 [out, in] on the left                                    20.5   31.0   37.7
  10.0 ms is 26.9 GB/s, what float32 reads at. On the right, packing the weights (YNNPACK's interleave2_x16) took 61 %
  of the samples of a step of 2 rows, and 35 % at 32, by perf; on the left AMX takes them as they lie.

The whole step there (median of 10, in turns with the code before): tables of sines once a step, keys on the left of few
queries, and prefill by 64 keys with a mask and 256 without one, in place of 128 with a mask
  32 rows, context 96: 61.8 > 51.8; eight prompts of 64: 236 > 190; 512 tokens: 333 > 317, behind 1,536: 1,061 > 981
  Then float32 activations between products, and few rows of the feed-forward layer left as its first product wrote
  them, in turns with bfloat16 activations: 0.96, 0.95 and 0.91 of the time at 2, 8 and 32 rows, 0.96 of eight prompts
  Attention of 32 rows by itself: 26 > 20. bfloat16 products of queries and keys, or of all, took 20 to 34.

Decode attention of 30 layers, context 100, 16 tokens a page, machine quiet           rows 2      8     32
  pages [kv_heads, 2, page, dim], bfloat16 bits in uint16, float32 products (chosen)     1.8    4.9   13.5
  the same, one product per page                                                         1.3    4.8   13.2
  the same, bfloat16 products                                                            1.5    5.2   18.9
  tokens before heads                                                                    1.9    7.4   22.1
  keys stored transposed                                                                 2.1    6.6   21.3
  one product of all queries by all keys, masked                                         3.8   12.6  129.3
  float32 pages                                                                          2.7   10.9   38.7
  bfloat16 pages: each step copies the cache.
  One product per page wins nothing and would leave products of one key at page size 1. Blocks of 64, 128 and 256 keys
  took 17, 19 and 33 ms of processor time at 32 rows. Writing keys and values takes 0.15 ms for all layers.

The whole step, context 96, another process on about one of the two cores     rows 2      8     32   prefill of 512
  bfloat16                                                                    29.4   38.3   75.8    498
  float32                                                                     34.6   50.1  130.6    769
  Processor time of bfloat16 steps, which neighbours disturb less: 37 / 54 / 110 ms over the two cores, of which
  attention takes 4 / 10 / 36. The fastest step of 2 rows seen took 21.3 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from machine import report

from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, allocate, build_model, kv_cache_spec

PAGE_SIZE = 16
POOL_TOKENS = 16384

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
    """One program. `temporary_mib`: memory that XLA allocates in addition to arguments and results."""

    dtype: str
    rows: int
    tokens: int
    context: int
    fastest_ms: float
    median_ms: float
    temporary_mib: float
    compile_s: float


class Bench:
    """A model and its caches, and the time of steps of a given shape."""

    def __init__(self, dtype: jnp.dtype) -> None:
        mesh = make_mesh(jax.devices()[:1])
        model = build_model(SMOLLM2_135M, dtype=dtype, attention=AttentionImplementation.XLA)
        load_weights(model, DummyReader(SMOLLM2_135M, seed=0), SMOLLM2_135M, mesh)
        model.repack()
        self.dtype = jnp.dtype(dtype)
        self.graph, self.weights = nnx.split(model)
        spec = kv_cache_spec(SMOLLM2_135M, self.dtype, 1 + POOL_TOKENS // PAGE_SIZE, PAGE_SIZE)
        self.kv_caches = allocate(spec, mesh)

    def measure(self, batch: ForwardBatch, context: int, repeats: int) -> Measurement:
        """The whole forward step with logits of every row, caches donated, one step at a time."""

        def step(weights: Any, kv_caches: Any, batch: ForwardBatch) -> tuple[jax.Array, Any]:
            model = nnx.merge(self.graph, weights)
            hidden, kv_caches = model(batch, kv_caches)
            return model.logits(hidden[batch.query_starts[1:] - 1]).argmax(-1), kv_caches

        started = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=1).lower(self.weights, self.kv_caches, batch).compile()
        compile_s = time.perf_counter() - started

        def run() -> None:
            tokens, self.kv_caches = compiled(self.weights, self.kv_caches, batch)
            tokens.block_until_ready()

        times = timed(run, repeats)
        return Measurement(
            dtype=str(self.dtype),
            rows=batch.kv_lens.shape[0],
            tokens=batch.tokens.shape[0],
            context=context,
            fastest_ms=round(min(times), 2),
            median_ms=round(statistics.median(times), 2),
            temporary_mib=round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
            compile_s=round(compile_s, 1),
        )


def timed(run: Callable[[], None], repeats: int) -> list[float]:
    """Milliseconds of each run, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return times[2:]


def make_batch(kv_lens: Sequence[int], query_lens: Sequence[int], num_decode: int, columns: int) -> ForwardBatch:
    """Sequences on shuffled pages; no padding."""
    rows = len(kv_lens)
    pages_needed = [-(-length // PAGE_SIZE) for length in kv_lens]
    pages = 1 + np.random.default_rng(0).permutation(POOL_TOKENS // PAGE_SIZE)
    page_table = np.zeros((rows, columns), np.int32)
    for row, (needed, taken) in enumerate(zip(pages_needed, np.cumsum(pages_needed), strict=True)):
        page_table[row, :needed] = pages[taken - needed : taken]
    sequences = np.repeat(np.arange(rows), query_lens)
    positions = np.concatenate([np.arange(kv - query, kv) for kv, query in zip(kv_lens, query_lens, strict=True)])
    slots = page_table[sequences, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return ForwardBatch(
        tokens=jnp.asarray(np.arange(len(positions)) % SMOLLM2_135M.vocab_size, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        write_slots=jnp.asarray(slots, jnp.int32),
        page_table=jnp.asarray(page_table),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        query_starts=jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32),
        num_decode=jnp.int32(num_decode),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[96, 512])
    parser.add_argument("--prefill", nargs="*", type=int, default=[16, 512], help="tokens of a single chunk")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    columns = SMOLLM2_135M.max_position // PAGE_SIZE
    found = []
    for dtype in arguments.dtypes:
        bench = Bench(jnp.dtype(dtype))
        batches = [
            (make_batch([context] * rows, [1] * rows, rows, columns), context)
            for context in arguments.contexts
            for rows in arguments.rows
        ]
        batches += [(make_batch([tokens], [tokens], 0, columns), tokens) for tokens in arguments.prefill]
        for batch, context in batches:
            found.append(asdict(bench.measure(batch, context, arguments.repeats)))
    report("Forward step with logits", found, arguments.json)


if __name__ == "__main__":
    main()

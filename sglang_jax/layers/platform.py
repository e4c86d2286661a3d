"""Layouts of weights and caches by platform, chosen by measurement (benchmarks/model_step_cpu.py)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from sglang_jax.runner.this_machine import cpu_multiplies_bfloat16_tiles

_BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}


@dataclass(frozen=True, slots=True)
class PlatformLayout:
    """The layouts that a platform computes with.

    - `kv_as_bits`: bfloat16 and float8 keys and values are integers with the same bits (see `kernels.kv_storage`).
    - `tiled_kv_pages`: pages are in whole memory tiles (see `kernels.kv_storage`).
    - `tiled_state_tails`: the last inputs of convolutions are in whole tiles (see `kernels.causal_convolution`).
    - `own_head_for_tied_embeddings`: tied embeddings are stored twice, `[vocab, hidden]` to look up rows and `[hidden,
      vocab]` to compute logits: XLA's CPU backend multiplies by a large transposed matrix at a twentieth of memory
      speed.
    - `outputs_first`: on one device, matrices are `[out, in]`, as in checkpoints, with products by
      `layers.parameter.matmul_outputs_first`. For CPUs with AMX: all products of a decode step of SmolLM2-135M take
      10.5 ms instead of 27 at two rows, and 27 ms instead of 35 at 32. Without AMX, on a busy machine, neither layout
      was clearly faster, and the plain one reached 0.8 of memory speed on an AMD EPYC.
    - `matrices`: weights of products have two axes (see `layout.TwoAxisLayout`). With more, libtpu 0.0.51 copied the
      projections of Llama-3.1-8B in each step of 256 rows, 142 us a layer on v6e by its own estimate.
    - `whole_tiles_of_table`: columns of embeddings that are not the head, too, are filled up to whole memory tiles:
      libtpu 0.0.51 copied gpt-oss's table of 2,880 columns in each step, 6.6 ms on v6e by its own estimate.
    - `wide_activations`: activations between products are float32, and are rounded to the weights' dtype for a product
      or the cache. XLA's CPU backend computes bfloat16 in float32 and rounds after each operation, and after each
      reshape: two fifths of the time of a gated feed-forward layer's elementwise part (512 rows of SmolLM2-135M).
    - `computes_again_for_each_reader`: the compiler fuses all elementwise operations, cheap and expensive, into every
      loop that reads them, and drops optimization barriers before that. XLA's CPU backend recomputed sines and cosines
      in each layer, a sixth of the time of a prefill step; libtpu 0.0.51 computes them once, in one loop that writes
      both to vector memory, with two layers and with six.
    """

    kv_as_bits: bool
    tiled_kv_pages: bool
    tiled_state_tails: bool
    own_head_for_tied_embeddings: bool
    outputs_first: bool
    matrices: bool
    whole_tiles_of_table: bool
    wide_activations: bool
    computes_again_for_each_reader: bool

    @classmethod
    def of(cls, platform: str) -> PlatformLayout:
        """The layouts for `cpu`, `gpu` or `tpu`."""
        on_cpu = platform == "cpu"
        return cls(
            kv_as_bits=on_cpu,
            tiled_kv_pages=platform == "tpu",
            tiled_state_tails=platform == "tpu",
            own_head_for_tied_embeddings=on_cpu,
            outputs_first=on_cpu and cpu_multiplies_bfloat16_tiles(),
            matrices=platform == "tpu",
            whole_tiles_of_table=platform == "tpu",
            wide_activations=on_cpu,
            computes_again_for_each_reader=on_cpu,
        )

    def kv_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        if not self.kv_as_bits:
            return jnp.dtype(dtype)
        return _BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))

"""Forms of weights and caches that differ by platform, chosen by measurement (benchmarks/model_step_cpu.py)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from sglang_jax.runner.this_machine import cpu_multiplies_bfloat16_tiles

_BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}


@dataclass(frozen=True, slots=True)
class PlatformForm:
    """How a platform likes its arrays.

    - `kv_as_bits`: hold bfloat16 and float8 keys and values as the bits of integers (see `kernels.kv_storage`).
    - `tiled_kv_pages`: pages in whole tiles of memory (see `kernels.kv_storage`).
    - `tiled_state_tails`: the last inputs of convolutions in whole tiles (see `kernels.causal_convolution`).
    - `own_head_for_tied_embeddings`: keep tied embeddings twice, `[vocab, hidden]` to look rows up and
      `[hidden, vocab]` to compute logits. XLA's CPU backend multiplies by a large transposed matrix at a twentieth of
      the speed of memory.
    - `outputs_first`: on one device, matrices `[out, in]`, as checkpoints have them, and their products in the form of
      `layers.parameter.matmul_outputs_first`. For a CPU with AMX: all products of a decode step of SmolLM2-135M take
      10.5 ms in place of 27 at two rows, and 27 in place of 35 at 32. Without it, measured beside
      other work, neither form was plainly faster, and the plain one reached 0.8 of memory's speed on an AMD EPYC.
    - `matrices`: weights of products in two axes (see `layout.Matrices`). In more of them libtpu 0.0.51 made a
      copy of the projections of Llama-3.1-8B at each step of 256 rows, 142 us a layer on v6e by its own estimate.
    - `wide_activations`: what lies between products is float32, and rounded to the weights' type where a product or the
      cache takes it. XLA's CPU backend computes bfloat16 in float32 and rounds after each operation, and each reshape
      between them: two fifths of the time of a gated feed-forward layer's elementwise part (512 rows of SmolLM2-135M).
    - `computes_again_for_each_reader`: the compiler makes cheap and dear elementwise operations alike part of every
      loop that reads them, and drops optimization barriers before it does. XLA's CPU backend took sines and cosines
      anew in each layer, a sixth of the time of a prefill step; libtpu 0.0.51 takes them once, in one loop that
      writes both to vector memory, for two layers as for six.
    """

    kv_as_bits: bool
    tiled_kv_pages: bool
    tiled_state_tails: bool
    own_head_for_tied_embeddings: bool
    outputs_first: bool
    matrices: bool
    wide_activations: bool
    computes_again_for_each_reader: bool

    @classmethod
    def of(cls, platform: str) -> PlatformForm:
        """The form for `cpu`, `gpu` or `tpu`."""
        on_cpu = platform == "cpu"
        return cls(
            kv_as_bits=on_cpu,
            tiled_kv_pages=platform == "tpu",
            tiled_state_tails=platform == "tpu",
            own_head_for_tied_embeddings=on_cpu,
            outputs_first=on_cpu and cpu_multiplies_bfloat16_tiles(),
            matrices=platform == "tpu",
            wide_activations=on_cpu,
            computes_again_for_each_reader=on_cpu,
        )

    def kv_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """The type of the array that holds keys and values of `dtype`."""
        if not self.kv_as_bits:
            return jnp.dtype(dtype)
        return _BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))

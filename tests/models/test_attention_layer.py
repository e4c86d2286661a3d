"""What a layer asks of attention beside its shapes: a window, a soft cap, sinks, scales of stored keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.attention_steps import softmax_attention
from helpers.small_configs import small_config

from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.kernels.kv_storage import page_shape
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.attention import Attention
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions
from sglang_jax.layers.rotary import apply_rotary

HEAD_DIM = 16
CONFIG = small_config(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM)
TOKENS, PAGE_SIZE = 12, 4


def layer_with_weights(kv_dtype: jnp.dtype | None = None, dtype: str = "float32", **options: Any) -> Attention:
    layer = Attention(
        replace(CONFIG.layers[0].mixer, **options),
        PartOptions(
            hidden_size=CONFIG.hidden_size,
            dtype=jnp.dtype(dtype),
            implementation=AttentionImplementation.XLA,
            kv_dtype=kv_dtype,
        ),
    )
    rng = np.random.default_rng(1)
    for parameter in jax.tree.leaves(nnx.state(layer), is_leaf=lambda node: isinstance(node, Parameter)):
        parameter.set_value(jnp.asarray(rng.standard_normal(parameter.shape), parameter.dtype))
    return layer


def batch() -> ForwardBatch:
    """One sequence of all tokens, in pages 1 to 3."""
    places = jnp.arange(TOKENS, dtype=jnp.int32)
    return ForwardBatch(
        tokens=places,
        positions=places,
        write_slots=PAGE_SIZE + places,
        page_table=jnp.asarray([[1, 2, 3]], jnp.int32),
        kv_lens=jnp.asarray([TOKENS], jnp.int32),
        query_starts=jnp.asarray([0, TOKENS], jnp.int32),
        num_decode=jnp.int32(0),
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"soft_cap": 0.5}, {"sinks": True}, {"window": 3, "soft_cap": 2.0, "sinks": True}],
    ids=str,
)
def test_options_of_a_layer_reach_its_attention(options: dict[str, Any]) -> None:
    layer = layer_with_weights(**options)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((TOKENS, CONFIG.hidden_size)), jnp.float32)
    angles = rng.uniform(0, 6, (TOKENS, HEAD_DIM // 2)).astype(np.float32)
    rotary = (jnp.cos(angles), jnp.sin(angles))
    pages = jnp.zeros(page_shape(4, 2, PAGE_SIZE, HEAD_DIM, tiled=False), jnp.float32)
    found, _ = layer(x, LayerStep(batch(), rotary), LayerMemory(pages))
    layer.together = True
    together, _ = layer(x, LayerStep(batch(), rotary), LayerMemory(pages))
    np.testing.assert_allclose(together, found, atol=1e-5 * float(np.abs(found).max()), rtol=0)
    fused = layer.qkv(x)
    queries, keys = apply_rotary(fused[:, :, :2], *rotary), apply_rotary(fused[:, :, 2], *rotary)
    sinks = np.asarray(layer.sinks[...]).reshape(2, 2) if layer.sinks is not None else None
    attended = softmax_attention(
        np.asarray(queries),
        np.asarray(keys),
        np.asarray(fused[:, :, 3]),
        HEAD_DIM**-0.5,
        window=options.get("window"),
        soft_cap=options.get("soft_cap"),
        sinks=sinks,
    )
    expected = layer.output(jnp.asarray(attended.reshape(TOKENS, 4, -1), jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "norm",
    [None, NormConfig(eps=1e-6), NormConfig(eps=1e-6, wide=True), NormConfig(eps=1e-6, kind=NormKind.LAYER)],
    ids=["no", "plain", "wide", "layer"],
)
@pytest.mark.parametrize("rotated", [True, False])
def test_norms_and_rotation_of_all_parts_together_are_those_of_each(
    dtype: str, norm: NormConfig | None, rotated: bool
) -> None:
    """As on TPUs. Values stay as they were to the bit; products and sums of the others may be rounded once less."""
    layer = layer_with_weights(dtype=dtype, qk_norm=None if norm is None else QKNorm(norm=norm))
    rng = np.random.default_rng(2)
    fused = jnp.asarray(rng.standard_normal((TOKENS, 2, 4, HEAD_DIM)), dtype)
    angles = rng.uniform(0, 6, (TOKENS, HEAD_DIM // 2)).astype(np.float32)
    rotary = (jnp.cos(angles), jnp.sin(angles)) if rotated else None
    *expected, values = layer._apart(fused, rotary)
    *found, same = layer._together(fused, rotary)
    np.testing.assert_array_equal(same, values)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        wide = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(*wide, atol=1e-6, rtol=1e-6 if dtype == "float32" else 2**-7)
        assert (wide[0] != wide[1]).mean() < 0.2


def test_only_kernels_for_tpu_have_them_together() -> None:
    def of(implementation: AttentionImplementation, **options: Any) -> Attention:
        config = replace(CONFIG.layers[0].mixer, **options)
        dtype = jnp.dtype("float32")
        return Attention(
            config, PartOptions(hidden_size=CONFIG.hidden_size, dtype=dtype, implementation=implementation)
        )

    assert of(AttentionImplementation.PALLAS).together
    assert not of(AttentionImplementation.XLA).together
    assert not of(AttentionImplementation.PALLAS, qk_norm=QKNorm(norm=NormConfig(eps=1e-6), whole=True)).together


def test_only_8_bit_pages_have_scales() -> None:
    assert layer_with_weights().kv_scales is None
    assert layer_with_weights(kv_dtype=jnp.dtype("bfloat16")).kv_scales is None
    for kind in ("int8", "float8_e4m3fn"):
        scales = layer_with_weights(kv_dtype=jnp.dtype(kind)).kv_scales
        assert scales is not None
        assert scales.shape == (2, 2)

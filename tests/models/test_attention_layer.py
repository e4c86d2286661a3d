"""Options of a layer's attention: a window, a soft cap, sinks, scales of stored keys and values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.attention_steps import softmax_attention
from helpers.latent_steps import LATENTS, Numbers, expanded_in_float64, make_latent_step
from helpers.small_configs import small_config

from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.attention_kernels import cpu_attention
from sglang_jax.kernels import kv_storage
from sglang_jax.kernels.kv_storage import page_shape, to_storage
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, expanded
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuLatents, LatentForm
from sglang_jax.layers.attention import Attention
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.latent_attention import attend_latents
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
    [
        None,
        NormConfig(eps=1e-6),
        NormConfig(eps=1e-6, weight_in_float32=True),
        NormConfig(eps=1e-6, kind=NormKind.LAYER),
    ],
    ids=["no", "plain", "wide", "layer"],
)
@pytest.mark.parametrize("rotated", [True, False])
def test_fused_norms_and_rotation_equal_separate_ones(dtype: str, norm: NormConfig | None, rotated: bool) -> None:
    """As on TPUs. Values are equal bit for bit; products and sums of the others may be rounded once less."""
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


def test_only_kernels_for_tpu_fuse_them() -> None:
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


class Absorbed(LatentAttentionConfig):
    """Uses the absorbed form for rows of any length."""

    @property
    def expands_from(self) -> None:
        return None


ABSORBED = Absorbed(**{each.name: getattr(LATENTS, each.name) for each in fields(LATENTS)})
LATENT_FORMS = {"by length": LATENTS, "absorbed": ABSORBED}
LATENT_TOKENS, LATENT_ROWS, LATENT_COLUMNS = 120, 5, 72
_latents = jax.jit(attend_latents, static_argnums=(0, 1, 7))
WIDE = replace(LATENTS, rotary_dim=32)
"""For the CPU's kernels."""


def latent_outputs(
    config: LatentAttentionConfig,
    kv_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    dtype: str = "float32",
    page_size: int = 16,
    kernels: CpuLatents | None = None,
) -> tuple[Numbers, Numbers]:
    """The output of attention and the expected one, in a program of one shape for each page size."""

    def rounded(numbers: Numbers) -> Numbers:
        return np.asarray(jnp.asarray(numbers, dtype).astype(jnp.float32), np.float64)

    def padded(array: np.ndarray, size: int, mode: str = "constant") -> np.ndarray:
        return np.pad(array, [(0, size - len(array)), *[(0, 0)] * (array.ndim - 1)], mode=mode)

    step = make_latent_step(config, kv_lens, query_lens, page_size=page_size, rounded=rounded)
    pages = 1 + LATENT_ROWS * -(-LATENT_COLUMNS // page_size) * 2
    kv_pages = np.full((pages, 1, 1, *step.pages.shape[1:]), np.nan)
    kv_pages[: len(step.pages), 0, 0] = step.pages
    kv_pages.reshape(-1, kv_pages.shape[-1])[step.write_slots] = np.nan
    storage = jnp.dtype(jnp.uint16 if dtype == "bfloat16" else dtype)
    table = padded(step.page_table, LATENT_ROWS)
    columns = -(-LATENT_COLUMNS // page_size) + 1
    batch = ForwardBatch(
        tokens=jnp.zeros(LATENT_TOKENS, jnp.int32),
        positions=jnp.zeros(LATENT_TOKENS, jnp.int32),
        write_slots=jnp.asarray(padded(step.write_slots, LATENT_TOKENS), jnp.int32),
        page_table=jnp.asarray(np.pad(table, ((0, 0), (0, columns - table.shape[1])))),
        kv_lens=jnp.asarray(padded(step.kv_lens, LATENT_ROWS)),
        query_starts=jnp.asarray(padded(step.query_starts, LATENT_ROWS + 1, "edge")),
        num_decode=jnp.int32(step.num_decode),
    )
    plain, rotated, cached = (
        jnp.asarray(padded(part, LATENT_TOKENS), dtype) for part in (step.plain, step.rotated, step.cached[:, None])
    )
    up = (jnp.asarray(step.key_up, dtype), jnp.asarray(step.value_up, dtype))
    stored = to_storage(jnp.asarray(kv_pages, jnp.float32), storage)
    found, _ = _latents(AttentionImplementation.XLA, config, (plain, rotated), cached, up, stored, batch, kernels)
    assert found.dtype == jnp.dtype(dtype)
    assert not found[len(step.plain) :].any()
    return np.asarray(found[: len(step.plain)].astype(jnp.float32), np.float64), step.expected


LATENT_STEPS = {
    "mixed": ((9, 1, 30, 70, 45), (1, 1, 16, 70, 15)),
    "alike": ((20, 9, 20, 20, 33), (17, 7, 17, 17, 17)),
    "decode": ((9, 1, 30), (1, 1, 1)),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles and blocks, some of them partial, also in short sequences."""
    monkeypatch.setattr(expanded, "_KEYS_PER_TILE", 16)
    monkeypatch.setattr(expanded, "_QUERIES_PER_BLOCK", 5)
    _latents.clear_cache()
    yield
    _latents.clear_cache()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_both_forms_of_latent_attention_in_one_step(page_size: int) -> None:
    for kv_lens, query_lens in LATENT_STEPS.values():
        for config in LATENT_FORMS.values():
            found, expected = latent_outputs(config, kv_lens, query_lens, page_size=page_size)
            assert np.abs(found - expected).max() < 2e-6
    for place in range(70):
        found, expected = latent_outputs(LATENTS, (70,), (70 - place,), page_size=page_size)
        assert np.abs(found - expected).max() < 2e-6, f"{place} tokens are cached"


@pytest.mark.usefixtures("small_tiles")
def test_an_expanded_row_does_not_depend_on_other_rows() -> None:
    alone, _ = latent_outputs(LATENTS, (70,), (20,))
    for kv_lens, query_lens in (((9, 70, 33), (1, 20, 7)), ((70, 70, 80), (20, 20, 9)), ((30, 5, 70), (30, 1, 20))):
        found, _ = latent_outputs(LATENTS, kv_lens, query_lens)
        last = int(np.cumsum(query_lens)[kv_lens.index(70)])
        assert np.array_equal(found[last - 20 : last], alone)


def test_rows_use_the_form_for_their_length() -> None:
    counts = LATENT_STEPS["mixed"][1]
    outputs = (latent_outputs(config, *LATENT_STEPS["mixed"])[0] for config in LATENT_FORMS.values())
    parts = (np.split(found, np.cumsum(counts)[:-1]) for found in outputs)
    same = [np.array_equal(*pair) for pair in zip(*parts, strict=True)]
    assert same == [count < 16 for count in counts]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 4e-6), ("bfloat16", 3 * 2**-8)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_kernels_of_a_cpu(page_size: int, dtype: str, tolerance: float) -> None:
    """Long rows are expanded by XLA's operations."""
    form, folder = LatentForm(WIDE.num_heads, WIDE.latent, WIDE.rotary_dim), EngineConfig().cache_folder()
    kernels = cpu_attention(form, kv_dtype=jnp.dtype(dtype), cache_folder=folder)
    assert isinstance(kernels, CpuLatents)
    for kv_lens, query_lens in LATENT_STEPS.values():
        found, expected = latent_outputs(WIDE, kv_lens, query_lens, dtype, page_size, kernels)
        assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


def in_8_bits(cached: Numbers, latent: int, storage: str) -> Numbers:
    """Cached vectors as the definition rounds them, in float64."""
    integers = storage == "int8"
    largest, parts = (127 if integers else 448), []
    for part in np.split(cached.astype(np.float32), [latent], axis=-1):
        scale = np.abs(part).max(-1, keepdims=True) / np.float32(largest)
        levels = np.clip(part / np.where(scale == 0, np.float32(1), scale), -largest, largest)
        levels = np.rint(levels) if integers else levels.astype(ml_dtypes.float8_e4m3fn)
        parts.append(levels.astype(np.float64) * scale)
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("storage", ["int8", "uint8"])
@pytest.mark.parametrize("form", LATENT_FORMS)
def test_latents_in_8_bits(form: str, storage: str) -> None:
    """As of the numbers that are stored. Rotated keys are 30 times as large as latent vectors, one of which is 0."""
    config, (kv_lens, query_lens) = LATENT_FORMS[form], LATENT_STEPS["mixed"]
    step = make_latent_step(config, kv_lens, query_lens)
    numbers, latent = step.pages.copy(), config.latent
    numbers[..., latent:] *= 30
    numbers[step.page_table[2, 0], 3, :latent] = 0
    exact = in_8_bits(numbers, latent, storage)
    shape = page_shape(len(numbers), 1, numbers.shape[1], numbers.shape[2], tiled=False, shared=True, in_8_bits=True)
    pages = jnp.zeros(shape, storage).at[:].set(0x7F)
    (slots,) = np.nonzero(np.isfinite(numbers.reshape(-1, numbers.shape[2])[:, 0]))
    rows = numbers.reshape(-1, 1, numbers.shape[2])[slots]
    pages = kv_storage.write_kv(pages, jnp.asarray(rows, jnp.float32), None, jnp.asarray(slots), value_dim=latent)
    tokens = jnp.zeros(len(step.plain), jnp.int32)
    places = (step.page_table, step.kv_lens, step.query_starts)
    batch = ForwardBatch(
        tokens, tokens, jnp.asarray(step.write_slots, jnp.int32), *map(jnp.asarray, places), jnp.int32(2)
    )
    queries = (jnp.asarray(step.plain, jnp.float32), jnp.asarray(step.rotated / 30, jnp.float32))
    own = jnp.asarray(rows[np.searchsorted(slots, step.write_slots)], jnp.float32)
    up = (jnp.asarray(step.key_up, jnp.float32), jnp.asarray(step.value_up, jnp.float32))
    found, after = _latents(AttentionImplementation.XLA, config, queries, own, up, pages, batch, None)
    np.testing.assert_array_equal(after, pages)  # the step's own vectors are the same bytes again
    for row, length in enumerate(kv_lens):
        mine = slice(step.query_starts[row], step.query_starts[row + 1])
        cached = exact[step.page_table[row]].reshape(-1, numbers.shape[2])[:length]
        asked = step.plain[mine], (step.rotated / 30).astype(np.float32).astype(np.float64)[mine]
        expected = expanded_in_float64(config, *asked, cached, step.key_up, step.value_up)
        assert np.abs(np.asarray(found)[mine] - expected).max() < 4e-6


def test_sizes_without_kernels_of_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert cpu_attention(LatentForm(4, 32, 8), kv_dtype=jnp.dtype(jnp.float32), cache_folder=None) is None
    (message,) = caplog.messages
    assert "latent vectors of 32 + 8 numbers and float32: kernels take multiples of 32" in message


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
@pytest.mark.parametrize("form", LATENT_FORMS)
def test_rounding_of_latent_attention(form: str, dtype: str, unit: float) -> None:
    """As docs/architecture.md states it, in units of the type's rounding, `unit`: root mean squares of errors over
    those of outputs, and the largest error over the largest output."""
    found, expected = latent_outputs(LATENT_FORMS[form], (9, 40, 70, 45, 80), (1, 13, 70, 7, 20), dtype)
    error = found - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < unit
    assert np.abs(error).max() < 1.5 * unit * np.abs(expected).max()


def test_latent_pages_are_not_copied() -> None:
    """Neither form allocates memory in proportion to the number of pages."""

    def shape(*sizes: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    batch = ForwardBatch(*(shape(*sizes) for sizes in ((64,), (64,), (64,), (4, 8), (4,), (5,), ())))
    queries = (shape(64, 4, 8, dtype="bfloat16"),) * 2
    up = (shape(4, 8, 32, dtype="bfloat16"), shape(4, 4, 32, dtype="bfloat16"))
    program = jax.jit(attend_latents, static_argnums=(0, 1), donate_argnums=5)
    taken = []
    for pages in (100, 10_000):
        stored = shape(pages, 1, 1, 16, 40, dtype="uint16")
        arguments = (AttentionImplementation.XLA, LATENTS, queries, shape(64, 1, 40, dtype="bfloat16"), up, stored)
        memory = program.lower(*arguments, batch).compile().memory_analysis()
        assert memory.alias_size_in_bytes == pages * 16 * 40 * 2
        taken.append(memory.temp_size_in_bytes)
    assert taken[0] == taken[1]

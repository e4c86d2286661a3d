"""Latent vectors in int8 and float8, with two scales per token, against numpy in float64; and models that use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.latent_steps import LATENTS, Numbers, expanded_in_float64
from helpers.plan_driver import PlanDriver
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_latents import attend_step, torch_step
from ml_dtypes import float8_e4m3fn
from transformers import AutoModelForCausalLM

from sglang_jax import Engine
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import EngineConfig
from torch_backend import create_runner
from torch_backend.attention.fixed import BlockAttention
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.kv_pages import KVForm, KVPages

CPU = torch.device("cpu")
PARTS = LATENTS.latent, LATENTS.rotary_dim
DTYPES = (torch.int8, torch.float8_e4m3fn)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "float8"])


def rounded(rows: Numbers, dtype: torch.dtype) -> tuple[Numbers, Numbers]:
    """Rows `[T, width]` as the definition rounds them, in float64, and the scales `[T, 2]`."""
    largest = 127 if dtype == torch.int8 else 448
    parts, scales = [], []
    for part in np.split(rows.astype(np.float32), [LATENTS.latent], axis=1):
        scale = np.abs(part).max(1) / np.float32(largest)
        levels = part / np.where(scale == 0, np.float32(1), scale)[:, None]
        levels = np.clip(levels, -largest, largest)
        levels = np.rint(levels) if dtype == torch.int8 else levels.astype(float8_e4m3fn)
        parts.append(levels.astype(np.float64) * scale[:, None])
        scales.append(scale)
    return np.concatenate(parts, axis=1), np.stack(scales, axis=1).astype(np.float64)


def allocate(num_pages: int, page_size: int, dtype: torch.dtype) -> KVPages:
    """Pages whose free slots are NaN where their dtype has it, and whose scales are."""
    kv = KVPages.allocate(num_pages, 1, page_size, sum(PARTS), dtype, CPU, shared=True, parts=PARTS)
    assert kv.latent_scales is not None
    kv.latent_scales.values.fill_(torch.nan)
    kv.keys.view(torch.uint8).fill_(0x7F)
    return kv


def write(kv: KVPages, slots: torch.Tensor, rows: torch.Tensor) -> None:
    assert kv.latent_scales is not None
    kv.latent_scales.write(kv.keys, (slots // kv.page_size, slots % kv.page_size), rows)


def read(kv: KVPages) -> Numbers:
    assert kv.latent_scales is not None
    return kv.latent_scales.gather(kv.keys, torch.arange(len(kv.keys))).double().numpy()


@every_dtype
def test_rows_are_rounded_by_the_definition(dtype: torch.dtype) -> None:
    """Rotated keys are 50 times as large as latent vectors, or the other way round; some rows are tiny or large."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((12, sum(PARTS)))
    rows[:, : LATENTS.latent] *= np.array([1, 50, 1e-30, 1e4, 1, 0] * 2)[:, None]
    rows[:, LATENTS.latent :] *= np.array([50, 1, 1e4, 1e-30, 0, 1] * 2)[:, None]
    kv = allocate(3, 8, dtype)
    slots = torch.from_numpy(rng.permutation(24)[:12])
    write(kv, slots, torch.from_numpy(rows).float())
    expected, scales = rounded(rows, dtype)
    np.testing.assert_allclose(read(kv)[slots], expected, rtol=1e-6)
    assert kv.latent_scales is not None
    found = kv.latent_scales.values.transpose(1, 2).reshape(-1, 2)[slots].double().numpy()
    np.testing.assert_array_equal(found, scales)
    unit = 0.51 / 127 if dtype == torch.int8 else 2**-4
    for own, part in zip(np.split(rows, [PARTS[0]], axis=1), np.split(expected, [PARTS[0]], axis=1), strict=True):
        assert (np.abs(own - part) <= unit * np.abs(own).max(1, keepdims=True)).all()


@every_dtype
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_read_as_such(dtype: torch.dtype, broken: float) -> None:
    """And do not touch the other part of the token."""
    kv = allocate(1, 4, dtype)
    rows = torch.ones(1, sum(PARTS))
    rows[0, 3] = broken
    write(kv, torch.tensor([2]), rows)
    found = read(kv)[2]
    assert not np.isfinite(found[3])
    np.testing.assert_allclose(found[PARTS[0] :], 1.0, rtol=1e-6)


@every_dtype
def test_pages_do_not_depend_on_chunks(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((40, sum(PARTS)))).to(torch.bfloat16)
    whole, in_chunks = allocate(3, 16, dtype), allocate(3, 16, dtype)
    slots = 3 + torch.arange(40)
    write(whole, slots, rows)
    for first, last in ((17, 40), (0, 1), (1, 10), (10, 17)):
        write(in_chunks, slots[first:last], rows[first:last])
    assert whole.latent_scales is not None
    assert in_chunks.latent_scales is not None
    assert torch.equal(whole.keys.view(torch.uint8), in_chunks.keys.view(torch.uint8))
    bits = [each.latent_scales.values.view(torch.int32) for each in (whole, in_chunks) if each.latent_scales]
    assert torch.equal(*bits)


def outputs(
    dtype: torch.dtype,
    implementation: AttentionImplementation,
    least: int | None,
    kv_lens: tuple[int, ...] = (9, 1, 30, 70, 45, 8, 20),
    query_lens: tuple[int, ...] = (1, 1, 13, 70, 7, 8, 1),
    activations: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Numbers, Numbers]:
    """The actual output of attention; the expected one, over rounded numbers; and that over the original ones."""
    step = torch_step(LATENTS, kv_lens, activations, query_lens)
    kv = allocate(len(step.pages), step.pages.shape[1], dtype)
    flat = step.pages.reshape(-1, sum(PARTS)).copy()
    flat[:, PARTS[0] :] *= 4
    used = np.flatnonzero(~np.isnan(flat[:, 0]))
    write(kv, torch.from_numpy(used), torch.from_numpy(flat[used]).float())
    numbers = {"rounded": flat.copy(), "plain": flat}
    numbers["rounded"][used] = rounded(flat[used], dtype)[0]
    expected: dict[str, list[Numbers]] = {"rounded": [], "plain": []}
    for row, length in enumerate(kv_lens):
        own = slice(step.query_starts[row], step.query_starts[row + 1])
        places = np.arange(length)
        slots = step.page_table[row, places // kv.page_size] * kv.page_size + places % kv.page_size
        for name, cached in numbers.items():
            queries = step.plain[own], step.rotated[own]
            expected[name].append(expanded_in_float64(LATENTS, *queries, cached[slots], step.key_up, step.value_up))
    found = attend_step(implementation, step, LATENTS, activations, expands_from=least, kv=kv)
    return found, np.concatenate(expected["rounded"]), np.concatenate(expected["plain"])


@every_dtype
@pytest.mark.parametrize(
    ("implementation", "least"),
    [
        (NativeAttention(), None),
        (NativeAttention(), 2),
        (NativeAttention(), LATENTS.expands_from),
        (ReferenceAttention(), None),
        (BlockAttention(), None),
    ],
    ids=["absorbed", "expanded", "by length", "reference", "blocks"],
)
def test_attention_over_rounded_numbers(
    dtype: torch.dtype, implementation: AttentionImplementation, least: int | None
) -> None:
    """NaN in every free slot. The error that rounding makes is much larger than that of the computation."""
    found, expected, plain = outputs(dtype, implementation, least)
    assert np.abs(found.double().numpy() - expected).max() < 1e-5
    error = np.sqrt(((expected - plain) ** 2).mean() / (plain**2).mean())
    assert 1e-3 < error < (0.02 if dtype == torch.int8 else 0.06)


@every_dtype
@pytest.mark.parametrize("least", [None, 2], ids=["absorbed", "expanded"])
def test_attention_of_queries_in_bfloat16(dtype: torch.dtype, least: int | None) -> None:
    """The error is below one unit of rounding, relative to the outputs."""
    found, expected, _ = outputs(dtype, NativeAttention(), least, activations=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    error = np.sqrt(((found.double().numpy() - expected) ** 2).mean() / (expected**2).mean())
    assert error < 2**-8


@every_dtype
def test_other_rows_change_no_bit(dtype: torch.dtype) -> None:
    alone = outputs(dtype, BlockAttention(), None, (70,), (20,))[0]
    together = outputs(dtype, BlockAttention(), None, (33, 70, 9), (12, 20, 4))[0]
    assert torch.equal(together[12:32], alone)


@every_dtype
def test_bytes_of_a_token_count_both_scales(dtype: torch.dtype) -> None:
    """Those of DeepSeek-V3: 512 numbers and 64, and 8 bytes; as many as pages take."""
    config = replace(LATENTS, latent=512, rotary_dim=64)
    (array,) = config.cached
    assert KVForm(dtype, dtype).bytes_per_token(config.cached) == 584
    assert KVForm(torch.bfloat16, torch.bfloat16).bytes_per_token(config.cached) == 1152
    kv = KVPages.allocate(3, 1, 16, array.width, dtype, CPU, shared=True, parts=array.parts)
    assert kv.latent_scales is not None
    assert kv.keys.nbytes + kv.latent_scales.values.nbytes == 3 * 16 * 584


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"enable_deterministic_inference": True}, {"deterministic": "tp"}, {"backend": "jax"}],
    ids=["native", "deterministic", "in shards", "jax"],
)
def test_requests_with_and_without_a_cached_prefix(stored: str, changes: dict[str, object], tmp_path: Path) -> None:
    """Logprobs of the prompt's last tokens are close to transformers', and not equal. Where results may not depend on
    the batch, those of a cached prefix are equal to the last bit."""
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    prompt = np.random.default_rng(2).integers(3, 380, 41).tolist()
    options = {
        "model_path": str(folder),
        "backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": stored,
        "max_total_tokens": 256,
        "chunked_prefill_size": 16,
        "page_size": 8,
    }
    found = []
    with Engine(**(options | changes)) as engine:
        for cached in (0, 40):
            out = engine.generate(
                prompt, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}, return_logprob=True
            )
            assert not isinstance(out, list)
            assert out.cached_tokens == cached
            found.append((out.output_ids, [each.logprob for each in out.logprobs]))
    assert found[0][0] == found[1][0]
    if changes and "backend" not in changes:
        assert found[0] == found[1]
    text = torch.tensor([prompt + found[0][0]])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(oracle(text).logits[0], -1)
    expected = logprobs[40:52].gather(1, text[0, 41:, None])[:, 0].numpy()
    differences = np.abs(np.array(found[0][1]) - expected)
    assert differences.mean() < (0.02 if stored == "int8" else 0.15), differences
    assert differences.mean() > 1e-5, "latent vectors are in 8 bits"


def test_released_memory_includes_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[KVPages] = []
    allocate_pages = KVPages.allocate

    def allocate_and_keep(*arguments: Any, **named: Any) -> KVPages:
        pools.append(allocate_pages(*arguments, **named))
        return pools[-1]

    monkeypatch.setattr(KVPages, "allocate", allocate_and_keep)
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    values = {"model_path": str(folder), "device": "cpu", "kv_cache_dtype": "int8", "max_total_tokens": 256}
    config = EngineConfig.model_validate(values)
    runner = create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0))
    driver = PlanDriver(runner)
    prompt = list(range(5, 25))
    request = driver.admit(prompt)
    before = driver.generate(request, 4)
    driver.release(request)
    arrays = [each for pool in pools if pool.latent_scales for each in (pool.keys, pool.latent_scales.values)]
    assert runner.report().kv_bytes == sum(each.untyped_storage().nbytes() for each in arrays)
    runner.release_memory(weights=False, kv=True)
    assert sum(each.untyped_storage().nbytes() for each in arrays) == 0
    runner.resume_memory(weights=False, kv=True)
    assert driver.generate(driver.admit(prompt), 4) == before
    runner.close()

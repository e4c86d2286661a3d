"""Attention of the torch backend over steps of latent vectors (`helpers.latent_steps`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers.latent_steps import LatentStep, Numbers, make_latent_step

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, LatentHeads
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages


def torch_step(
    config: LatentAttentionConfig,
    kv_lens: tuple[int, ...],
    dtype: torch.dtype,
    query_lens: tuple[int, ...] | None = None,
    **options: Any,
) -> LatentStep:
    """A step whose inputs are rounded to a dtype; without `query_lens`, of decode rows."""

    def rounded(numbers: Numbers) -> Numbers:
        return torch.from_numpy(numbers).to(dtype).double().numpy()

    return make_latent_step(config, kv_lens, query_lens or (1,) * len(kv_lens), rounded=rounded, **options)


def attend_step(
    attention: AttentionImplementation,
    step: LatentStep,
    config: LatentAttentionConfig,
    dtype: torch.dtype,
    *,
    expands_from: int | None = None,
    tile: int | None = None,
    kv: KVPages | None = None,
) -> torch.Tensor:
    """The output of attention, `[T, heads, value_dim]`. `kv`: pages in 8 bits; by default, the step's in `dtype`."""
    lens = zip(step.kv_lens, np.diff(step.query_starts), strict=True)
    positions = np.concatenate([np.arange(length - count, length) for length, count in lens])
    batch = ForwardBatch(
        tokens=torch.zeros(len(step.plain), dtype=torch.int32),
        positions=torch.from_numpy(positions).int(),
        write_slots=torch.from_numpy(step.write_slots),
        page_table=torch.from_numpy(step.page_table),
        kv_lens=torch.from_numpy(step.kv_lens),
        query_starts=torch.from_numpy(step.query_starts),
        num_decode=step.num_decode,
    )
    if kv is None:
        pages = torch.from_numpy(step.pages[:, None]).to(dtype)
        kv = KVPages(pages, pages)
    key_up, value_up, plain, rotated = (
        torch.from_numpy(part).to(dtype) for part in (step.key_up, step.value_up, step.plain, step.rotated)
    )
    options = AttentionOptions(config.scale, latents=LatentHeads(key_up, value_up, expands_from, tile))
    with torch.inference_mode():
        found = attention.prepare(batch)(torch.cat((plain, rotated), dim=-1), kv, options)
    assert found.dtype == dtype
    assert found.is_contiguous()
    return found


def check_errors(found: torch.Tensor, step: LatentStep, tolerance: float) -> None:
    """Each token's largest error is at most this fraction of its largest output."""
    errors = np.abs(found.double().numpy() - step.expected).max((1, 2))
    sizes = np.abs(step.expected).max((1, 2))
    assert not np.isnan(errors).any()
    assert (errors <= tolerance * sizes).all(), f"errors up to {(errors / sizes).max()}"

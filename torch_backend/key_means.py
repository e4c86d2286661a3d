"""Means of keys, for a cache that stores keys in int8 without their mean; computed by the loaded model itself.

The model computes fixed sequences of tokens (`sglang_jax.runner.kv_scales`) with a cache of its own dtype, and each kv
head's mean is taken from the pages. Rotary embedding rotates this mean with the position, so the mean of a few first
positions would be wrong at later ones: the sequences are spread over the whole context, which does not change attention
within them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_jax.architectures.model_config import ModelConfig, num_paged_groups
from sglang_jax.errors import ConfigError
from sglang_jax.runner.kv_scales import calibration_tokens
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.recurrent.rows import StateRows


def give_key_means(
    forward: Callable[[ForwardBatch, Sequence[LayerMemory]], object],
    kv: Sequence[LayerMemory],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_context: int,
) -> None:
    """Writes the mean of keys into the `token_scales` of every layer that has them. Raises `ConfigError` naming the
    layers whose keys are not finite.

    `forward(batch, kv)`: the loaded model, which all ranks call at the same time; `kv`: its memory, which determines
    each layer's heads and page size; `dtype`: of activations.
    """
    pages = [pool for layer in kv for pool in layer.pools]
    device, page_size = pages[0].keys.device, pages[0].page_size
    batch = calibration_batch(config, page_size, max_context, device)
    rows, columns = batch.page_table.shape

    def like(memory: LayerMemory) -> LayerMemory:
        return LayerMemory(
            None if memory.pages is None else _like(memory.pages, 1 + rows * columns, dtype),
            tuple(pool.new_zeros((1 + rows, *pool.shape[1:])) for pool in memory.states),
            shards=tuple(map(like, memory.shards)),
        )

    own = [like(layer) for layer in kv]
    with torch.inference_mode():
        forward(batch, own)
        length = batch.kv_lens[0]
        broken = []
        parts = [
            (number, *both)
            for number, (layer, like_it) in enumerate(zip(kv, own, strict=True))
            for both in zip(layer.parts, like_it.parts, strict=True)
        ]
        for number, layer, computed in parts:
            if layer.pages is None or layer.pages.token_scales is None:
                continue
            assert computed.pages is not None
            keys = computed.pages.keys[batch.page_table.long()].transpose(2, 3).flatten(1, 2)[:, :length]
            mean = keys.double().mean((0, 1)).float()
            if not bool(mean.isfinite().all()):
                broken.append(number)
            layer.pages.token_scales.key_mean.copy_(mean)
    if broken:
        layers = ", ".join(map(str, dict.fromkeys(broken)))
        raise ConfigError(
            f"the mean of keys cannot be calibrated: those of layers {layers} are not finite; "
            "choose --kv-cache-dtype auto and another --attention-backend than sage, or check the weights"
        )


def _like(pages: KVPages, num_pages: int, dtype: torch.dtype) -> KVPages:
    _, kv_heads, page_size, head_dim = pages.keys.shape
    device, shared = pages.keys.device, pages.shared
    return KVPages.allocate(num_pages, kv_heads, page_size, head_dim, dtype, device, shared=shared)


def calibration_batch(config: ModelConfig, page_size: int, max_context: int, device: torch.device) -> ForwardBatch:
    """The calibration tokens as a step: each sequence has its own pages, the same ones in all cache groups; sequence i
    of n starts at i / (n - 1) of the way through the context."""
    tokens = calibration_tokens(config.vocab_size, min(max_context, config.max_position))
    rows, length = tokens.shape
    columns = -(-length // page_size)
    page_table = 1 + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    places = np.arange(length)
    begins = np.linspace(0, max_context - length, rows).astype(np.int64)
    slots = page_table[:, places // page_size].astype(np.int64) * page_size + places % page_size
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    table, written = torch.from_numpy(page_table).to(device), torch.from_numpy(slots.reshape(-1)).to(device)
    return ForwardBatch(
        tokens=torch.from_numpy(tokens.reshape(-1)).to(device),
        positions=torch.from_numpy((begins[:, None] + places).reshape(-1).astype(np.int32)).to(device),
        write_slots=written,
        page_table=table,
        kv_lens=torch.full((rows,), length, dtype=torch.int32, device=device),
        query_starts=starts,
        num_decode=0,
        further=(GroupPages(written, table),) * (num_paged_groups(config) - 1),
        states=_fresh_states(starts, length) if config.keeps_states else None,
    )


def _fresh_states(starts: torch.Tensor, length: int) -> StateRows:
    slots = 1 + torch.arange(len(starts) - 1, device=starts.device)
    tokens = torch.arange(length * len(slots), device=starts.device)
    return StateRows(
        begin=slots,
        fresh=torch.ones_like(slots, dtype=torch.bool),
        own=slots,
        sequences=tokens // length,
        offsets=tokens % length,
        query_starts=starts,
        num_decode=0,
    )

"""The stand-in model on the Torch runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from helpers.stand_in_model import HIDDEN, LAYERS, windows_of_layers

from sglang_jax.architectures import CacheKind
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from torch_backend.batch import ForwardBatch
from torch_backend.graphs import Bucket, Capture
from torch_backend.runner import TorchRunner

CPU = torch.device("cpu")


class StandIn:
    """The stand-in over pages `[pages, page_size, 2, hidden]`, whose unused slots hold NaN, so that reading one
    shows."""

    def __init__(
        self, weights: Sequence[np.ndarray], num_pages: int, page_size: int, window: int | None = None
    ) -> None:
        self._windows = windows_of_layers(window)
        self._weights = [torch.tensor(array) for array in weights]
        self._kv = [torch.full((num_pages, page_size, 2, HIDDEN), torch.nan) for _ in range(LAYERS)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        tokens = len(batch.tokens)
        places = torch.arange(tokens)
        ends = batch.query_starts[1:]
        sequences = torch.searchsorted(ends, places, right=True)
        x = self._weights[0][batch.tokens.long()] + self._weights[1][batch.positions.long()]
        for layer, cache in enumerate(self._kv):
            query, key, value, output = self._weights[2 + 4 * layer : 6 + 4 * layer]
            window = self._windows[layer]
            pages = batch.of_group(0 if window is None else 1)
            slots = cache.view(-1, 2, HIDDEN)
            slots.index_copy_(0, pages.write_slots.long(), torch.stack([x @ key, x @ value], dim=1))
            seen = cache[pages.page_table[sequences].long()].reshape(tokens, -1, 2, HIDDEN)
            scores = torch.einsum("td,tsd->ts", x @ query, seen[:, :, 0])
            ago = batch.positions[:, None] - torch.arange(seen.shape[1])
            visible = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
            attention = torch.softmax(torch.where(visible, scores, -torch.inf), dim=-1)
            x = x + torch.einsum("ts,tsd->td", attention, torch.where(visible[..., None], seen[:, :, 1], 0)) @ output
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._weights[-1]


def stand_in_runner(
    weights: Sequence[np.ndarray],
    model: type[StandIn] = StandIn,
    *,
    max_rows: int = 4,
    token_budget: int = 32,
    page_size: int = 4,
    num_pages: int = 100,
    max_context: int = 64,
    max_samples: int = 1,
    capture: Capture | None = None,
    graph_buckets: tuple[int, ...] = (),
    mixed_buckets: tuple[Bucket, ...] = (),
    draft: Sequence[np.ndarray] | None = None,
    window: int | None = None,
) -> TorchRunner:
    """A runner of the stand-in on the CPU. With drafts it captures no steps with prompts. `draft`: the weights of
    another stand-in used as draft model; `window`: see `windows_of_layers`."""
    names = ("full",) if draft is None else ("full", "draft full")
    pools = tuple(PoolSpec(name, CacheKind.FULL, num_pages, page_size, draft=name != "full") for name in names)
    if window is not None:
        pools += (PoolSpec("swa", CacheKind.WINDOW, num_pages, page_size, window),)
    spec = RunnerSpec(
        pools,
        max_rows,
        token_budget,
        max_context,
        len(weights[0]),
        max_samples=max_samples,
        drafts_with_prompts=draft is None,
    )
    guessing = None if draft is None else model(draft, num_pages, page_size)
    paged = model(weights, num_pages, page_size, window)
    mixed = mixed_buckets if max_samples == 1 else ()
    return TorchRunner(
        paged, spec, device=CPU, capture=capture, graph_buckets=graph_buckets, mixed_buckets=mixed, draft=guessing
    )

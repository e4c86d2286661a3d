"""The stand-in model on the JAX runner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers.stand_in_model import HIDDEN, LAYERS, windows_of_layers

from sglang_jax.architectures import CacheKind
from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.draft_model import DraftModel
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.runner import JaxRunner
from sglang_jax.jax_runner.step import DeviceState, ModelFunctions, Weights, empty_rows
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.runner.page_tables import TableLayout
from sglang_jax.runner.plan import PoolSpec, RunnerSpec


def _forward(
    weights: Weights, batch: ForwardBatch, kv: list[jax.Array], window: int | None = None
) -> tuple[jax.Array, list[jax.Array]]:
    places = jnp.arange(len(batch.tokens))
    sequences = jnp.searchsorted(batch.query_starts[1:], places, side="right")
    sequences = jnp.minimum(sequences, len(batch.kv_lens) - 1)
    x = weights[0][batch.tokens] + weights[1][batch.positions]
    new_kv = []
    for layer, cache in enumerate(kv):
        query, key, value, output = weights[2 + 4 * layer : 6 + 4 * layer]
        sees = windows_of_layers(window)[layer % LAYERS]
        pages = batch.of_group(0 if sees is None else 1)
        slots = cache.reshape(-1, 2, HIDDEN)
        slots = slots.at[pages.write_slots].set(jnp.stack([x @ key, x @ value], axis=1))
        new_kv.append(slots.reshape(cache.shape))
        seen = new_kv[-1][pages.page_table[sequences]].reshape(len(x), -1, 2, HIDDEN)
        scores = jnp.einsum("td,tsd->ts", x @ query, seen[:, :, 0])
        ago = batch.positions[:, None] - jnp.arange(seen.shape[1])
        visible = (ago >= 0) if sees is None else (ago >= 0) & (ago < sees)
        attention = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        x = x + jnp.einsum("ts,tsd->td", attention, jnp.where(visible[..., None], seen[:, :, 1], 0)) @ output
    return x, new_kv


def _logits(weights: Weights, hidden: jax.Array) -> jax.Array:
    return hidden @ weights[-1]


STAND_IN = ModelFunctions(_forward, _logits)


def stand_in_runner(
    weights: Sequence[np.ndarray],
    model: ModelFunctions = STAND_IN,
    *,
    max_rows: int = 4,
    token_budget: int = 32,
    page_size: int = 4,
    num_pages: int = 100,
    max_context: int = 64,
    max_samples: int = 1,
    draft: Sequence[np.ndarray] | None = None,
    window: int | None = None,
) -> JaxRunner:
    """A runner of the stand-in, whose unused pages hold NaN, so that reading one shows. `draft`: the weights of another
    stand-in used as draft model; `window`: see `windows_of_layers`."""
    models = 1 if draft is None else 2
    names = ("full", "draft full")[:models]
    pools = tuple(PoolSpec(name, CacheKind.FULL, num_pages, page_size, draft=name != "full") for name in names)
    if window is not None:
        pools += (PoolSpec("swa", CacheKind.WINDOW, num_pages, page_size, window),)
        model = ModelFunctions(partial(_forward, window=window), _logits)
    spec = RunnerSpec(
        pools,
        max_rows,
        token_budget,
        max_context,
        len(weights[0]),
        max_samples=max_samples,
        drafts_with_prompts=draft is None,
    )
    kv = [jnp.full((num_pages, page_size, 2, HIDDEN), jnp.nan) for _ in range(models * LAYERS)]
    if draft is not None:
        kv = tuple(kv)  # type: ignore[assignment]
    on_device = [jnp.array(array) for array in (*weights, *(draft or ()))]
    state = DeviceState(kv, *empty_rows(spec, None, drafted=draft is not None))
    programs = Programs(
        model,
        on_device,
        state,
        Buckets.ladder(max_rows, token_budget, page_size, len(pools)),
        page_size,
        table=TableLayout.of(spec),
        max_drafts=max_samples - 1,
        draft=None if draft is None else DraftModel(STAND_IN, (1,), len(draft), LAYERS, (None,)),
    )
    return JaxRunner(programs, on_device, kv, spec, {})

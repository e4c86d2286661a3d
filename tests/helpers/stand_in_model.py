"""A transformer of two layers for tests of runners: its weights, and its logits, dense in numpy.

`stand_in_jax` and `stand_in_torch` compute it over pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCAB = 101
HIDDEN = 16
LAYERS = 2
CONTEXT = 256


def random_weights(seed: int = 0, vocab: int = VOCAB) -> list[np.ndarray]:
    """Token and position embeddings, query, key, value and output matrices of each layer, the output projection."""
    rng = np.random.default_rng(seed)
    shapes = [(vocab, HIDDEN), (CONTEXT, HIDDEN), *[(HIDDEN, HIDDEN)] * (4 * LAYERS), (HIDDEN, vocab)]
    return [rng.normal(0, 1.5 * HIDDEN**-0.5, shape).astype(np.float32) for shape in shapes]


def windows_of_layers(window: int | None) -> tuple[int | None, ...]:
    """What each layer sees: all tokens, except for the last one, which sees the last `window` tokens if that is
    given."""
    return (*(None,) * (LAYERS - 1), window)


def dense_logits(weights: Sequence[np.ndarray], tokens: Sequence[int], window: int | None = None) -> np.ndarray:
    """Logits after every token, float32 `[tokens, vocab]`. `window`: see `windows_of_layers`."""
    x = weights[0][list(tokens)] + weights[1][: len(tokens)]
    later = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    for layer, sees in enumerate(windows_of_layers(window)):
        hidden_later = later if sees is None else later | np.tril(np.ones_like(later), -sees)
        query, key, value, output = weights[2 + 4 * layer : 6 + 4 * layer]
        scores = np.where(hidden_later, -np.inf, (x @ query) @ (x @ key).T)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = x + attention @ (x @ value) @ output
    return x @ weights[-1]

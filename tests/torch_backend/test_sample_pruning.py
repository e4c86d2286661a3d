"""The CPU's sampler scans few tokens of a large vocabulary, and samples the same as a scan of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.runner.plan import INVALID_TOKEN
from torch_backend.native_sampler import NativeSampler
from torch_backend.noise import gumbel_noise
from torch_backend.sampler import SamplerInputs

VOCAB = 50_000
ROUNDING = 1e-9
"""Masses are float64 sums: a nucleus that ends this close to `top_p` may end a token earlier or later."""


@dataclass(frozen=True)
class Row:
    """One row about to be sampled."""

    logits: np.ndarray
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1234567890123
    position: int = 7

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32


def sampled(rows: list[Row]) -> list[int]:
    vocab = len(rows[0].logits)

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    parameters = SamplerInputs(
        temperature=column([row.temperature for row in rows]),
        top_k=column([vocab if row.top_k == -1 else min(row.top_k, vocab) for row in rows], torch.int32),
        top_p=column([row.top_p for row in rows]),
        min_p=column([row.min_p for row in rows]),
        seed=torch.from_numpy(np.array([row.key for row in rows], np.uint32).view(np.int32)),
        position=column([row.position for row in rows], torch.int32),
    )
    return NativeSampler().sample(torch.from_numpy(np.stack([row.logits for row in rows])), parameters).tolist()


def from_all_tokens(row: Row) -> set[int]:
    """The tokens that the row may sample, from a sort of the whole vocabulary and the noise of every token.

    More than one token where the nucleus ends within rounding of `top_p`.
    """
    distances = (row.logits.max() - row.logits) / np.float32(row.temperature)
    kept = np.ones(len(distances), np.bool_)
    if row.top_k != -1 and row.top_k < len(distances):
        kept = distances <= np.sort(distances)[row.top_k - 1]
    nuclei = [kept]
    if row.top_p < 1.0:
        inside = np.sort(distances[kept])
        within = np.cumsum(np.exp(-inside), dtype=np.float64)
        wanted = np.float32(row.top_p) * within[-1]
        ends = [np.searchsorted(within, wanted * side) for side in (1 - ROUNDING, 1 + ROUNDING)]
        nuclei = [kept & (distances <= inside[min(end, len(inside) - 1)]) for end in ends]
    if row.min_p > 0.0:
        nuclei = [kept & (distances <= -np.log(np.float32(row.min_p))) for kept in nuclei]
    scores = gumbel_noise(row.key, row.position, np.arange(len(distances), dtype=np.uint32)) - distances
    return {int(np.where(kept, scores, -np.inf).argmax()) for kept in nuclei}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Flat, peaked and tied logits, below and above the size of the sampler's first scan."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, draw(st.sampled_from((0.0, 1e-6, 0.5, 3.0, 30.0))), VOCAB).astype(np.float32)
    tie = draw(st.sampled_from((0.0, 0.0, 0.25, 4.0)))
    if tie:
        logits = np.round(logits / np.float32(tie)) * np.float32(tie)
    peaks = draw(st.integers(0, 3))
    if peaks:  # some tokens so far above all others that they may still win
        above = draw(st.sampled_from((0.0, 5.0, 7.9, 8.0, 8.1, 12.0, 16.0, 20.0)))
        logits[rng.integers(0, VOCAB, peaks)] = logits.max() + np.float32(above)
    masked = draw(st.sampled_from((0, 0, 1000, VOCAB - 3)))
    logits[rng.permutation(VOCAB)[:masked]] = -np.inf
    return Row(
        logits,
        temperature=draw(st.sampled_from((0.25, 1.0, 2.0, 50.0))),
        top_k=draw(st.sampled_from((-1, -1, 1, 40, 5000, VOCAB - 1))),
        top_p=draw(st.sampled_from((1.0, 1.0, 0.999, 0.95, 0.5, 1e-6))),
        min_p=draw(st.sampled_from((0.0, 0.0, 1e-6, 1e-3, 0.1, 1.0))),
        seed=draw(st.integers(0, 2**63 - 1)),
        position=draw(st.integers(0, 2**31 - 1)),
    )


@settings(max_examples=150, deadline=None)
@given(row=rows())
def test_samples_equal_those_of_the_whole_vocabulary(row: Row) -> None:
    assert sampled([row])[0] in from_all_tokens(row)


LARGEST = Row(np.zeros(0, np.float32), seed=17 | (2**20 + 3) << 32, position=7)
LARGEST_TOKEN = 46124
"""For a row of this seed and position, the token with the largest possible noise."""


@pytest.mark.parametrize(("lead", "winner"), [(-0.01, LARGEST_TOKEN), (0.01, 0)], ids=["reached", "out of reach"])
def test_the_first_scan_covers_the_largest_noise(lead: float, winner: int) -> None:
    """Token 0 leads by almost the largest difference that noise can make up for, or by slightly more."""
    ids = np.arange(VOCAB, dtype=np.uint32)
    noise = gumbel_noise(LARGEST.key, LARGEST.position, ids)
    assert noise.argmax() == LARGEST_TOKEN
    logits = np.full(VOCAB, -1000.0, np.float32)
    logits[0] = 0.0
    logits[LARGEST_TOKEN] = noise[0] - noise[LARGEST_TOKEN] - np.float32(lead)
    row = Row(logits, seed=LARGEST.seed, position=LARGEST.position)
    assert from_all_tokens(row) == {winner}
    assert sampled([row]) == [winner]


@pytest.mark.parametrize("distance", [7.5, 8.0, np.nextafter(np.float32(8), np.float32(9)), 8.5, 12.0])
def test_tokens_inside_and_outside_the_first_scan_can_win(distance: float) -> None:
    ids = np.arange(VOCAB, dtype=np.uint32)
    noise = gumbel_noise(LARGEST.key, LARGEST.position, ids)
    # the one with the least noise is the most likely: others win from far below
    logits = np.full(VOCAB, -1000.0, np.float32)
    logits[noise.argmin()], logits[LARGEST_TOKEN] = 0.0, -distance
    for filters in ({}, {"top_k": 2}, {"top_p": 1 - 1e-7}, {"min_p": 1e-6}):
        row = Row(logits, seed=LARGEST.seed, position=LARGEST.position, **filters)  # type: ignore[arg-type]
        assert sampled([row]) == [LARGEST_TOKEN], filters
        assert from_all_tokens(row) == {LARGEST_TOKEN}
    assert sampled([Row(logits, top_k=1, seed=LARGEST.seed, position=LARGEST.position)]) == [int(noise.argmin())]


def test_the_nucleus_may_extend_beyond_the_first_scan() -> None:
    """One likely token, and 40 000 at a distance of 9 with five times its probability in total."""
    logits = np.full(VOCAB, -20.0, np.float32)
    logits[5], logits[10:40_010] = 0.0, -9.0
    rows = [Row(logits, top_p=0.5, position=position) for position in range(50)]
    tokens = sampled(rows)
    assert [{token} for token in tokens] == [from_all_tokens(row) for row in rows]
    far = sum(10 <= token < 40_010 for token in tokens)
    assert 35 < far < 50
    assert set(sampled([Row(logits, top_p=0.1, position=position) for position in range(50)])) == {5}


@pytest.mark.parametrize("near_tokens", [range(46124), range(46125, VOCAB)], ids=["nearer first", "farther first"])
def test_equal_scores_go_to_the_first_token(near_tokens: range) -> None:
    """One of the two is in the first scan, the other is scanned later."""
    noise = gumbel_noise(LARGEST.key, LARGEST.position, np.arange(VOCAB, dtype=np.uint32))
    largest = noise[LARGEST_TOKEN]
    # a distance that exactly cancels the difference of their noise in float32
    near = next(
        token for token in near_tokens if largest - (largest - noise[token]) == noise[token] and noise[token] < 8.0
    )
    logits = np.full(VOCAB, -1000.0, np.float32)
    logits[near], logits[LARGEST_TOKEN] = 0.0, noise[near] - largest
    row = Row(logits, seed=LARGEST.seed, position=LARGEST.position)
    assert from_all_tokens(row) == {min(near, LARGEST_TOKEN)}
    assert sampled([row]) == [min(near, LARGEST_TOKEN)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_any_token_to_sample(temperature: float) -> None:
    lines = np.zeros((4, 100), np.float32)
    lines[0] = -np.inf
    lines[1, :99] = -np.inf
    lines[2, 50] = np.nan
    lines[3, [3, 99]] = np.inf, np.nan
    rows = [Row(line, temperature, top_p=0.9) for line in lines]
    assert sampled(rows) == [INVALID_TOKEN, 99, INVALID_TOKEN, INVALID_TOKEN]
    assert NativeSampler().greedy(torch.from_numpy(lines)).tolist() == [INVALID_TOKEN, 99, INVALID_TOKEN, INVALID_TOKEN]

"""The Triton sampler in the interpreter: against sorting in numpy, float64 noise, and the JAX sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import helpers.triton_interpreter
import jax
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.triton_interpreter import counted_loads, shuffled_programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32 as jax_threefry_2x32

from sglang_jax.jax_runner.sampler import sample
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import kept_tokens
from torch_backend.kernels import sample_filters, sample_survey
from torch_backend.kernels.sample import _gumbel_noise, greedy, keep
from torch_backend.kernels.sample import sample as triton_sample
from torch_backend.kernels.sample_filters import KeptTokens

assert helpers.triton_interpreter

# where a filter or the sample is this close to another outcome, rounding may decide
ROUNDING = 1e-5


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
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


def columns(rows: list[Row]) -> dict[str, torch.Tensor]:
    vocab = len(rows[0].logits)
    return {
        "temperature": torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        "top_k": torch.tensor([vocab if row.top_k == -1 else row.top_k for row in rows], dtype=torch.int32),
        "top_p": torch.tensor([row.top_p for row in rows], dtype=torch.float32),
        "min_p": torch.tensor([row.min_p for row in rows], dtype=torch.float32),
    }


def kept_of(rows: list[Row]) -> KeptTokens:
    return keep(torch.tensor(np.stack([row.logits for row in rows])), **columns(rows))


def sampled(rows: list[Row]) -> list[int]:
    seeds = torch.tensor(np.array([[row.seed & 0xFFFFFFFF, row.seed >> 32] for row in rows], np.uint32).view(np.int32))
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    logits = torch.tensor(np.stack([row.logits for row in rows]))
    return triton_sample(logits, **columns(rows), seeds=seeds, positions=positions).tolist()


def noise_of(row: Row) -> np.ndarray:
    """Gumbel variates in float64, from the bits of JAX's Threefry."""
    vocab = len(row.logits)
    key = np.array([row.seed & 0xFFFFFFFF, row.seed >> 32], np.uint32)
    counter = np.concatenate([np.full(vocab, row.position), np.arange(vocab)]).astype(np.uint32)
    bits = np.asarray(jax_threefry_2x32(key, counter))[:vocab]
    return -np.log(-np.log(((bits >> 9) + 0.5) * 2.0**-23))


def expected(row: Row) -> tuple[int, float]:
    """The token, and the margin to another outcome."""
    if np.isnan(row.logits).any() or np.isposinf(row.logits).any() or np.isneginf(row.logits).all():
        return -1, np.inf
    if row.temperature == 0.0:
        return int(row.logits.argmax()), np.inf
    kept, margin = kept_tokens(row.logits, row.params)
    with np.errstate(divide="ignore"):
        scaled = (row.logits.astype(np.float64) - row.logits.max()) / row.temperature
    scores = np.where(kept, scaled + noise_of(row), -np.inf)
    second, first = np.sort(scores)[-2:] if len(scores) > 1 else (-np.inf, scores[0])
    return int(scores.argmax()), min(margin, first - second)


def assert_samples(rows: list[Row], undecided: int = 0) -> None:
    """All rows sample the expected token; at most this many are within rounding of another outcome."""
    wanted = [expected(row) for row in rows]
    assert sum(margin < ROUNDING for _, margin in wanted) <= undecided
    for row, token, (want, margin) in zip(rows, sampled(rows), wanted, strict=True):
        assert token == want or margin < ROUNDING, row


def normal(vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


VOCAB = 37
ROW = st.builds(
    Row,
    # Multiples of 1/8: ties are frequent.
    logits=st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB).map(
        lambda values: np.array(values, np.float32)
    ),
    temperature=st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0)),
    top_k=st.sampled_from((-1, 1, 2, 5, 20, VOCAB - 1, VOCAB, 1000)),
    top_p=st.sampled_from((1.0, 0.99, 0.9, 0.5, 0.1, 1e-6)),
    min_p=st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
)


# not shrunk: in the interpreter that would take minutes
@settings(max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(ROW, min_size=6, max_size=6))
def test_samples_what_the_reference_samples(rows: list[Row]) -> None:
    assert_samples(rows, undecided=6)


@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 9001])
def test_vocabularies_around_the_edges_of_blocks(vocab: int) -> None:
    rows = [
        Row(normal(vocab, 1), temperature=1.3),
        Row(normal(vocab, 2), temperature=0.8, top_k=min(50, vocab), top_p=0.9),
        Row(normal(vocab, 3), temperature=0.0),
        Row(normal(vocab, 4), temperature=0.6, top_p=0.95, min_p=0.05, seed=2**63 - 1, position=2**31 - 1),
    ]
    assert_samples(rows, undecided=0)


@pytest.mark.parametrize("kind", ["normal", "flat", "outlier", "tiny", "ties", "masked", "wide"])
def test_top_k_keeps_exactly_what_a_sort_does(kind: str) -> None:
    rows = [Row(LOGITS[kind], temperature=0.7, top_k=top_k) for top_k in (1, 3, 2500, 4999)]
    for row, kept in zip(rows, kept_of(rows).distances.tolist(), strict=True):
        check_kept(row, kept)


@pytest.mark.parametrize("kind", ["normal", "flat", "outlier", "tiny", "ties", "masked", "wide"])
def test_top_p_keeps_what_a_sort_in_float64_does(kind: str) -> None:
    filters = [(-1, 1e-6), (-1, 0.9), (40, 0.9999)]
    rows = [Row(LOGITS[kind], 0.7, top_k, top_p) for top_k, top_p in filters]
    for row, kept in zip(rows, kept_of(rows).distances.tolist(), strict=True):
        check_kept(row, kept)


def check_kept(row: Row, found: float) -> None:
    """Compares `found`, the largest distance kept, with a sort."""
    with np.errstate(over="ignore"):
        distances = (row.logits.max() - row.logits) / np.float32(row.temperature)
    kept, top_p = distances <= found, row.top_p
    inside = kept_tokens(row.logits, SamplingParams(temperature=row.temperature, top_k=row.top_k))[0]
    if top_p == 1.0:
        # if one of the distances that overflow or are infinite is kept, all are
        farthest = np.sort(distances)[row.top_k - 1]
        assert found >= farthest
        assert (kept == (distances <= farthest)).all()
        return
    # Enough is kept, and no more than needed: without the farthest kept token it would not be enough.
    weights = np.where(inside, np.exp(-distances.astype(np.float64)), 0.0)
    farthest = distances[kept].max()
    assert not (kept & ~inside).any()
    assert weights[kept].sum() >= (top_p - ROUNDING) * weights.sum()
    assert weights[distances < farthest].sum() < (top_p + ROUNDING) * weights.sum()


def _with(values: np.ndarray, **changes: float) -> np.ndarray:
    changed = values.copy()
    for index, value in changes.items():
        changed[int(index[1:])] = value
    return changed


LOGITS = {
    "normal": normal(5000, 11),
    "flat": normal(5000, 12, 1e-6) + np.float32(2.0),
    "outlier": _with(normal(5000, 13, 1e-3), _7=30.0, _4000=-1e30),
    "tiny": normal(5000, 14, 1e-38),
    "ties": np.round(normal(5000, 15) * 2) / np.float32(2),
    "masked": np.where(normal(5000, 16) < 2.0, np.float32(-np.inf), normal(5000, 17)),
    "wide": normal(5000, 18, 1e30),
}


@pytest.mark.parametrize(("min_p", "top_k"), [(0.5, -1), (0.001, 3), (1.0, -1)])
def test_min_p_keeps_tokens_above_its_share_of_the_most_likely(min_p: float, top_k: int) -> None:
    row = Row(LOGITS["normal"], min_p=min_p, top_k=top_k)
    distances = row.logits.max() - row.logits
    kept = distances <= kept_of([row]).distances.item()
    assert kept.tolist() == kept_tokens(row.logits, row.params)[0].tolist()


def test_a_row_without_filters_keeps_everything() -> None:
    assert kept_of([Row(LOGITS["normal"])]).distances.item() == np.inf


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = np.zeros((4, 5000), np.float32)
    logits[1, [4999, 3000, 2100]] = 1.5
    logits[2, [4000, 11]] = np.nan, 3.0
    logits[3] = -np.inf
    assert greedy(torch.tensor(logits)).tolist() == [0, 2100, -1, -1]
    assert sampled([Row(line, temperature=0.0) for line in logits]) == [0, 2100, -1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(temperature: float) -> None:
    ordinary = normal(3000, 21)
    rows = [
        Row(_with(ordinary, _2999=np.nan), temperature),
        Row(_with(ordinary, _0=np.inf), temperature),
        Row(np.full(3000, -np.inf, np.float32), temperature),
        Row(np.full(3000, np.nan, np.float32), temperature),
        Row(_with(np.full(3000, -np.inf, np.float32), _2500=-4.0), temperature, top_k=3, top_p=0.5),
        Row(ordinary, temperature),
    ]
    assert sampled(rows)[:5] == [-1, -1, -1, -1, 2500]
    assert_samples(rows)


def test_minimum_temperatures_sample_the_greedy_token() -> None:
    rows = [Row(normal(3000, seed), temperature, top_p=0.9) for seed in range(4) for temperature in (1e-30, 1e-6)]
    assert sampled(rows) == [int(row.logits.argmax()) for row in rows]


def test_a_sample_is_batch_invariant() -> None:
    rows = [Row(normal(3000, seed), 1.5, top_k=seed * 30 or -1, seed=seed << 33, position=seed) for seed in range(4)]
    rows.append(Row(normal(3000, 4), temperature=0.0))
    together = sampled(rows)
    assert len(set(together)) == 5
    assert [sampled([row])[0] for row in rows] == together
    for seed in range(2):
        with shuffled_programs(seed):
            assert sampled(rows) == together


def test_rows_of_logits_may_be_strided() -> None:
    padded = torch.full((2, 4000), float("nan"))
    padded[:, :3000] = torch.tensor(np.stack([normal(3000, 1), normal(3000, 2)]))
    rows = [Row(line, 1.1, top_p=0.9) for line in padded[:, :3000].numpy()]
    seeds, positions = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    apart = triton_sample(padded[:, :3000], **columns(rows), seeds=seeds, positions=positions)
    together = triton_sample(padded[:, :3000].contiguous(), **columns(rows), seeds=seeds, positions=positions)
    assert apart.tolist() == together.tolist()


@pytest.mark.parametrize(
    ("row", "capacity", "passes"),
    [
        (Row(LOGITS["normal"], temperature=0.0, top_k=5, top_p=0.5), 1000, 1),
        (Row(_with(LOGITS["normal"], _9=np.nan), top_k=5, top_p=0.5), 1000, 1),
        (Row(LOGITS["normal"], min_p=0.1), 1000, 2),  # the survey and the sample
        # the amounts, and the copies of the buffer
        (Row(LOGITS["normal"], top_k=5), 1000, 2 + 2),
        (Row(LOGITS["normal"], top_p=0.5), 1000, 2 + 2),
        (Row(LOGITS["normal"], top_k=5, top_p=0.5), 1000, 2 + 2),
        # a second round of amounts
        (Row(LOGITS["normal"], top_k=2500), 1000, 2 + 3),
        # two rounds, no copies, and a search in the row
        (Row(LOGITS["flat"], top_k=2500), 300, 2 + 2 + 2),
    ],
)
def test_rows_run_only_the_work_that_they_need(
    row: Row, capacity: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_filters, "_CAPACITY", capacity)
    with counted_loads() as loads:
        sampled([row])
    # amounts, copies, and a handful of parameters and candidates in addition to the passes over the vocabulary
    assert loads.elements // len(row.logits) == passes
    assert loads.elements % len(row.logits) < 4000


@pytest.mark.parametrize(("capacity", "parts"), [(1, 1), (100, 4)])
def test_the_buffer_size_does_not_change_the_kept_tokens(
    capacity: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several kinds in one launch: one needs a second round, another searches the row itself."""
    monkeypatch.setattr(sample_filters, "_CAPACITY", capacity)
    monkeypatch.setattr(sample_survey, "_MIN_PART", 5000 // parts)
    assert sample_survey.parts_of(5000) == parts
    filters = [(2500, 1.0), (-1, 0.3), (-1, 0.999), (40, 0.9), (3000, 0.5)]
    kinds = ("normal", "flat", "masked", "wide", "normal")
    rows = [Row(LOGITS[kind], 0.7, top_k, top_p) for kind, (top_k, top_p) in zip(kinds, filters, strict=True)]
    for row, kept in zip(rows, kept_of(rows).distances.tolist(), strict=True):
        check_kept(row, kept)


@pytest.mark.parametrize("argument", ["logits", "temperature", "seeds"])
def test_wrong_arguments_are_refused(argument: str) -> None:
    rows = [Row(normal(8, 1))]
    arguments = {
        "logits": torch.tensor(rows[0].logits)[None],
        **columns(rows),
        "seeds": torch.zeros((1, 2), dtype=torch.int32),
        "positions": torch.zeros(1, dtype=torch.int32),
    }
    arguments[argument] = arguments[argument].double()
    with pytest.raises(ValueError, match=argument):
        triton_sample(**arguments)


@triton.jit
def _noise_kernel(out, seed, positions, BLOCK: tl.constexpr):
    tokens = tl.arange(0, BLOCK)
    low, high = tl.load(seed).to(tl.uint32, bitcast=True), tl.load(seed + 1).to(tl.uint32, bitcast=True)
    position = tl.load(positions).to(tl.uint32, bitcast=True)
    tl.store(out + tokens, _gumbel_noise(low, high, position, tokens.to(tl.uint32, bitcast=True)))


def test_noise_has_the_bits_of_jax() -> None:
    row = Row(np.zeros(4096, np.float32), seed=0x72345678_0ABCDEF1, position=99_999)
    out = torch.empty(4096)
    seed, position = torch.tensor([0x0ABCDEF1, 0x72345678], dtype=torch.int32), torch.tensor([99_999])
    _noise_kernel[(1,)](out, seed, position.int(), BLOCK=4096)
    np.testing.assert_allclose(out.numpy(), noise_of(row), rtol=2e-6, atol=2e-6)


def test_samples_the_tokens_that_the_jax_sampler_samples() -> None:
    generator = np.random.default_rng(8)
    rows = [
        Row(
            normal(3000, 100 + i),
            temperature=float(np.float32(generator.choice([0.0, 0.6, 1.0, 1.7]))),
            top_k=int(generator.choice([-1, 1, 20, 400])),
            top_p=float(np.float32(generator.choice([1.0, 0.95, 0.6]))),
            min_p=float(np.float32(generator.choice([0.0, 0.0, 0.02]))),
            seed=int(generator.integers(2**63)),
            position=int(generator.integers(100_000)),
        )
        for i in range(20)
    ]
    assert sampled(rows) == sampled_by_jax(rows)


def sampled_by_jax(rows: list[Row]) -> list[int]:
    low, high = np.array([[row.seed & 0xFFFFFFFF, row.seed >> 32] for row in rows], np.uint32).T
    seeds = {"seed_low": jax.numpy.asarray(low), "seed_high": jax.numpy.asarray(high)}
    changes = {name: jax.numpy.asarray(values.numpy()) for name, values in columns(rows).items()}
    state = replace(SamplingState.empty(len(rows), len(rows[0].logits)), **seeds, **changes)
    positions = np.array([row.position for row in rows], np.int32)
    logits = np.stack([row.logits for row in rows])
    everyone = np.arange(len(rows))
    return np.asarray(jax.jit(sample)(logits, state, everyone, positions, everyone >= 0)).tolist()

"""The TPU kernel of top-k and top-p in the interpreter, against a sort in float64; and which lines run which filter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.pallas_state_rows import faulty_module
from helpers.tpu_interpreter import CopyMode, Interpreted

from sglang_jax.kernels import kept_distance_pallas
from sglang_jax.kernels.kept_distance_pallas import LINES, kept_distance

VOCAB = 4097
"""One more than one turn of the loop sums."""

ROUNDING = 1e-5


def logits_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(VOCAB).astype(np.float32)
    match kind:
        case "normal":
            return 3 * normal
        case "flat":
            return normal * np.float32(1e-6) + np.float32(2.0)
        case "tiny":
            return normal * np.float32(1e-38)
        case "ties":
            return np.round(normal * 4) / np.float32(2)
        case "masked":
            return np.where(normal < 1.5, np.float32(-np.inf), normal)
        case "wide":
            return normal * np.float32(1e30)
    raise AssertionError(kind)


KINDS = ("normal", "flat", "tiny", "ties", "masked", "wide")
FILTERS = [(0, 0.0), (1, 0.0), (40, 0.0), (VOCAB - 1, 0.0), (0, 1e-6), (0, 0.9), (0, 0.9999), (40, 0.5), (3000, 0.99)]
"""`(top_k, top_p)` of a line; 0 turns a filter off."""


def cases() -> Iterator[tuple[np.ndarray, int, float]]:
    """A line for each kind and filter: distances are not negative, as in a sampler."""
    rng = np.random.default_rng(5)
    for top_k, top_p in FILTERS:
        for kind in KINDS:
            logits = logits_of(kind, rng)
            with np.errstate(over="ignore"):
                yield (logits.max() - logits) / np.float32(0.7), top_k, top_p


EVERY = list(cases())
CASES = [EVERY[place] for place in (0, 7, 14, 21, 10, 17, 18, 22, 31, 39, 42, 50, 28)]
"""Each kind and each filter. The lines of the first program have no top-p."""


def found_by(interpreted: Interpreted, mode: CopyMode, chosen: list[tuple[np.ndarray, int, float]]) -> np.ndarray:
    distances, ranks, shares = (np.array(column) for column in zip(*chosen, strict=True))
    found, races = interpreted.run(
        mode,
        distances,
        np.where(ranks > 0, ranks, VOCAB).astype(np.int32),
        np.where(shares > 0, shares, 1.0).astype(np.float32),
        ranks > 0,
        shares > 0,
    )
    assert not races
    return np.asarray(found)


def check(distances: np.ndarray, top_k: int, top_p: float, found: float) -> None:
    """Compares `found` with a sort. Between two tokens whose mass is within rounding of the bound, either is right."""
    ranked = np.sort(distances)
    if not top_k and not top_p:
        assert found == np.inf
        return
    if top_k:
        ranked = ranked[ranked <= ranked[top_k - 1]]
    low = high = ranked[-1]
    if top_p:
        mass = np.exp(-ranked.astype(np.float64)).cumsum()
        mass /= mass[-1]
        places = (min(int(np.searchsorted(mass, top_p + slip)), len(ranked) - 1) for slip in (-ROUNDING, ROUNDING))
        low, high = (ranked[place] for place in places)
    assert low <= found <= high


def check_all(interpreted: Interpreted, mode: CopyMode, chosen: list[tuple[np.ndarray, int, float]]) -> np.ndarray:
    found = found_by(interpreted, mode, chosen)
    for case, kept in zip(chosen, found, strict=True):
        check(*case, kept)
    return found


@pytest.fixture(scope="module")
def compiled() -> Interpreted:
    return Interpreted(kept_distance)


def test_lines_keep_what_a_sort_keeps_in_any_position(compiled: Interpreted) -> None:
    """In one call: programs of lines with different filters, the last program partly filled."""
    assert LINES < len(CASES) < 2 * LINES
    together = check_all(compiled, CopyMode.EAGER, CASES)
    order = np.random.default_rng(1).permutation(len(CASES))
    shuffled = found_by(compiled, CopyMode.EAGER, [CASES[place] for place in order])
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.soak
@pytest.mark.parametrize("mode", CopyMode)
def test_every_kind_of_line(compiled: Interpreted, mode: CopyMode) -> None:
    check_all(compiled, mode, EVERY)


FAULTS = {
    "one pass fewer": ("lax.fori_loop(0, 31, halve", "lax.fori_loop(0, 30, halve"),
    "the last columns are left out": ("lax.fori_loop(0, width // (", "lax.fori_loop(1, width // ("),
    "the share is of all tokens": ("jnp.where(values <= most, jnp.exp(-values), 0.0)", "jnp.exp(-values)"),
    "a program looks at what the first asks for": ("asked[pl.program_id(0)]", "asked[0]"),
    "a line without top-p takes its neighbours'": ("jnp.where(shares[...] > 0.0, found, most)", "found"),
    "padding counts": ("constant_values=jnp.inf", "constant_values=0.0"),
    "less is enough": ("amount(limits) >= rank", "amount(limits) > rank - 2"),
}


@pytest.mark.soak
@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = faulty_module(monkeypatch, tmp_path, kept_distance_pallas, right, wrong)
    with pytest.raises(AssertionError):
        check_all(Interpreted(module.kept_distance), CopyMode.EAGER, CASES)

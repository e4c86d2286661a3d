"""Draft models: they change the number of steps that an output takes, and none of its tokens; their keys and values
stay in step with the model's, whatever happens to rows and pages. On both backends, with small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers.scheduling import RecordingChannel
from helpers.stand_in_jax import stand_in_runner as stand_in_jax
from helpers.stand_in_model import VOCAB, random_weights
from helpers.stand_in_torch import stand_in_runner as stand_in_torch

from sglang_jax.config import EngineConfig
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.draft_model import DraftLag
from sglang_jax.runner.drafts import flatten_drafts
from sglang_jax.runner.plan import DRAFT, LAST_TOKEN, PageDeltas, RunnerSpec, StepPlan
from sglang_jax.runner.protocol import Runner, StepHandle
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.drafting import FixedDrafts
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.slow

MAKERS: dict[str, Callable[..., Runner]] = {"torch": stand_in_torch, "jax": stand_in_jax}
WEIGHTS = random_weights()
STYLES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
)

Edit = Callable[[StepPlan], StepPlan]


def similar() -> list[np.ndarray]:
    """Weights of a model that agrees with that of `WEIGHTS` part of the time."""
    rng = np.random.default_rng(1)
    return [part + rng.normal(0, 0.2 * part.std(), part.shape).astype(np.float32) for part in WEIGHTS]


@dataclass
class Shaped:
    """A runner with another spec, whose plans are edited before they reach it."""

    inner: Runner
    spec: RunnerSpec
    edit: Edit = lambda plan: plan

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.inner.launch(self.edit(plan))


@pytest.fixture(scope="module", params=MAKERS)
def alike(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """A model that is its own draft model."""
    runner = MAKERS[request.param](WEIGHTS, draft=WEIGHTS, max_samples=4, max_rows=8)
    yield runner
    runner.close()


@pytest.fixture(scope="module", params=MAKERS)
def unlike(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = MAKERS[request.param](WEIGHTS, draft=similar(), max_samples=4, max_rows=8)
    yield runner
    runner.close()


@dataclass(frozen=True)
class Served:
    outputs: dict[int, list[int]]
    drafts: int
    right: int
    retractions: int


def serve(
    runner: Runner,
    at_once: int,
    *,
    drafts: bool = True,
    reuse: bool = True,
    pages: int | None = None,
    styles: tuple[SamplingParams, ...] = STYLES[:2],
    retract: int | None = None,
    seed: int = 3,
    edit: Edit = lambda plan: plan,
) -> Served:
    """Serves some requests, some of which share a prefix. Pages of a runner keep their old content, so a test that
    searches for missing KV serves other requests, chosen by `seed`."""
    spec = replace(runner.spec, max_samples=runner.spec.max_samples if drafts else 1)
    if pages is not None:
        spec = replace(spec, pools=tuple(replace(pool, num_pages=pages) for pool in spec.pools))
    channel = RecordingChannel()
    config = EngineConfig(
        model_path="none", chunked_prefill_size=16, disable_radix_cache=not reuse, test_retract=retract
    )
    scheduler = Scheduler(Shaped(runner, spec, edit), (2,), config, channel)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB - 2, 13)
    waiting = []
    for number in range(1, 7):
        prompt = rng.integers(3, VOCAB - 2, int(rng.integers(1, 24)))
        prompt = np.concatenate((shared, prompt)) if number % 2 else prompt
        sampling = replace(styles[number % len(styles)], seed=number, max_new_tokens=25, ignore_eos=True)
        waiting.append(
            NewRequest(id=number, token_ids=prompt.astype(np.int32).tobytes(), sampling=sampling, stream=True)
        )
    while waiting or not scheduler.idle:
        while waiting and len(scheduler.requests) < at_once:
            scheduler.add(waiting.pop(0))
        scheduler.step()
        check_everything(scheduler.cache)
    counts = scheduler.log.counts
    outputs = {number: channel.output(number) for number in range(1, 7)}
    assert all(len(output) == 25 for output in outputs.values())
    return Served(outputs, counts.draft_tokens, counts.accepted_tokens, counts.retractions)


@pytest.mark.parametrize("at_once", [1, 3])
def test_drafts_of_a_model_that_is_its_own_draft_model_are_all_accepted(alike: Runner, at_once: int) -> None:
    plain, found = serve(alike, at_once, drafts=False), serve(alike, at_once)
    assert found.outputs == plain.outputs
    assert found.drafts == found.right > 60


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("at_once", [1, 3])
def test_outputs_do_not_depend_on_the_draft_model(unlike: Runner, at_once: int, reuse: bool) -> None:
    plain = serve(unlike, at_once, drafts=False, reuse=reuse, styles=STYLES)
    found = serve(unlike, at_once, reuse=reuse, styles=STYLES)
    assert found.outputs == plain.outputs
    assert 0 < found.right < found.drafts


def test_the_draft_model_is_in_step_after_retractions(alike: Runner) -> None:
    found = serve(alike, 3, retract=7)
    assert found.retractions > 3
    assert found.outputs == serve(alike, 3, drafts=False).outputs
    assert found.drafts == found.right > 60


class Seldom:
    """A policy with drafts in one of `every` steps."""

    def __init__(self, every: int) -> None:
        self._every, self._steps = every, 0

    def choose(self, rows: np.ndarray, most: np.ndarray, room: int) -> np.ndarray:
        self._steps += 1
        return np.minimum(most, max(room // len(rows), 1)) if self._steps % self._every == 0 else np.ones_like(most)


@pytest.mark.parametrize("every", [2, 7])
def test_tokens_missed_while_there_were_no_drafts_are_computed(
    alike: Runner, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = Seldom(every)
    monkeypatch.setattr(FixedDrafts, "choose", lambda self, *arguments: seldom.choose(*arguments))
    found = serve(alike, 2)
    assert found.drafts == found.right > 10


def test_keys_of_the_draft_model_that_are_one_token_off_are_caught(
    alike: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the number of missed tokens is one too low."""
    seldom = Seldom(7)
    monkeypatch.setattr(FixedDrafts, "choose", lambda self, *arguments: seldom.choose(*arguments))
    missed = DraftLag.missed

    def short(self: DraftLag, flat: object) -> tuple[np.ndarray, np.ndarray]:
        rows, counts = missed(self, flat)  # type: ignore[arg-type]
        return rows, np.maximum(counts - 2, 0).astype(np.int32)

    monkeypatch.setattr(DraftLag, "missed", short)
    found = serve(alike, 2, seed=4)
    assert found.right < found.drafts


def test_a_draft_model_group_that_misses_a_retraction_is_caught(alike: Runner) -> None:
    """A planted fault: after retractions only the model's group gets a row's new pages."""
    steps = []

    def keep_from(plan: StepPlan) -> StepPlan:
        steps.append(plan)
        if len(steps) < 12:
            return plan
        nothing = np.zeros(0, np.int32)
        return replace(plan, page_deltas=(plan.page_deltas[0], PageDeltas(nothing, nothing, nothing)))

    found = serve(alike, 3, retract=7, seed=5, edit=keep_from)
    plain = serve(alike, 3, drafts=False, seed=5)
    assert found.right < found.drafts
    assert found.outputs == plain.outputs, "drafts never show in outputs"


def plan(rows: list[int], widths: list[int], chunks: int = 0) -> StepPlan:
    """Rows that decode with `widths` queries each, and `chunks` chunks of two tokens behind them."""
    tokens = [token for width in widths for token in (LAST_TOKEN, *[DRAFT] * (width - 1))]
    lengths = np.array(widths + [2] * chunks, np.int32)
    return StepPlan(
        step=0,
        rows=np.array(rows, np.int32),
        num_decode=sum(width == 1 for width in widths),
        query_lens=lengths,
        kv_lens=lengths + 9,
        tokens=np.array(tokens + [5, 5] * chunks, np.int32),
        samples=np.ones(len(lengths), bool),
        page_deltas=(),
    )


def test_the_tokens_that_a_draft_model_missed_follow_from_the_plans() -> None:
    lag = DraftLag(4)

    def missed(found: StepPlan) -> dict[int, int]:
        rows, counts = lag.missed(flatten_drafts(found))
        lag.launched(flatten_drafts(found))
        return dict(zip(rows.tolist(), counts.tolist(), strict=True))

    assert missed(plan([0, 1], [], chunks=2)) == {}
    assert missed(plan([0, 1], [3, 2])) == {}
    for _ in range(3):
        assert missed(plan([0, 1], [1, 1])) == {}
    assert missed(plan([1, 0], [1, 4])) == {0: 3}
    assert missed(plan([0, 1], [2, 2])) == {1: 4}
    lag.launched(flatten_drafts(plan([0, 1, 2], [1, 1], chunks=1)))
    assert missed(plan([2, 0, 1], [1, 2, 2])) == {0: 1, 1: 1}, "two are computed at once, three were missed"

"""The stand-in model on a real runner, for a scheduler's bench: reduced to the bench's sizes, with the tokens that it
must sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from helpers.stand_in_model import dense_logits, random_weights

from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult, TokenMasks
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import adjusted_logits, reference_sample
from torch_backend.noise import gumbel_noise

STYLES: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {"min_p": 0.02, "logit_bias": {7: 2.0, 39: -3.0}},
    {"temperature": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.3},
)
"""Ways to sample; a request's seed chooses."""

_ROUNDING = 1e-4


class Undecided(Exception):
    """The result of a sample depends on rounding, so the tokens after it are unknown."""


@dataclass(frozen=True)
class Watched:
    """A step whose result is also recorded."""

    inner: StepHandle
    finished: Callable[[StepResult], None]

    def sample(self, masks: TokenMasks) -> None:
        self.inner.sample(masks)

    def result(self) -> StepResult:
        result = self.inner.result()
        self.finished(result)
        return result


@dataclass(frozen=True)
class Narrowed:
    """A runner that outlives its schedulers, with the smaller sizes of one of them."""

    inner: Runner
    spec: RunnerSpec
    finished: Callable[[StepResult], None]

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        self.inner.warm_up(progress)

    def launch(self, plan: StepPlan) -> StepHandle:
        return Watched(self.inner.launch(plan), self.finished)

    def start_profile(self, folder: str) -> None:
        self.inner.start_profile(folder)

    def stop_profile(self) -> None:
        self.inner.stop_profile()

    def report(self) -> RunnerReport:
        return self.inner.report()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        return self.inner.expert_load()

    def close(self) -> None:
        """The inner runner stays open."""


def _only(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """Logits under which only these tokens are sampled; finite, so that non-finite ones are still detected."""
    masked = np.full_like(logits, -1e30)
    masked[list(tokens)] = logits[list(tokens)]
    return masked


class StandInSubject:
    """`Subject` of a bench: runners of `make_runner`, one for each page size, built once, which sample up to
    `max_samples` tokens of a row in a step. `window`: see `windows_of_layers`; layers with one are a second group.

    The last token of the vocabulary has an embedding of NaN: a query that sees it has non-finite logits.
    """

    def __init__(
        self,
        make_runner: Callable[..., Runner],
        vocab: int,
        page_sizes: Sequence[int],
        max_samples: int = 1,
        window: int | None = None,
    ) -> None:
        self.windows = (None,) if window is None else (None, window)
        self._window = window
        self.page_sizes = tuple(page_sizes)
        self.max_samples = max_samples
        self.accepted = 0
        self._weights = random_weights(seed=4, vocab=vocab)
        self._weights[0][vocab - 1] = np.nan
        if max_samples > 1:  # with few distinct tokens, samples repeat earlier ones more often
            self._weights[-1][:, 4:7] *= 24.0
        self._runners = {
            page_size: make_runner(
                self._weights,
                max_rows=6,
                token_budget=64,
                page_size=page_size,
                num_pages=26,
                max_context=60,
                max_samples=max_samples,
                window=window,
            )
            for page_size in page_sizes
        }
        for runner in self._runners.values():
            runner.warm_up(lambda done, total, what: None)

    def runner(self, spec: RunnerSpec) -> Runner:
        """A runner of at most 6 rows, 64 tokens a step, 26 pages and a context of 60."""
        spec = replace(spec, max_samples=self.max_samples, drafts_with_prompts=False)
        return Narrowed(self._runners[spec.pools[0].page_size], spec, self._count)

    def _count(self, result: StepResult) -> None:
        self.accepted += int((result.counts - (result.counts > 0)).sum())

    def compiles_after_warm_up(self) -> int:
        return sum(runner.report().compiles_after_warm_up for runner in self._runners.values())

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()

    def style(self, sampling: SamplingParams) -> SamplingParams:
        """The request, sampled in the way that its seed chooses."""
        return replace(sampling, **STYLES[(sampling.seed or 0) % len(STYLES)])

    def output(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        most: int,
        stop_ids: Collection[int],
        allowed: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> list[int]:
        """Output tokens of a request; those before the first with non-finite logits. `allowed`: the tokens that may
        follow an output, none where it has ended; without it all may.

        **Raises:** `Undecided`.
        """
        tokens: list[int] = []
        if allowed is not None:  # `allowed` knows when an output may end
            sampling = replace(sampling, grammar=None, min_new_tokens=0)
        while len(tokens) < most and not stop_ids & {*tokens[-1:]}:
            logits = dense_logits(self._weights, [*prompt, *tokens], self._window)[-1]
            if allowed is not None:
                choice = allowed(tokens)
                if not choice:
                    break
                logits = _only(choice, logits)
            noise = self._noise(sampling.seed or 0, len(prompt) + len(tokens))
            sequences = {"prompt": prompt, "output": tokens, "stop_ids": sorted(stop_ids)}
            sampled = reference_sample(logits, sampling, noise=noise, **sequences)
            if sampled.token is None:
                break
            margin = sampled.margin
            if sampling.temperature == 0.0:
                second, first = np.sort(adjusted_logits(logits, sampling, **sequences))[-2:]
                margin = float(first - second)
            if margin < _ROUNDING:
                raise Undecided
            tokens.append(sampled.token)
        return tokens

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Logprob of each token except the first, after those before it: float32 `[tokens - 1]`; NaN after the last
        token of the vocabulary."""
        poison = len(self._weights[0]) - 1
        healthy = tokens.index(poison) if poison in tokens else len(tokens)
        logits = np.full((len(tokens), poison + 1), np.nan, np.float32)
        if healthy:
            logits[:healthy] = dense_logits(self._weights, tokens[:healthy], self._window)
        shifted = logits - logits.max(-1, keepdims=True)
        everything = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return everything[np.arange(len(tokens) - 1), tokens[1:]]

    def _noise(self, seed: int, position: int) -> np.ndarray:
        ids = np.arange(len(self._weights[0]), dtype=np.uint32)
        return gumbel_noise((seed & 0xFFFFFFFF, seed >> 32), position, ids)

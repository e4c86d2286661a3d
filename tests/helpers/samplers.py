"""The samplers of all backends behind one interface, and the tokens that each of them must sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import helpers.triton_interpreter
import jax
import numpy as np
import torch
from jax.extend.random import threefry_2x32

from sglang_jax.jax_runner import sampling_state as jax_state
from sglang_jax.jax_runner.sampler import sample as jax_sample
from sglang_jax.runner.plan import INVALID_TOKEN, LAST_TOKEN, PageDeltas, SamplingUpdate, StepPlan
from sglang_jax.runner.row_updates import count_history, pack_row_updates
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import ReferenceSample, reference_sample
from torch_backend.kernels.sample import TritonSampler
from torch_backend.native_sampler import NativeSampler
from torch_backend.sampler import TokenSampler
from torch_backend.sampler import sample as torch_sample
from torch_backend.sampling_state import RowNeeds, SamplingState

assert helpers.triton_interpreter

ROWS = 6
"""Rows of a sampler that requests may use."""


@dataclass(frozen=True)
class Case:
    """A request about to sample its next token."""

    logits: np.ndarray
    sampling: SamplingParams
    seed: int = 0
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stop_ids: Sequence[int] = field(default=())

    @property
    def kv_len(self) -> int:
        return len(self.prompt) + len(self.output)

    def update(self, row: int) -> SamplingUpdate:
        history = np.array([*self.prompt, *self.output], np.int32) if self.sampling.counts_tokens else None
        stop_ids = np.array(self.stop_ids, np.int32)
        return SamplingUpdate(row, self.sampling, self.seed, len(self.prompt), stop_ids, history)

    def reference(self) -> ReferenceSample:
        """The reference sampler's result."""
        return reference_sample(
            self.logits,
            self.sampling,
            prompt=self.prompt,
            output=list(self.output),
            stop_ids=self.stop_ids,
            noise=reference_noise(self.seed, self.kv_len, len(self.logits)),
        )


def reference_noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """Gumbel variates of all tokens, float32 `[vocab]`: bits of JAX's own Threefry, logarithms in float64."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    counters = np.concatenate([np.full(vocab, position), np.arange(vocab)]).astype(np.uint32)
    bits = np.asarray(threefry_2x32(key, counters))[:vocab]
    return -np.log(-np.log(((bits >> 9) + 0.5) * 2.0**-23)).astype(np.float32)


def token_of(reference: ReferenceSample) -> int:
    return INVALID_TOKEN if reference.token is None else reference.token


class Sampler(Protocol):
    """A sampler and its state of `ROWS` rows and a dump row."""

    def update(self, updates: Sequence[SamplingUpdate]) -> None:
        """Gives rows to requests."""
        ...

    def sample(self, logits: np.ndarray, rows: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        """Samples a token for each line of `logits`, float32 `[n, vocab]`."""
        ...

    def count(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Counts a sampled token in each row; a negative token is not counted."""
        ...

    def parameter(self, name: str) -> np.ndarray:
        """The values of a field of the sampling state in all rows."""
        ...


@dataclass(frozen=True)
class Kind:
    """A sampler to be made for a vocabulary, and whether it takes 0.1 s for a token."""

    make: Callable[[int], Sampler]
    slow: bool = False

    def few(self, count: int) -> int:
        """`count`, or fewer where the sampler is slow."""
        return max(1, count // 25) if self.slow else count

    def sample(self, cases: Sequence[Case], rows: Sequence[int] | None = None) -> list[int]:
        """Samples for all cases in one batch; `rows` are their rows."""
        rows = range(len(cases)) if rows is None else rows
        sampler = self.make(len(cases[0].logits))
        sampler.update([case.update(row) for case, row in zip(cases, rows, strict=True)])
        return sampler.sample(np.array([case.logits for case in cases]), rows, [case.kv_len for case in cases])

    def samples_of(self, logits: np.ndarray, sampling: SamplingParams, count: int) -> list[int]:
        """Tokens sampled by one request at `count` positions."""
        sampler = self.make(len(logits))
        sampler.update([SamplingUpdate(0, sampling, 2**40 + 17, 1, np.zeros(0, np.int32), None)])
        most = 500
        tokens: list[int] = []
        for start in range(0, count, most):
            positions = range(start, min(start + most, count))
            tokens += sampler.sample(np.tile(logits, (len(positions), 1)), [0] * len(positions), positions)
        return tokens


_jit_sample = jax.jit(jax_sample)
_jit_apply = jax.jit(jax_state.apply_row_updates)
_jit_set_occurrences = jax.jit(jax_state.set_occurrences)


class JaxSampler:
    """The JAX backend's. Batches are padded to multiples of eight lines, like buckets."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._state = jax_state.SamplingState.empty(ROWS + 1, vocab)

    def update(self, updates: Sequence[SamplingUpdate]) -> None:
        self._state = _jit_apply(self._state, pack_row_updates(updates, 8, ROWS, self._vocab))
        for update in updates:
            if update.history is not None:
                occurrences = count_history(update, self._vocab)
                self._state = _jit_set_occurrences(self._state, np.int32(update.row), occurrences)

    def sample(self, logits: np.ndarray, rows: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        count = len(logits)
        lines = -(-count // 8) * 8
        padded = np.zeros((lines, self._vocab), np.float32)
        padded[:count] = logits
        row_ids, lengths = np.full(lines, ROWS, np.int32), np.zeros(lines, np.int32)
        row_ids[:count], lengths[:count] = rows, kv_lens
        tokens = _jit_sample(padded, self._state, row_ids, lengths, np.arange(lines) < count)
        return np.asarray(tokens)[:count].tolist()

    def count(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        sampled = np.array(tokens, np.int32)
        self._state = self._state.count(np.array(rows, np.int32), sampled, sampled >= 0)

    def parameter(self, name: str) -> np.ndarray:
        return np.asarray(self._state.__getattribute__(name))


class TorchSampler:
    """The Torch backend's, which looks up the options of a batch's rows on the host."""

    def __init__(self, sampler: TokenSampler, vocab: int) -> None:
        self._sampler = sampler
        self._vocab = vocab
        self._state = SamplingState.empty(ROWS + 1, vocab, torch.device("cpu"))
        self._needs = RowNeeds(ROWS + 1)

    def update(self, updates: Sequence[SamplingUpdate]) -> None:
        self._needs.replace(updates)
        self._state.apply(torch.from_numpy(pack_row_updates(updates, len(updates), ROWS, self._vocab)))
        for update in updates:
            if update.history is not None:
                self._state.set_occurrences(update.row, torch.from_numpy(count_history(update, self._vocab)))

    def sample(self, logits: np.ndarray, rows: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        row_ids, lengths = np.array(rows, np.int32), np.array(kv_lens, np.int32)
        tokens = torch_sample(
            torch.from_numpy(logits.astype(np.float32)),
            self._state,
            torch.from_numpy(row_ids).long(),
            torch.from_numpy(lengths),
            self._needs.of_step(decode_plan(row_ids, lengths)),
            self._sampler,
        )
        assert tokens.dtype == torch.int32
        return tokens.tolist()

    def count(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self._state.count(torch.tensor(rows), torch.tensor(tokens, dtype=torch.int32))

    def parameter(self, name: str) -> np.ndarray:
        values = self._state.__getattribute__(name).numpy()
        return values.view(np.uint32) if name == "seed" else values


def decode_plan(rows: np.ndarray, kv_lens: np.ndarray) -> StepPlan:
    """A step in which each of `rows` samples its next token."""
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        rows=rows,
        num_decode=len(rows),
        query_lens=np.ones(len(rows), np.int32),
        kv_lens=kv_lens,
        tokens=np.full(len(rows), LAST_TOKEN, np.int32),
        samples=np.ones(len(rows), np.bool_),
        page_deltas=(PageDeltas(nothing, nothing, nothing),),
    )


SAMPLERS = {
    "jax": Kind(JaxSampler),
    "torch": Kind(functools.partial(TorchSampler, NativeSampler())),
    "torch triton": Kind(functools.partial(TorchSampler, TritonSampler()), slow=True),
}

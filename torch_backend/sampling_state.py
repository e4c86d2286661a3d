"""State of the sampler for each row: parameters on the device, replaced as requests come and go, and flags on the host
of the work that each row needs, so that a step does no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch

from sglang_jax.runner.plan import SamplingUpdate, StepPlan
from sglang_jax.runner.row_updates import FIELDS, ONE_OUTPUT, FieldKind
from sglang_jax.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS


class Needs(IntFlag):
    """Parts of sampling; a step that needs none is greedy."""

    NOTHING = 0
    BIAS = 1
    STOP_MASK = 2
    PENALTIES = 4
    RANDOM = 8
    CUT = 16
    """Top-k or top-p, in addition to `RANDOM`."""

    @classmethod
    def everything(cls) -> Needs:
        return cls.BIAS | cls.STOP_MASK | cls.PENALTIES | cls.RANDOM | cls.CUT


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Sampling parameters of every row; see `SamplingParams`, and for their encoding `row_updates.FIELDS`.
    `occurrences`: int32 `[rows, vocab]`, twice the token's count in the output, plus one if the prompt contains it.
    Only kept up to date for rows with a penalty."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    repetition_penalty: torch.Tensor
    min_new_tokens: torch.Tensor
    prompt_len: torch.Tensor
    seed: torch.Tensor
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    occurrences: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> SamplingState:
        """Greedy rows without penalties, bias or mask."""

        def floats(value: float) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        def integers(value: int, *shape: int) -> torch.Tensor:
            return torch.full((rows, *shape), value, dtype=torch.int32, device=device)

        return cls(
            temperature=floats(0.0),
            top_k=integers(vocab_size),
            top_p=floats(1.0),
            min_p=floats(0.0),
            frequency_penalty=floats(0.0),
            presence_penalty=floats(0.0),
            repetition_penalty=floats(1.0),
            min_new_tokens=integers(0),
            prompt_len=integers(0),
            seed=integers(0, 2),
            stop_ids=integers(vocab_size, MAX_STOP_TOKEN_IDS),
            bias_ids=integers(vocab_size, MAX_LOGIT_BIAS),
            bias_values=torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.float32, device=device),
            occurrences=integers(0, vocab_size),
        )

    def apply(self, packed: torch.Tensor) -> None:
        """Replaces the parameters of the rows named in `packed` int32 `[updates, PACKED_ROW]` (`pack_row_updates`).
        Seeds stay int32 words with the same bits: torch supports few uint32 operations."""
        rows = packed[:, 0].long()
        for field in FIELDS:
            target: torch.Tensor = self.__getattribute__(field.name)
            words = packed[:, field.words].contiguous()
            values = words.view(torch.float32) if field.kind is FieldKind.FLOAT32 else words
            target.index_copy_(0, rows, values.reshape(-1, *target.shape[1:]))

    def set_occurrences(self, row: int, occurrences: torch.Tensor) -> None:
        self.occurrences[row] = occurrences

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts a sampled token, int32 `[n]`, negative for none, in each of `rows`, int64 `[n]`."""
        amounts = torch.where(tokens >= 0, ONE_OUTPUT, 0).to(torch.int32)
        self.occurrences.index_put_((rows, tokens.clamp(min=0).long()), amounts, accumulate=True)


class RowNeeds:
    """The parts of sampling that each row needs, on the host."""

    def __init__(self, rows: int) -> None:
        self._flags = np.zeros(rows, np.uint8)
        self._masked_until = np.zeros(rows, np.int64)
        """KV length from which stop ids are no longer masked."""

    def replace(self, updates: Sequence[SamplingUpdate]) -> None:
        for update in updates:
            sampling = update.sampling
            needs = Needs.NOTHING
            if sampling.temperature > 0:
                needs |= Needs.RANDOM
                if sampling.top_k != -1 or sampling.top_p < 1.0:
                    needs |= Needs.CUT
            if sampling.logit_bias:
                needs |= Needs.BIAS
            if sampling.counts_tokens:
                needs |= Needs.PENALTIES
            self._flags[update.row] = needs
            masks = sampling.min_new_tokens > 0 and len(update.stop_ids) > 0
            self._masked_until[update.row] = update.prompt_len + sampling.min_new_tokens if masks else 0

    def of_step(self, plan: StepPlan, max_samples: int = 1) -> Needs:
        """The parts that any sampling row of a step needs; `max_samples`: the runner's."""
        rows, kv_lens = plan.rows, plan.kv_lens
        if plan.length_on_device is not None:  # the plan has the maximum lengths
            kv_lens = kv_lens - plan.length_on_device * (max_samples - 1)
        if not plan.samples.all():
            rows, kv_lens = rows[plan.samples], kv_lens[plan.samples]
        needs = Needs(int(np.bitwise_or.reduce(self._flags[rows], initial=0)))
        if (kv_lens < self._masked_until[rows]).any():
            needs |= Needs.STOP_MASK
        return needs

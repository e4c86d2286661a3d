"""Sampling parameters of rows as one int32 array, so that new rows need one transfer. Both backends read this
layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import numpy as np

from sglang_jax.runner.plan import Int32, SamplingUpdate
from sglang_jax.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

IN_PROMPT = 1
"""Bit of an occurrence count: the prompt contains the token."""

ONE_OUTPUT = 2
"""The value that one output token adds to an occurrence count."""


class FieldKind(StrEnum):
    """The dtype whose bits the words of a field are."""

    INT32 = "int32"
    UINT32 = "uint32"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of a row, and its words in a packed row."""

    name: str
    kind: FieldKind
    words: slice


def _lay_out(*fields: tuple[str, FieldKind, int]) -> tuple[Field, ...]:
    """Places fields one after the other, after the row's number in word 0."""
    starts = accumulate((width for _, _, width in fields), initial=1)
    return tuple(
        Field(name, kind, slice(start, start + width))
        for (name, kind, width), start in zip(fields, starts, strict=False)
    )


FIELDS = _lay_out(
    ("temperature", FieldKind.FLOAT32, 1),
    ("top_p", FieldKind.FLOAT32, 1),
    ("min_p", FieldKind.FLOAT32, 1),
    ("frequency_penalty", FieldKind.FLOAT32, 1),
    ("presence_penalty", FieldKind.FLOAT32, 1),
    ("repetition_penalty", FieldKind.FLOAT32, 1),
    ("top_k", FieldKind.INT32, 1),
    ("min_new_tokens", FieldKind.INT32, 1),
    ("prompt_len", FieldKind.INT32, 1),
    ("seed", FieldKind.UINT32, 2),
    ("stop_ids", FieldKind.INT32, MAX_STOP_TOKEN_IDS),
    ("bias_ids", FieldKind.INT32, MAX_LOGIT_BIAS),
    ("bias_values", FieldKind.FLOAT32, MAX_LOGIT_BIAS),
)
"""Named as in `SamplingParams`. `top_k` is the vocabulary size if all tokens are kept; unused `stop_ids` and `bias_ids`
are the vocabulary size; `seed` has its low word first."""

PACKED_ROW = FIELDS[-1].words.stop
"""int32 words of one packed row update."""


def pack_row_updates(updates: Sequence[SamplingUpdate], size: int, pad_row: int, vocab_size: int) -> Int32:
    """Packs up to `size` updates into int32 `[size, PACKED_ROW]`, floats and seeds as their bits. Unused entries set
    row `pad_row` to greedy sampling. Raises `ValueError` if a request has more than `MAX_STOP_TOKEN_IDS` stop ids."""
    packed = np.zeros((size, PACKED_ROW), np.int32)
    packed[:, 0] = pad_row
    columns = {field.name: packed[:, field.words].view(field.kind.value) for field in FIELDS}
    for name in ("top_p", "repetition_penalty"):
        columns[name][:] = 1.0
    for name in ("top_k", "stop_ids", "bias_ids"):
        columns[name][:] = vocab_size
    for entry, update in enumerate(updates):
        packed[entry, 0] = update.row
        _fill({name: column[entry] for name, column in columns.items()}, update, vocab_size)
    return packed


def _fill(fields: dict[str, np.ndarray], update: SamplingUpdate, vocab_size: int) -> None:
    """Writes one update over the neutral values of `fields`, each `[its words]`."""
    sampling = update.sampling
    if len(update.stop_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"row {update.row} has {len(update.stop_ids)} stop ids, the sampler holds {MAX_STOP_TOKEN_IDS}"
        )
    fields["temperature"][:] = sampling.temperature
    fields["top_p"][:] = sampling.top_p
    fields["min_p"][:] = sampling.min_p
    fields["frequency_penalty"][:] = sampling.frequency_penalty
    fields["presence_penalty"][:] = sampling.presence_penalty
    fields["repetition_penalty"][:] = sampling.repetition_penalty
    fields["top_k"][:] = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    fields["min_new_tokens"][:] = sampling.min_new_tokens
    fields["prompt_len"][:] = update.prompt_len
    fields["seed"][:] = (update.seed & 0xFFFFFFFF, update.seed >> 32)
    fields["stop_ids"][: len(update.stop_ids)] = update.stop_ids
    if sampling.logit_bias:
        fields["bias_ids"][: len(sampling.logit_bias)] = tuple(sampling.logit_bias)
        fields["bias_values"][: len(sampling.logit_bias)] = tuple(sampling.logit_bias.values())


def count_history(update: SamplingUpdate, vocab_size: int) -> Int32:
    """Counts the request's tokens so far, int32 `[vocab]`: `ONE_OUTPUT` per occurrence in the output, plus `IN_PROMPT`
    if the prompt contains the token."""
    assert update.history is not None
    prompt, output = update.history[: update.prompt_len], update.history[update.prompt_len :]
    occurrences = np.bincount(output, minlength=vocab_size).astype(np.int32) * ONE_OUTPUT
    occurrences[prompt] += IN_PROMPT  # buffered: a repeated id adds once
    return occurrences

"""Packed row updates hold the options of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.runner.plan import SamplingUpdate
from sglang_jax.runner.row_updates import FIELDS, PACKED_ROW, FieldKind, count_history, pack_row_updates
from sglang_jax.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SEED_LIMIT, SamplingParams

VOCAB = 400
ROWS = 9
PAD_ROW = ROWS

TOKENS = st.integers(0, VOCAB - 1)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=st.just(-1) | st.integers(1, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True, width=32),
    min_p=st.floats(0, 1, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=st.floats(0, 10, exclude_min=True, width=32),
    min_new_tokens=st.integers(0, 128),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=5),
)
UPDATE = st.builds(
    SamplingUpdate,
    row=st.integers(0, ROWS - 1),
    sampling=SAMPLING,
    seed=st.integers(0, SEED_LIMIT - 1),
    prompt_len=st.integers(1, 2**31 - 1),
    stop_ids=st.lists(TOKENS, max_size=MAX_STOP_TOKEN_IDS, unique=True).map(lambda ids: np.array(ids, np.int32)),
    history=st.none(),
)

GREEDY = SamplingParams(temperature=0.0)


def unpacked(words: np.ndarray) -> dict[str, list[float]]:
    """The fields of one packed row, by name."""
    return {field.name: words[field.words].view(field.kind.value).tolist() for field in FIELDS}


def wanted(update: SamplingUpdate) -> dict[str, list[float]]:
    sampling, ids = update.sampling, update.stop_ids.tolist()
    top_k = VOCAB if sampling.top_k == -1 else min(sampling.top_k, VOCAB)
    bias = dict(sampling.logit_bias)
    unused = MAX_LOGIT_BIAS - len(bias)
    return {
        "temperature": [sampling.temperature],
        "top_p": [sampling.top_p],
        "min_p": [sampling.min_p],
        "frequency_penalty": [sampling.frequency_penalty],
        "presence_penalty": [sampling.presence_penalty],
        "repetition_penalty": [sampling.repetition_penalty],
        "top_k": [top_k],
        "min_new_tokens": [sampling.min_new_tokens],
        "prompt_len": [update.prompt_len],
        "seed": [update.seed % 2**32, update.seed // 2**32],
        "stop_ids": ids + [VOCAB] * (MAX_STOP_TOKEN_IDS - len(ids)),
        "bias_ids": [*bias, *[VOCAB] * unused],
        "bias_values": [*bias.values(), *[0.0] * unused],
    }


@settings(max_examples=100, deadline=None)
@given(updates=st.lists(UPDATE, max_size=4, unique_by=lambda update: update.row), padding=st.integers(0, 3))
def test_packed_fields_unpack_to_the_same_values(updates: list[SamplingUpdate], padding: int) -> None:
    packed = pack_row_updates(updates, len(updates) + padding, PAD_ROW, VOCAB)
    assert (packed.dtype, packed.shape) == (np.int32, (len(updates) + padding, PACKED_ROW))
    for words, update in zip(packed, updates, strict=False):
        assert words[0] == update.row
        assert unpacked(words) == wanted(update)
    for words in packed[len(updates) :]:
        assert words[0] == PAD_ROW
        assert unpacked(words) == wanted(SamplingUpdate(PAD_ROW, GREEDY, 0, 0, np.zeros(0, np.int32), None))


def test_the_fields_fill_the_row_without_gaps() -> None:
    words = [word for field in FIELDS for word in range(field.words.start, field.words.stop)]
    assert words == list(range(1, PACKED_ROW))
    assert {field.kind for field in FIELDS} == set(FieldKind)


def test_the_largest_number_of_biases_and_stop_ids_fits() -> None:
    bias = dict(zip(range(MAX_LOGIT_BIAS), np.linspace(-100, 100, MAX_LOGIT_BIAS, dtype=np.float32), strict=True))
    sampling = SamplingParams(temperature=0.0, logit_bias={token: float(value) for token, value in bias.items()})
    update = SamplingUpdate(3, sampling, SEED_LIMIT - 1, 1, np.arange(MAX_STOP_TOKEN_IDS, dtype=np.int32), None)
    (words,) = pack_row_updates([update], 1, PAD_ROW, VOCAB)
    assert unpacked(words) == wanted(update)


def test_too_many_stop_ids_are_refused() -> None:
    update = SamplingUpdate(0, GREEDY, 0, 1, np.arange(17, dtype=np.int32), None)
    with pytest.raises(ValueError, match="row 0 has 17 stop ids, the sampler holds 16"):
        pack_row_updates([update], 1, PAD_ROW, VOCAB)


def test_history_is_counted_separately_for_prompt_and_output() -> None:
    history = np.array([3, 3, 4, 5, 5, 4, 5], np.int32)
    counts = count_history(SamplingUpdate(1, GREEDY, 0, 3, np.zeros(0, np.int32), history), 8)
    # Twice the occurrences in the output (5, 5, 4, 5), plus one where the prompt (3, 3, 4) has the token.
    assert counts.tolist() == [0, 0, 0, 1, 3, 6, 0, 0]
    assert counts.dtype == np.int32

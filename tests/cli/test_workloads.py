"""Workloads have the requested lengths and shared prefixes, and are the same for the same seed."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from sglang_jax.cli.bench.workloads import (
    WORDS,
    Conversation,
    Dataset,
    WorkloadConfig,
    as_text,
    longest_context,
    make_workload,
)

VOCAB_SIZE = 1000
MADE = sorted(set(Dataset) - {Dataset.SHAREGPT})


@pytest.mark.parametrize("dataset", MADE)
def test_the_seed_decides_everything(dataset: Dataset) -> None:
    config = WorkloadConfig(dataset_name=dataset)
    assert make_workload(config, VOCAB_SIZE) == make_workload(config, VOCAB_SIZE)
    other = config.model_copy(update={"seed": 2})
    assert make_workload(config, VOCAB_SIZE) != make_workload(other, VOCAB_SIZE)


@pytest.mark.parametrize("dataset", MADE)
def test_ids_are_in_the_vocabulary(dataset: Dataset) -> None:
    ids = _all_ids(make_workload(WorkloadConfig(dataset_name=dataset), VOCAB_SIZE))
    assert min(ids) == 0
    assert max(ids) == VOCAB_SIZE - 1


def _all_ids(workload: list[Conversation]) -> list[int]:
    return [token for conversation in workload for turn in conversation.turns for token in turn.token_ids]


def test_random_ids_have_the_lengths_asked_for() -> None:
    config = WorkloadConfig(num_prompts=7, random_input_len=33, random_output_len=5)
    workload = make_workload(config, VOCAB_SIZE)
    assert len(workload) == 7
    assert {(len(c.turns), len(c.turns[0].token_ids), c.turns[0].output_len) for c in workload} == {(1, 33, 5)}
    assert longest_context(workload) == 38


def test_the_range_ratio_spreads_the_lengths() -> None:
    config = WorkloadConfig(num_prompts=400, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    turns = [conversation.turns[0] for conversation in make_workload(config, VOCAB_SIZE)]
    assert {len(turn.token_ids) for turn in turns} == set(range(10, 21))
    assert {turn.output_len for turn in turns} == set(range(5, 11))


def test_a_ratio_of_zero_still_gives_a_token() -> None:
    config = WorkloadConfig(num_prompts=200, random_input_len=3, random_output_len=3, random_range_ratio=0.0)
    turns = [conversation.turns[0] for conversation in make_workload(config, VOCAB_SIZE)]
    assert {len(turn.token_ids) for turn in turns} == {1, 2, 3}


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    config = WorkloadConfig(
        dataset_name=Dataset.SHARED_PREFIX,
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=50,
        gsp_question_len=10,
        gsp_output_len=6,
    )
    workload = make_workload(config, VOCAB_SIZE)
    turns = [conversation.turns[0] for conversation in workload]
    assert len(turns) == 12
    assert {(len(turn.token_ids), turn.output_len) for turn in turns} == {(60, 6)}
    groups = {prefix: list(members) for prefix, members in _by_prefix([turn.token_ids for turn in turns], 50)}
    assert sorted(len(members) for members in groups.values()) == [4, 4, 4]
    assert len({turn.token_ids for turn in turns}) == 12
    assert longest_context(workload) == 66


def _by_prefix(prompts: list[tuple[int, ...]], length: int) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    ordered = sorted(prompts)
    return [(key, list(members)) for key, members in itertools.groupby(ordered, key=lambda ids: ids[:length])]


def test_groups_come_mixed() -> None:
    workload = make_workload(WorkloadConfig(dataset_name=Dataset.SHARED_PREFIX), VOCAB_SIZE)
    first_ids = [conversation.turns[0].token_ids[:20] for conversation in workload]
    assert sum(earlier == later for earlier, later in itertools.pairwise(first_ids)) < len(first_ids) // 2


def test_conversations_have_the_requested_turns() -> None:
    config = WorkloadConfig(
        dataset_name=Dataset.MULTI_TURN,
        num_prompts=3,
        multi_turn_num_turns=5,
        random_input_len=8,
        random_output_len=2,
    )
    workload = make_workload(config, VOCAB_SIZE)
    assert [len(conversation.turns) for conversation in workload] == [5, 5, 5]
    assert {(len(t.token_ids), t.output_len) for c in workload for t in c.turns} == {(8, 2)}
    assert len({turn.token_ids for conversation in workload for turn in conversation.turns}) == 15
    assert longest_context(workload) == 50


@pytest.mark.parametrize(
    ("dataset", "field"),
    [
        ("random-ids", "gsp_question_len"),
        ("random-ids", "multi_turn_num_turns"),
        ("generated-shared-prefix", "num_prompts"),
        ("generated-shared-prefix", "random_output_len"),
        ("multi-turn", "gsp_num_groups"),
        ("multi-turn", "sharegpt_context_len"),
        ("random-ids", "dataset_path"),
    ],
)
def test_an_option_without_effect_is_refused(dataset: str, field: str) -> None:
    value = "file.json" if field == "dataset_path" else 2
    with pytest.raises(ValidationError, match=f"--{field.replace('_', '-')} is only for .*not for {dataset}"):
        WorkloadConfig.model_validate({"dataset_name": dataset, field: value})


def test_text_has_a_word_for_each_id() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert as_text([0, 1, len(WORDS)]) == f"{WORDS[0]} {WORDS[1]} {WORDS[0]}"
    assert as_text(range(10)).startswith(as_text(range(5)))

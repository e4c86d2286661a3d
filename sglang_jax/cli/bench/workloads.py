"""Workloads of a given shape, generated from a seed: lists of conversations. Prompts are token ids, so that their
lengths are exact; `as_text` converts them to words for routes that accept only text. For people's prompts see
`sharegpt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_jax.cli.options import flag_name
from sglang_jax.config import Choice, PositiveInt


class Dataset(Choice):
    RANDOM_IDS = "random-ids"
    SHARED_PREFIX = "generated-shared-prefix"
    MULTI_TURN = "multi-turn"
    SHAREGPT = "sharegpt"


@dataclass(frozen=True, slots=True)
class Turn:
    """A client's turn, and the number of output tokens to request. `text`: the text of the ids, if known."""

    token_ids: tuple[int, ...]
    output_len: int
    text: str | None = None

    def as_text(self) -> str:
        return as_text(self.token_ids) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are sent one after the other, each with all earlier turns and answers before it."""

    turns: tuple[Turn, ...]


class WorkloadConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset_name: Dataset = Field(
        Dataset.RANDOM_IDS,
        description="unrelated prompts, groups that share a system prompt, conversations, or the prompts of a "
        "ShareGPT file",
    )
    dataset_path: Path | None = Field(None, description="ShareGPT JSON file; nothing is downloaded")
    num_prompts: PositiveInt = Field(
        64, description="number of prompts (random-ids, sharegpt) or conversations (multi-turn)"
    )
    random_input_len: PositiveInt = Field(256, description="prompt tokens; multi-turn: per turn")
    random_output_len: PositiveInt = Field(64, description="output tokens; multi-turn: per turn")
    random_range_ratio: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="lengths vary uniformly from this fraction of the length up to the length; 1: all equal",
    )
    multi_turn_num_turns: PositiveInt = Field(4, description="turns per conversation")
    gsp_num_groups: PositiveInt = Field(8, description="number of system prompts (generated-shared-prefix)")
    gsp_prompts_per_group: PositiveInt = Field(8, description="prompts per system prompt")
    gsp_system_prompt_len: PositiveInt = Field(512, description="tokens per system prompt")
    gsp_question_len: PositiveInt = Field(64, description="tokens per prompt after the system prompt")
    gsp_output_len: PositiveInt = Field(64, description="output tokens per prompt")
    sharegpt_output_len: int | None = Field(
        None,
        ge=4,
        description="output tokens per prompt (sharegpt); default: the length of the file's answer",
    )
    sharegpt_context_len: PositiveInt | None = Field(
        None,
        description="skip ShareGPT prompts with more tokens, output included; default: 2048, and 1024 for the prompt "
        "itself",
    )
    seed: int = Field(1, ge=0, description="seed of the workload")

    @model_validator(mode="after")
    def _check_fields_belong(self) -> Self:
        """Refuses options that have no effect."""
        for field in sorted(self.model_fields_set):
            datasets = _datasets_of(field)
            if self.dataset_name not in datasets:
                names = " and ".join(datasets)
                raise ValueError(f"{flag_name(field)} is only for {names}, not for {self.dataset_name}")
        if self.dataset_name is Dataset.SHAREGPT and self.dataset_path is None:
            raise ValueError("--dataset-name sharegpt needs --dataset-path FILE, a ShareGPT file on this machine")
        return self


def _datasets_of(field: str) -> tuple[Dataset, ...]:
    if field.startswith("gsp_"):
        return (Dataset.SHARED_PREFIX,)
    if field.startswith("multi_turn_"):
        return (Dataset.MULTI_TURN,)
    if field.startswith(("sharegpt_", "dataset_path")):
        return (Dataset.SHAREGPT,)
    if field.startswith("random_"):
        return (Dataset.RANDOM_IDS, Dataset.MULTI_TURN)
    if field.startswith("num_"):
        return (Dataset.RANDOM_IDS, Dataset.MULTI_TURN, Dataset.SHAREGPT)
    return tuple(Dataset)


def longest_context(conversations: Sequence[Conversation]) -> int:
    """Returns the tokens of the longest request, including its output."""
    return max(sum(len(turn.token_ids) + turn.output_len for turn in each.turns) for each in conversations)


def make_workload(config: WorkloadConfig, vocab_size: int) -> list[Conversation]:
    """Generates conversations: always the same for a config and vocabulary. Ids are in `[0, vocab_size)`."""
    random = np.random.default_rng(config.seed)
    if config.dataset_name is Dataset.SHARED_PREFIX:
        return _shared_prefix(config, vocab_size, random)
    turns = config.multi_turn_num_turns if config.dataset_name is Dataset.MULTI_TURN else 1
    input_lens = _lengths(config.random_input_len, config.random_range_ratio, config.num_prompts * turns, random)
    output_lens = _lengths(config.random_output_len, config.random_range_ratio, config.num_prompts * turns, random)
    drawn = [
        Turn(_ids(int(input_len), vocab_size, random), int(output_len))
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]
    return [Conversation(tuple(drawn[start : start + turns])) for start in range(0, len(drawn), turns)]


def _shared_prefix(config: WorkloadConfig, vocab_size: int, random: np.random.Generator) -> list[Conversation]:
    """Returns the prompts of all groups in a random order: in the order of groups, they would hardly test the cache."""
    conversations = []
    for _ in range(config.gsp_num_groups):
        system_prompt = _ids(config.gsp_system_prompt_len, vocab_size, random)
        for _ in range(config.gsp_prompts_per_group):
            question = _ids(config.gsp_question_len, vocab_size, random)
            conversations.append(Conversation((Turn(system_prompt + question, config.gsp_output_len),)))
    return [conversations[i] for i in random.permutation(len(conversations))]


def _lengths(longest: int, ratio: float, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    shortest = max(1, int(longest * ratio))
    return random.integers(shortest, longest, size=count, endpoint=True)


def _ids(length: int, vocab_size: int, random: np.random.Generator) -> tuple[int, ...]:
    return tuple(random.integers(0, vocab_size, size=length).tolist())


# Common words: each is one token, with the space before it, in the vocabularies of most models.
_WORDS = """about after again air all also animal another answer any ask away back before between big book both boy call
change city close come country day different down each earth end even every eye face family father few find first follow
food form found four give good great group grow hand hard head help here high home house just keep kind know land large
last learn leave left letter life light line list little live long look made man many mean men might money most mother
move much music name near never new next night number off often old once only open order other our own page paper part
people place plant play point problem program public question read real right river room run same school second see set
she show side small some sound start state still story study such take talk tell thing think three time together town
tree turn under until use walk want water way week well white while why without word work world write year young"""

WORDS = tuple(_WORDS.split())


def as_text(token_ids: Sequence[int]) -> str:
    """Returns a word for each id, so that equal ids give equal text with about as many tokens."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)

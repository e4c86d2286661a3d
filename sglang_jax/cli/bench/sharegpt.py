"""Prompts written by people: a file in ShareGPT's format, which other engines' benchmarks also use, a list of
`{"conversations": [{"from": ..., "value": ...}, ...]}`. A conversation's first turn is the prompt; its second is a
recorded answer, whose length is the number of tokens to request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sglang_jax.cli.bench.workloads import Conversation, Turn, WorkloadConfig
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import ConfigError

MIN_TOKENS = 4
"""Prompts and answers with fewer tokens are skipped."""

MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048
"""Longer prompts (`MAX_PROMPT_TOKENS`), or with their answers (`MAX_TOKENS`), are skipped; see
`--sharegpt-context-len`."""

WHERE = (
    "nothing is downloaded automatically: download ShareGPT_V3_unfiltered_cleaned_split.json of the data set "
    "anon8231489123/ShareGPT_Vicuna_unfiltered from the Hugging Face hub, or use another file in that format"
)


class _Said(msgspec.Struct):
    value: str


class _Recorded(msgspec.Struct):
    conversations: list[_Said] = []
    conversation: list[_Said] = []


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    answer: str


def read_pairs(file: Path) -> list[Pair]:
    """Reads the first two turns of every conversation that has two. Raises `ConfigError` with the place of a fault."""
    try:
        content = json.loads(file.read_bytes())
        recorded = msgspec.convert(content, list[_Recorded])
    except FileNotFoundError as error:
        raise ConfigError(f"data set not found: {file}; {WHERE}") from error
    except OSError as error:
        raise ConfigError(f"--dataset-path {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(f"--dataset-path {file} is not in ShareGPT's format: {error}; {WHERE}") from error
    turns = [each.conversations or each.conversation for each in recorded]
    pairs = [Pair(_unicode(said[0].value), _unicode(said[1].value)) for said in turns if len(said) >= 2]
    if not pairs:
        raise ConfigError(f"--dataset-path {file} has no conversation with two turns")
    return pairs


def _unicode(text: str) -> str:
    """Replaces lone surrogates, which JSON may contain but tokenizers cannot read, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sample_pairs(
    config: WorkloadConfig, pairs: Sequence[Pair], tokenizer: TextTokenizer
) -> tuple[list[Conversation], str]:
    """Returns `num_prompts` of the pairs in a random order given by the seed, without those that are too short or long;
    and a note if there are fewer. Raises `ConfigError` if there are none."""
    taken: list[Conversation] = []
    short = long = 0
    for index in np.random.default_rng(config.seed).permutation(len(pairs)):
        if len(taken) == config.num_prompts:
            break
        ids = tokenizer.encode(pairs[index].prompt)
        answer = tokenizer.encode(pairs[index].answer, add_special_tokens=False)
        output_len = config.sharegpt_output_len or len(answer)
        if len(ids) < MIN_TOKENS or output_len < MIN_TOKENS:
            short += 1
        elif _too_long(config, len(ids), output_len):
            long += 1
        else:
            taken.append(Conversation((Turn(tuple(ids), output_len, pairs[index].prompt),)))
    left_out = f"{short} are too short and {long} too long"
    if not taken:
        raise ConfigError(f"--dataset-path {config.dataset_path} has no usable conversation: {left_out}")
    fewer = len(taken) < config.num_prompts
    note = f"{len(taken)} prompts instead of {config.num_prompts}: of {len(pairs)} conversations {left_out}"
    return taken, note if fewer else ""


def _too_long(config: WorkloadConfig, prompt: int, output: int) -> bool:
    if config.sharegpt_context_len is not None:
        return prompt + output > config.sharegpt_context_len
    return prompt > MAX_PROMPT_TOKENS or prompt + output > MAX_TOKENS

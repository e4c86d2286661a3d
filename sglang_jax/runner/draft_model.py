"""A second, smaller model that guesses what the main one samples: what both backends need of it.

Its layers are further layers of the model, with cache groups of their own (`PoolSpec.draft`): one more entry in every
list that follows from these groups, and nothing that scheduler or cache would have to know. Steps with chunks compute
it beside the model. Steps of decode rows do not; before one with drafts it computes what it has missed of each row that
has some (`DraftLag`), and then one guess after the other.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.resolve import resolve_tokenizer
from sglang_jax.checkpoint.token_table import load_token_table
from sglang_jax.config import EngineConfig, SpeculativeAlgorithm
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.drafts import Unfolded
from sglang_jax.runner.plan import Int32
from sglang_jax.runner.sizing import GroupMemory, Memory

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Tokens of a row that a guess begins with: the one that was sampled last, and the last guess before if all were right,
which nothing was computed from yet."""


def open_draft(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint that `speculative_draft_model_path` names, for the model of `checkpoint`; None without one.

    It knows as many positions as the model: what it guesses beyond its own is checked like any guess.

    **Raises:** `ConfigError` for one with another vocabulary, or whose layers keep a recurrent state, and where there
    is no path or no use for it; `CheckpointError` for one that cannot be read.
    """
    path, algorithm = config.speculative_draft_model_path, config.speculative_algorithm
    if algorithm is not SpeculativeAlgorithm.DRAFT:
        if path is not None:
            raise ConfigError(
                f"speculative_draft_model_path {path} has no effect with speculative_algorithm "
                f"{algorithm.value}: choose --speculative-algorithm draft, or remove the path"
            )
        return None
    if path is None:
        raise ConfigError("speculative_algorithm draft needs a draft model: give --speculative-draft-model-path")
    draft = open_checkpoint(path, config.load_format, seed=config.random_seed)
    model = draft.config
    if model.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"speculative_draft_model_path {path} has a vocabulary of {model.vocab_size} tokens, and model_path "
            f"{config.model_path} one of {checkpoint.config.vocab_size}: choose a draft model with the same vocabulary"
        )
    _refuse_other_tokens(config, checkpoint, draft)
    if model.keeps_states:
        raise ConfigError(
            f"speculative_draft_model_path {path} has layers with recurrent states, which wrong guesses would "
            "corrupt: choose a draft model with attention layers only"
        )
    longest = max(model.max_position, checkpoint.config.longest_context)
    return replace(draft, config=replace(model, max_position=longest))


def _refuse_other_tokens(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises `ConfigError` for the first token that stands for other bytes than the model's of the same number. Ids
    without a text, of which models have some at the end, are not compared."""
    own = checkpoint.tokenizer_source
    if config.tokenizer_path is not None:
        own = resolve_tokenizer(config.tokenizer_path, config.tokenizer_revision)
    try:
        tokens, guessed = load_token_table(own).tokens, load_token_table(draft.tokenizer_source).tokens
    except CheckpointError as error:
        logger.warning("The draft model's vocabulary was not compared with the main model's: %s", error)
        return
    if tokens == guessed:
        return
    for number, (mine, other) in enumerate(zip(tokens, guessed, strict=False)):
        if mine and other and mine != other:
            raise ConfigError(
                f"speculative_draft_model_path {config.speculative_draft_model_path}: token {number} is {other!r} "
                f"there, and {mine!r} for model_path {config.model_path}: choose a draft model with the same vocabulary"
            )


def with_draft(memory: Memory, weights: int, groups: tuple[GroupMemory, ...]) -> Memory:
    """What the device has to hold if a draft model is beside the model: the `weights`, in bytes, and the cache `groups`
    of the former are added."""
    own = [replace(group, name=f"draft {group.name}", draft=True) for group in groups]
    return replace(memory, weights=memory.weights + weights, groups=(*memory.groups, *own))


class DraftLag:
    """How many tokens of each row the draft model has not computed at most, as every rank finds it out by the plans.

    Which guesses were right only the device knows: these are bounds, and the device computes nothing twice.
    """

    def __init__(self, max_rows: int) -> None:
        self._behind: NDArray[np.intp] = np.zeros(max_rows, np.intp)

    def missed(self, unfolded: Unfolded) -> tuple[Int32, Int32]:
        """Rows with drafts of a plan that is about to run for which more is to be computed than a guess begins with,
        and of each how many tokens before these: `[rows]` both."""
        rows = unfolded.plan.rows[unfolded.guesses == 1]
        count = self._behind[rows] - AT_ONCE
        late = count > 0
        return rows[late], count[late].astype(np.int32)

    def launched(self, unfolded: Unfolded) -> None:
        """A plan runs."""
        plan, guesses = unfolded.plan, unfolded.guesses
        decoding, chunks = plan.rows[: plan.num_decode], plan.rows[plan.num_decode :]
        behind = self._behind[decoding]
        in_step = (behind <= 1) & (len(chunks) > 0)  # it was computed beside the model
        self._behind[decoding] = np.where(in_step, 1, behind + 1)
        self._behind[plan.rows[guesses > 0]] = AT_ONCE
        self._behind[chunks] = 1

"""The parts of a draft model, which drafts the samples of the main one, that both backends share.

Its layers are further layers of the model, with separate cache groups (`PoolSpec.draft`), which scheduler and cache
handle like any other. Steps with chunks compute it together with the model. Steps of decode rows do not; before one
with drafts, it computes the tokens that it has missed of each row with drafts (`DraftLag`), and then one draft after
the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.resolve import resolve_tokenizer
from sglang_jax.checkpoint.token_table import load_token_table
from sglang_jax.config import EngineConfig, SpeculativeAlgorithm, Task
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.drafts import FlatPlan
from sglang_jax.runner.plan import Int32
from sglang_jax.runner.sizing import GroupMemory, Memory

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Tokens of a row that its first draft computes: the token sampled last, and the last draft of the previous step, which
is not computed yet if all drafts were accepted."""


def open_draft(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint | None:
    """The draft model at `speculative_draft_model_path` for the model of `checkpoint`; None without one. It gets as
    many positions as the model, since drafts beyond its own are checked like any others. Raises `ConfigError` for a
    draft model with another vocabulary or with recurrent states, without a path, and for a path without effect;
    `CheckpointError` for one that cannot be read."""
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
    draft = open_checkpoint(path, config.load_format, seed=config.random_seed, task=Task.GENERATE)
    model = draft.config
    if model.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"speculative_draft_model_path {path} has a vocabulary of {model.vocab_size} tokens, and model_path "
            f"{config.model_path} one of {checkpoint.config.vocab_size}: choose a draft model with the same vocabulary"
        )
    _refuse_other_tokens(config, checkpoint, draft)
    if any(layer.num_experts % config.expert_parts for layer in model.layers):
        raise ConfigError(
            f"ep_size {config.expert_parts} does not divide the experts of the draft model {path}: choose one that "
            "divides those of both models"
        )
    if model.keeps_states:
        raise ConfigError(
            f"speculative_draft_model_path {path} has layers with recurrent states, which wrong drafts would "
            "corrupt: choose a draft model with attention layers only"
        )
    longest = max(model.max_position, checkpoint.config.longest_context)
    return replace(draft, config=replace(model, max_position=longest))


def _refuse_other_tokens(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises `ConfigError` for the first token id that has different bytes in both models. Ids without a text, which
    some models have at the end, are not compared."""
    own = checkpoint.tokenizer_source
    if config.tokenizer_path is not None:
        own = resolve_tokenizer(config.tokenizer_path, config.tokenizer_revision)
    try:
        tokens, others = load_token_table(own).tokens, load_token_table(draft.tokenizer_source).tokens
    except CheckpointError as error:
        logger.warning("The draft model's vocabulary was not compared with the main model's: %s", error)
        return
    if tokens == others:
        return
    for number, (mine, other) in enumerate(zip(tokens, others, strict=False)):
        if mine and other and mine != other:
            raise ConfigError(
                f"speculative_draft_model_path {config.speculative_draft_model_path}: token {number} is {other!r} "
                f"there, and {mine!r} for model_path {config.model_path}: choose a draft model with the same vocabulary"
            )


def with_draft(memory: Memory, weights: int, groups: tuple[GroupMemory, ...]) -> Memory:
    """`memory` with the `weights`, in bytes, and cache `groups` of a draft model."""
    own = [replace(group, name=f"draft {group.name}", draft=True) for group in groups]
    return replace(memory, weights=memory.weights + weights, groups=(*memory.groups, *own))


class DraftLag:
    """An upper bound of the tokens of each row that the draft model has not computed, which every rank derives from the
    plans. Only the device knows which drafts were accepted, and skips tokens that are computed already."""

    def __init__(self, max_rows: int) -> None:
        self._behind: NDArray[np.intp] = np.zeros(max_rows, np.intp)

    def missed(self, flat: FlatPlan) -> tuple[Int32, Int32]:
        """The rows with drafts of a plan to be run whose draft model is behind by more than `AT_ONCE` tokens, and by
        how many more: `[rows]` both."""
        rows = flat.plan.rows[flat.draft_numbers == 1]
        count = self._behind[rows] - AT_ONCE
        late = count > 0
        return rows[late], count[late].astype(np.int32)

    def launched(self, flat: FlatPlan) -> None:
        plan, draft_numbers = flat.plan, flat.draft_numbers
        decoding, chunks = plan.rows[: plan.num_decode], plan.rows[plan.num_decode :]
        behind = self._behind[decoding]
        in_step = (behind <= 1) & (len(chunks) > 0)  # the step with chunks computed it, too
        self._behind[decoding] = np.where(in_step, 1, behind + 1)
        self._behind[plan.rows[draft_numbers > 0]] = AT_ONCE
        self._behind[chunks] = 1


def in_parts(rows: Int32, counts: Int32, sizes: Sequence[int]) -> Iterator[tuple[int, Int32, Int32, Int32]]:
    """The parts in which to compute `counts` tokens that the draft model has missed of `rows`, `[n]` both, oldest
    first: a part's size, its rows, how many tokens before the end of each row it ends, and its tokens of each row. The
    size is the smallest of `sizes` that is enough for what is left, or the largest."""
    largest = sizes[-1]
    for start in range(0, len(rows), largest):
        own, left = rows[start : start + largest], counts[start : start + largest]
        while len(own):
            size = next((size for size in sizes if size >= left.sum()), largest)
            part = np.minimum(left, size // len(own))
            left = left - part
            yield size, own, AT_ONCE + left, part
            own, left = own[left > 0], left[left > 0]

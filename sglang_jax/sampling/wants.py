"""What a request wants of the engine for its prompt."""

from __future__ import annotations

import msgspec

from sglang_jax.errors import ParameterError

MAX_SCORED_TOKENS = 128
"""Maximum tokens in `TokenScores`."""


class Samples(msgspec.Struct, tag="samples", frozen=True):
    """Sampled tokens, up to `SamplingParams.max_new_tokens`, and logprobs if requested."""


class TokenScores(msgspec.Struct, tag="token_scores", frozen=True):
    """The logprobs of `token_ids`, at most `MAX_SCORED_TOKENS`, as the token after the prompt, under the raw logits;
    nothing is sampled."""

    token_ids: tuple[int, ...]


class PooledVector(msgspec.Struct, tag="pooled", frozen=True):
    """The vector of the prompt, or scores of its labels: see `architectures.pooling`."""


Wants = Samples | TokenScores | PooledVector

SAMPLES = Samples()
POOLED = PooledVector()


def check_wants(wants: Wants, *, pools: bool) -> None:
    """Raises `ParameterError` for what an engine does not give; `pools`: it gives vectors or scores of texts."""
    if pools and not isinstance(wants, PooledVector):
        raise ParameterError(
            "this model gives vectors or scores of texts, and generates none (--model-task)", param="model"
        )
    if not pools and isinstance(wants, PooledVector):
        raise ParameterError(
            "this model generates text and gives no vectors or labels: start the server with --model-task embed or "
            "classify",
            param="model",
        )

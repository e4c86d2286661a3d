"""What a model gives for a text instead of next tokens: one vector, or a score of each label."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pooling(StrEnum):
    """Which tokens' hidden states, after the final norm, make a text's vector: that of the last token, the mean of all,
    or that of the first (which has seen all others only if attention is not causal)."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens whose keys and values are cached must be computed, too."""
        return self is not Pooling.LAST


class Activation(StrEnum):
    """How the scores of labels become probabilities: over all labels, of each separately, or not at all."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierHead:
    """What a family's classifier computes from the vector of a text.

    - `pooling`: makes the vector. `bias`: whether a bias is added to the scores.
    - `dense`: the matrix of labels multiplies `tanh(dense(vector))`, not the vector.
    """

    pooling: Pooling = Pooling.LAST
    bias: bool = False
    dense: bool = False


OF_DECODERS = ClassifierHead()
"""The head of all decoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """- `labels`: names of the rows of a matrix by which the pooled vector is multiplied; empty if the vector is the
    result. `bias`, `dense`: of that product, see `ClassifierHead`.
    - `normalised`: vectors are divided by their length. `activation`: of scores."""

    pooling: Pooling
    labels: tuple[str, ...] = ()
    bias: bool = False
    dense: bool = False
    normalised: bool = True
    activation: Activation = Activation.SOFTMAX

    def width(self, hidden_size: int) -> int:
        """Numbers in a result: scores, or those of the vector."""
        return len(self.labels) or hidden_size

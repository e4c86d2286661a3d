"""Mixtures of experts (Shazeer et al. 2017): each token passes through a few of many feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.feed_forward import INTERMEDIATE, Activation, check_columns
from sglang_jax.architectures.kinds.part import HIDDEN, Declared, linear
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.errors import ConfigError

_EXPERTS = (Axis.EXPERTS,)
_ROUTED = (Axis.ROUTED,)
_COLUMNS = (Axis.EXPERT_INTERMEDIATE,)
_LATENT = (Axis.LATENT,)


class ExpertScores(StrEnum):
    """How the router's logits become scores of experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts, before some are chosen."""
    CHOSEN_SOFTMAX = "softmax of those chosen"
    """Softmax over the experts with the highest logits. Equal to `SOFTMAX`, renormalised."""
    SIGMOID = "sigmoid"
    """The sigmoid of each logit."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gated layer: `(up + 1) * gate * sigmoid(alpha * gate)`, with gates clamped to at most `limit`, and ups
    to [-limit, limit]."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A router, experts, and optionally a shared expert, which all tokens use.

    - `chosen`: experts per token: those with the highest scores, and of equal scores those with the lower number.
    - `size`: columns of each expert, a gated layer as in `FeedForwardConfig`; `clamped`: replaces its gate.
    - `renormalised`: the scores of the chosen experts are divided by their sum, to which `added_to_sum` is added: all
      sigmoids may be 0. `scale` multiplies them after that.
    - `scores_of_inputs`: scores multiply the inputs of experts, not their outputs; only for models in which a token
      chooses one expert.
    - `correction`: the checkpoint has a number per expert, which is added to its score for the choice only
      (DeepSeek-V3's load balancing without an auxiliary loss).
    - `groups`: experts are chosen from the best `chosen_groups` of `groups` groups, ranked by the sum of the best
      `best_of_group` scores of each.
    - `router_bias`, `bias`: whether the router, and the experts, have biases.
    - `shared_size`: columns of the shared expert; 0 without one. `shared_gate`: its output is multiplied by the sigmoid
      of a projection of the input.
    - `squared_relu`: experts and the shared expert are as in `UngatedConfig` with `relu2`.
    - `latent`: width of the experts' inputs and outputs, to which the layer's input is projected, and from which its
      output is; 0 if they are as wide as the residual stream. The router and the shared expert use the input itself.
    """

    num_experts: int
    chosen: int
    size: int
    activation: Activation = Activation.SILU
    clamped: ClampedGate | None = None
    scores: ExpertScores = ExpertScores.SOFTMAX
    renormalised: bool = False
    added_to_sum: float = 1e-20
    scale: float = 1.0
    scores_of_inputs: bool = False
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 2
    router_bias: bool = False
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    squared_relu: bool = False
    latent: int = 0

    def parameters(self, hidden: int) -> Iterator[Declared]:
        experts, inner, outer = (self.num_experts,), (self.size,), (hidden,)
        yield from linear(Part.ROUTER, (experts, outer), (_ROUTED, HIDDEN), self.router_bias)
        if self.correction:
            yield Declared(Part.ROUTER_CORRECTION, ParameterKind.BIAS, (_ROUTED,), (experts,))
        width, axis = outer, HIDDEN
        if self.latent:
            width, axis = (self.latent,), _LATENT
            yield from linear(Part.EXPERTS_INPUT, (width, outer), (axis, HIDDEN), False)
            yield from linear(Part.EXPERTS_OUTPUT, (outer, width), (HIDDEN, axis), False)
        for part in self.inner_parts:
            yield from _of_experts(part, (experts, inner, width), (_EXPERTS, _COLUMNS, axis), self.bias)
        yield from _of_experts(Part.EXPERT_DOWN, (experts, width, inner), (_EXPERTS, axis, _COLUMNS), self.bias)
        if self.shared_size:
            inner = (self.shared_size,)
            for part in self.shared_parts:
                yield from linear(part, (inner, outer), (INTERMEDIATE, HIDDEN), False)
            yield from linear(Part.SHARED_DOWN, (outer, inner), (HIDDEN, INTERMEDIATE), False)
        if self.shared_gate:
            yield from linear(Part.SHARED_ROUTER, ((1,), outer), ((Axis.ONE,), HIDDEN), False)

    @property
    def inner_parts(self) -> tuple[Part, ...]:
        """The matrices that read the input of an expert."""
        return (Part.EXPERT_UP,) if self.squared_relu else (Part.EXPERT_GATE, Part.EXPERT_UP)

    @property
    def shared_parts(self) -> tuple[Part, ...]:
        """The matrices that read the input of the shared expert."""
        return (Part.SHARED_UP,) if self.squared_relu else (Part.SHARED_GATE, Part.SHARED_UP)

    def sharded(self, over: Parallelism) -> ExpertsConfig:
        """See `LayerPart`. Each device has a part of the columns of some experts."""
        if self.num_experts % over.experts:
            raise ConfigError(
                f"{self.num_experts} experts cannot be spread over {over.experts} devices: choose an ep_size that "
                "divides them"
            )
        if self.size % over.devices_of_expert:
            raise ConfigError(
                f"the {self.size} columns of an expert cannot be spread over {over.devices_of_expert} devices: choose "
                "a tp_size that divides them, or a larger ep_size, for fewer devices of an expert"
            )
        check_columns(self.shared_size, over.devices)
        return self

    @property
    def share_computed(self) -> float:
        """The fraction of the experts' weights that one token is multiplied by."""
        return self.chosen / self.num_experts

    def share_read(self, tokens: int) -> float:
        """The expected fraction of experts that at least one of `tokens` chooses, if all are equally likely."""
        return 1 - (1 - self.share_computed) ** tokens

    def with_biases(self, has: Callable[[Part], bool]) -> ExpertsConfig:
        """The same part with biases if the checkpoint has them. `has`: whether it has the bias of a part."""
        return replace(self, bias=has(Part.EXPERT_UP), router_bias=has(Part.ROUTER))


def _of_experts(
    part: Part, sizes: tuple[tuple[int, ...], ...], axes: tuple[tuple[Axis, ...], ...], bias: bool
) -> Iterator[Declared]:
    yield Declared(part, ParameterKind.WEIGHT, axes, sizes)
    if bias:
        yield Declared(part, ParameterKind.BIAS, axes[:2], sizes[:2])

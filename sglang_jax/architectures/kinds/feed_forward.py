"""Feed-forward parts, which transform each token separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.part import HIDDEN, Declared, linear
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.errors import ConfigError

INTERMEDIATE = (Axis.INTERMEDIATE,)


class Activation(StrEnum):
    """The nonlinearity of a gated feed-forward layer, named as in `hidden_act` of HF configs."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class UngatedActivation(StrEnum):
    """The nonlinearity of a feed-forward layer without a gate, named as in `hidden_act` of HF configs."""

    SQUARED_RELU = "relu2"
    """The square of `relu` (So et al. 2021, "Primer")."""
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020). `gate_multiplier` multiplies `gate(x)`, and
    `output_multiplier` the result."""

    size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def parameters(self, hidden: int) -> Iterator[Declared]:
        inner, outer = (self.size,), (hidden,)
        for part, by in ((Part.GATE, self.gate_multiplier), (Part.UP, 1.0)):
            yield from linear(part, (inner, outer), (INTERMEDIATE, HIDDEN), self.bias, output_scale=by)
        by = self.output_multiplier
        yield from linear(Part.DOWN, (outer, inner), (HIDDEN, INTERMEDIATE), self.bias, output_scale=by)

    def with_biases(self, has: Callable[[Part], bool]) -> FeedForwardConfig:
        return replace(self, bias=has(Part.UP))

    def sharded(self, over: Parallelism) -> FeedForwardConfig:
        check_columns(self.size, over.devices)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class UngatedConfig:
    """`down(activation(up(x)))`, without a gate (Vaswani et al. 2017)."""

    size: int
    activation: UngatedActivation = UngatedActivation.SQUARED_RELU
    bias: bool = False

    def parameters(self, hidden: int) -> Iterator[Declared]:
        inner, outer = (self.size,), (hidden,)
        yield from linear(Part.UP, (inner, outer), (INTERMEDIATE, HIDDEN), self.bias)
        yield from linear(Part.DOWN, (outer, inner), (HIDDEN, INTERMEDIATE), self.bias)

    def with_biases(self, has: Callable[[Part], bool]) -> UngatedConfig:
        return replace(self, bias=has(Part.UP))

    def sharded(self, over: Parallelism) -> UngatedConfig:
        check_columns(self.size, over.devices)
        return self


def check_columns(columns: int, size: int) -> None:
    """Raises `ConfigError` unless `size` divides `columns`."""
    if columns % size:
        raise ConfigError(
            f"the intermediate size {columns} cannot be spread over {size} devices: choose a tp_size that divides it"
        )

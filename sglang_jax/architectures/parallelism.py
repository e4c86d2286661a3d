"""Into how many parts a model is divided among devices."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_jax.architectures.axes import Axis
from sglang_jax.config import EngineConfig

_OVER_DEVICES = frozenset(
    {
        Axis.VOCABULARY,
        Axis.HEADS,
        Axis.KV_HEADS,
        Axis.INTERMEDIATE,
        Axis.CHANNELS,
        Axis.STATE_HEADS,
        Axis.SHARDED_IN_BLOCKS,
    }
)
_OF_ATTENTION = frozenset({Axis.HEADS, Axis.KV_HEADS})
_OF_EXPERTS = frozenset({Axis.EXPERT_INTERMEDIATE, Axis.EXPERT_IN_BLOCKS})


@dataclass(frozen=True, slots=True)
class Parallelism:
    """`devices` share each layer: each has whole heads, and a part of the columns of feed-forward layers (tensor
    parallelism: Shoeybi et al. 2019).

    Experts are divided into `experts` parts (expert parallelism: Lepikhin et al. 2020), a divisor of `devices`. Device
    n has part n % `experts`, and shares the columns of these experts with the other devices that have it: its columns
    are part n // `experts`.

    `whole_heads`: attention is not divided by heads, but each device computes that of separate rows.
    """

    devices: int = 1
    experts: int = 1
    whole_heads: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Parallelism:
        return cls(config.tp_size, config.expert_parts, config.enable_dp_attention)

    @property
    def devices_of_expert(self) -> int:
        """The number of devices that share the columns of an expert."""
        return self.devices // self.experts

    def parts(self, axis: Axis) -> int:
        """The number of parts into which an axis of weights or caches is divided; 1 for one that every device has
        whole. KV heads that are fewer than devices count as one for each device, since they are copied."""
        if axis is Axis.EXPERTS:
            return self.experts
        if axis in _OF_EXPERTS:
            return self.devices_of_expert
        return self.devices if self._divides(axis) else 1

    def place(self, axis: Axis, device: int) -> int:
        """Which part of an axis a device has."""
        if axis is Axis.EXPERTS:
            return device % self.experts
        if axis in _OF_EXPERTS:
            return device // self.experts
        return device if self._divides(axis) else 0

    def _divides(self, axis: Axis) -> bool:
        return axis in _OVER_DEVICES and not (self.whole_heads and axis in _OF_ATTENTION)


ONE_DEVICE = Parallelism()

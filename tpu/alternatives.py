"""What to ask for where a model leaves no room on a slice."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_jax.architectures.model_config import ModelConfig
from tpu.choices import can_be_spread, memory_fraction, weight_bytes
from tpu.topologies import GIB, Topology

_MOST_CHIPS = 256
_SHARE_OF_WEIGHTS = 0.9
"""Of the memory for weights and KV: with more weights there is hardly a token beside them."""


def what_would_fit(model: ModelConfig, topology: Topology, tp: int) -> str | None:
    """The first step up whose weights, in bfloat16, leave room: more devices of this slice, or a larger slice."""
    usable = topology.chip.hbm * memory_fraction(topology.chip) * _SHARE_OF_WEIGHTS
    for slice_ in (topology, *_larger(topology)):
        for size in range(tp + 1, slice_.devices + 1):
            weights = weight_bytes(model) // size
            if slice_.devices % size == 0 and weights < usable and can_be_spread(model, size):
                where = "" if slice_ is topology else f" --topology {slice_}"
                return f"--tp {size}{where} ({weights / GIB:.1f} GiB of weights on each device)"
    return None


def _larger(topology: Topology) -> Iterator[Topology]:
    """Slices of the chip, each with the next more chips: those of one node, then with the shortest axis doubled."""
    chip, shape = topology.chip, topology.shape
    for of_one_node in chip.one_node:
        if Topology(chip, of_one_node).chips > topology.chips:
            shape = of_one_node
            yield Topology(chip, shape)
    while Topology(chip, shape).chips < _MOST_CHIPS:
        axis = shape.index(min(shape))
        shape = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        yield Topology(chip, shape)

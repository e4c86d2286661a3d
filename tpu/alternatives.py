"""Alternatives to options with which a model does not fit on a slice."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_jax.architectures.kinds.part import CachedArray
from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.config import Deterministic, EngineConfig, KVCacheDtype
from tpu.choices import bytes_per_weight, memory_fraction, parts_of_experts, weight_bytes
from tpu.topologies import GIB, Topology

_MAX_CHIPS = 256
_SHARE_OF_WEIGHTS = 0.9
"""Maximum share of weights in the memory for weights and KV: with more, there is hardly room for a token."""
_LANES = 128
_MIN_TOKENS = 512
"""Minimum tokens of the KV cache: see `runner.sizing`."""
_EXCEEDED = re.compile(r"Exceeded hbm capacity by (?P<size>[\d.]+)(?P<unit>[KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a slice with the options of the server. `encodings`: of quantised matrices."""

    model: ModelConfig
    topology: Topology
    options: EngineConfig
    encodings: Mapping[ParameterName, Encoding] = field(default_factory=dict)

    @property
    def over(self) -> Parallelism:
        return Parallelism.of(self.options)

    def weights(self, over: Parallelism) -> int:
        """Bytes of the weights on each device."""
        width, in_shards = bytes_per_weight(self.options.dtype), self.options.deterministic is Deterministic.TP
        return weight_bytes(self.model, over, width, self.encodings.get, in_shards=in_shards)

    def kv_token(self, size: int, *, narrow: bool = False) -> int:
        """Bytes of a token's keys and values, or latents, on each of `size` devices, in whole lanes; `narrow`: in 8
        bits."""
        whole = self.options.kv_cache_dtype is KVCacheDtype.AUTO and not narrow
        width = bytes_per_weight(self.options.dtype) if whole else 1
        return sum(width * _lanes_of(layer.cached, size) for layer in self.model.attention)

    @property
    def tokens(self) -> int:
        return self.options.max_total_tokens or _MIN_TOKENS


def suggest_fitting(setup: Setup) -> str | None:
    """Options that would fit: keys and values in 8 bits if that suffices; whole experts on each device; or the next
    larger number of devices of this slice, or slice, on which there is room."""
    topology, options = setup.topology, setup.options
    tp = options.tp_size
    limit = topology.chip.hbm * (1 if options.max_total_tokens else options.mem_fraction_static)
    wide, narrow = (
        setup.weights(setup.over) + setup.tokens * setup.kv_token(tp, narrow=narrow) for narrow in (False, True)
    )
    helps = narrow < limit <= wide and not setup.model.keeps_latents
    found = [f"--kv-cache-dtype {KVCacheDtype.FLOAT8_E4M3.value}"] if helps else []
    return " or ".join([*found, *_more_devices(setup)]) or None


def suggest_remedies(setup: Setup, shortage: int) -> str | None:
    """Options that would help if weights and KV fit, but `shortage` bytes are missing: less KV, or more devices."""
    options, hbm = setup.options, setup.topology.chip.hbm
    fraction = math.floor(100 * (options.mem_fraction_static - shortage / hbm)) / 100
    least = setup.weights(setup.over) + _MIN_TOKENS * setup.kv_token(options.tp_size)
    found = []
    if options.max_total_tokens is None and fraction * hbm > least:
        found.append(f"--mem-fraction-static {fraction:g}")
    return " or ".join([*found, *_more_devices(setup)]) or None


def shortage_in(reason: str) -> int | None:
    """Bytes of HBM that a program lacks, by the compiler's message; None if it is about something else."""
    found = _EXCEEDED.search(reason)
    return None if found is None else int(float(found["size"]) * _UNITS[found["unit"]])


def _more_devices(setup: Setup) -> list[str]:
    topology, tp = setup.topology, setup.options.tp_size
    usable = topology.chip.hbm * memory_fraction(topology.chip)
    for slice_ in (topology, *_larger(topology)):
        for size in range(tp, slice_.devices + 1):
            if slice_.devices % size:
                continue
            for parts in parts_of_experts(setup.model, size):
                if (size, parts) <= (tp, setup.over.experts):
                    continue
                weights = setup.weights(Parallelism(size, parts, setup.over.whole_heads))
                if weights < usable * _SHARE_OF_WEIGHTS and weights + setup.tokens * setup.kv_token(size) < usable:
                    experts = "" if parts == 1 else f" --ep-size {parts}"
                    where = "" if slice_ is topology else f" --topology {slice_}"
                    return [f"--tp {size}{experts}{where} ({weights / GIB:.1f} GiB of weights on each device)"]
    return []


def _lanes_of(arrays: Sequence[CachedArray], size: int) -> int:
    """Numbers of a token in pages for TPUs: see `kernels.kv_storage`."""
    first = arrays[0]
    heads = first.numbers(size) // first.width
    if len(arrays) * first.width <= _LANES:
        return heads * _LANES
    return heads * len(arrays) * -(-first.width // _LANES) * _LANES


def _larger(topology: Topology) -> Iterator[Topology]:
    """Slices of the chip with more chips, in ascending order: those of one node, then with the shortest axis doubled,
    and the axes in the order of Google's names, the longest last."""
    chip, shape = topology.chip, topology.shape
    for of_one_node in chip.one_node:
        if Topology(chip, of_one_node).chips > topology.chips:
            shape = of_one_node
            yield Topology(chip, shape)
    while Topology(chip, shape).chips < _MAX_CHIPS:
        axis = shape.index(min(shape))
        shape = tuple(sorted((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])))
        yield Topology(chip, shape)

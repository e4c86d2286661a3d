"""Default options of the server for a TPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

import jax.numpy as jnp

from sglang_jax.architectures.manifest import ParameterName, ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import ONE_DEVICE, Parallelism
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.group_blocks import GroupType, groups_of
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.config import Dtype, WeightQuantization
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.kernels.expert_groups_pallas import LEAST_ROWS, folds_of
from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.layers.grouped_matrix import levels_in_memory
from sglang_jax.runner.quantization import encodings_by_option
from tpu.machine import Machine
from tpu.topologies import GIB, Chip

WHOLE_EXPERTS: Final = "all"

PAGE_SIZE = 64
"""Tokens of a KV page: whole tiles of every storage dtype, and few copies for a block of keys."""

MEETING_PORT = 8482
"""Port on node 0 where the nodes of a slice meet: JAX's own default."""

_SMALL_HBM = 20 * GIB

_FLOAT32 = frozenset({Part.ROUTER, Part.SHARED_ROUTER})
_WIDENED = frozenset({Part.EMBEDDING, Part.KEY_UP, Part.VALUE_UP})
"""Matrices that are looked up, or by which latent attention multiplies queries, are in the dtype of activations."""

_ABOUT_THE_LEAST = 1.05
"""Weights may take this many times the least memory, for fewer parts of the experts."""

_BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of the server, and the reasons for them. `replicas`: of the whole slice; `ep`: parts of the experts."""

    tp: int
    replicas: int
    page_size: int
    mem_fraction_static: float
    reasons: tuple[str, ...]
    ep: int = 1


def choose(
    machine: Machine,
    model: ModelConfig,
    *,
    tp: int | None = None,
    ep: int | Literal["all"] | None = None,
    replicas: int = 1,
    dtype: Dtype = Dtype.AUTO,
    quantization: WeightQuantization = WeightQuantization.AUTO,
    encodings: Encodings | None = None,
) -> Choices:
    """Chooses options for a model on a slice; `tp`: devices of each of `replicas`, and `ep`: parts of the experts, if
    given (`WHOLE_EXPERTS`: as many as devices). Otherwise as few parts as keep weights small: parts of columns may cut
    groups, which are widened then. `encodings`: of the checkpoint's matrices; by default they are plain, or as
    `quantization` makes them.

    Raises `ConfigError` if the slice cannot be divided, the model cannot be sharded, or its weights do not fit."""
    topology = machine.topology
    devices = devices_of_a_replica(machine, replicas)
    fraction = memory_fraction(topology.chip)
    chosen = tp or _largest_tp(model, devices)
    if chosen > devices:
        raise ConfigError(f"--tp-size {chosen} is more than the {devices} devices of each of {replicas} replicas")
    nodes = max(len(machine.nodes), 1)
    if replicas < nodes and chosen != devices:
        raise ConfigError(
            f"{topology} has {nodes} nodes and {devices} devices, which one replica must use completely, but the "
            f"model can use {chosen}: choose a smaller slice, or --dp-size {nodes}, one replica per node"
        )
    if encodings is None:
        encodings = encodings_by_option(model, quantization)
    usable = int(topology.chip.hbm * fraction)
    sizes = {
        parts: weight_bytes(model, Parallelism(chosen, parts), bytes_per_weight(dtype), encodings)
        for parts in _parts_wanted(model, chosen, ep)
    }
    found = min(parts for parts, size in sizes.items() if size <= _ABOUT_THE_LEAST * min(sizes.values()))
    weights = sizes[found]
    if weights >= usable:
        raise ConfigError(
            f"{weights / GIB:.1f} GiB of weights on each of {chosen} devices do not fit in {usable / GIB:.1f} GiB of "
            f"{topology}: choose a larger slice" + ("" if replicas == 1 else ", or fewer replicas with --dp-size")
        )
    return Choices(
        tp=chosen,
        ep=found,
        replicas=replicas,
        page_size=PAGE_SIZE,
        mem_fraction_static=fraction,
        reasons=(
            f"tp {chosen}: " + ("as given" if tp else f"the most of {devices} devices that the model can use"),
            *(
                []
                if found == 1
                else [
                    f"ep {found}: " + ("as given" if ep else "the fewest parts of experts with which weights are small")
                ]
            ),
            f"page size {PAGE_SIZE}: fills whole memory tiles",
            f"mem-fraction-static {fraction:g}: {weights / GIB:.1f} GiB of weights and up to "
            f"{(usable - weights) / GIB:.1f} GiB of KV pages on each device of {topology.chip.hbm / GIB:.1f} GiB",
        ),
    )


def _parts_wanted(model: ModelConfig, devices: int, ep: int | Literal["all"] | None) -> list[int]:
    if ep is None:
        return parts_of_experts(model, devices)
    parts = devices if ep == WHOLE_EXPERTS else ep
    if parts > 1 and not any(layer.num_experts for layer in model.layers):
        raise ConfigError(
            f"--ep-size {parts} needs a model with experts, got one of {model.architecture} without any: remove the "
            "option"
        )
    if devices % parts:
        raise ConfigError(f"--ep-size must divide the {devices} devices of a replica, got {parts}")
    return [parts]


def devices_of_a_replica(machine: Machine, replicas: int) -> int:
    """Devices of each replica. On several nodes, one replica has all of them, or each has a part of a node. Raises
    `ConfigError` if they cannot be divided this way."""
    topology, nodes = machine.topology, max(len(machine.nodes), 1)
    if replicas > 1 and replicas % nodes:
        raise ConfigError(
            f"{topology} has {nodes} nodes, and each replica runs on one of them: --dp-size must be a multiple of "
            f"{nodes}, got {replicas}"
        )
    if topology.devices % replicas:
        raise ConfigError(
            f"the {topology.devices} devices of {topology} cannot be divided among {replicas} replicas (--dp-size)"
        )
    devices = topology.devices // replicas
    if devices < topology.chip.devices:
        raise ConfigError(
            f"each of {replicas} replicas on {topology} would have {devices} of the {topology.chip.devices} devices of "
            f"a chip, and only whole chips can be divided: --dp-size may be at most {topology.chips}, got {replicas}"
        )
    return devices


def memory_fraction(chip: Chip) -> float:
    """Share of HBM for weights and KV. The rest, for a step, depends little on the size of the memory."""
    return 0.85 if chip.hbm < _SMALL_HBM else 0.9


def bytes_per_weight(dtype: Dtype) -> int:
    """On a TPU `auto` is bfloat16."""
    return 4 if dtype is Dtype.FLOAT32 else 2


def weight_bytes(
    model: ModelConfig,
    over: Parallelism = ONE_DEVICE,
    width: int = 2,
    encodings: Encodings = all_plain,
    *,
    in_shards: bool = False,
) -> int:
    """Bytes of the matrices on each device of `over`, at `width` bytes per number unless `encodings` say otherwise;
    norms and biases are negligible. Matrices without heads or columns to shard, such as routers and projections to
    latent vectors, are whole on every device. Of layers computed `in_shards`, matrices in groups are widened. Raises
    `ConfigError` if the model cannot be sharded over this many devices."""
    specs = manifest_of(TensorParallel.of(model, over).config).specs.values()
    tied = model.tie_word_embeddings
    matrices = (spec for spec in specs if spec.is_matrix and not (tied and spec.name.part is Part.HEAD))

    def encoding_of(name: ParameterName) -> Encoding | None:
        found = encodings(name)
        return None if in_shards and found is not None and groups_of(found.values) is not None else found

    return sum(_bytes_of_matrix(spec, over, width, encoding_of(spec.name)) for spec in matrices)


def _bytes_of_matrix(spec: ParameterSpec, over: Parallelism, width: int, encoding: Encoding | None) -> int:
    rows, numbers = math.prod(spec.shape[:-1]), math.prod(spec.shape)
    of_rows, of_all = (math.prod(map(over.parts, chain(*axes))) for axes in (spec.axes[:-1], spec.axes))
    if spec.name.part in _FLOAT32:
        return 4 * numbers // of_all
    kind = None if encoding is None else groups_of(encoding.values)
    widened = encoding is None or (isinstance(encoding.values, BlockType) and kind is None)
    if widened or spec.name.part in _WIDENED:
        return width * numbers // of_all
    if kind is not None and spec.places:
        return _bytes_of_experts(spec, kind, over, width)
    if kind is not None:
        of_inputs = math.prod(map(over.parts, spec.axes[-1]))
        return _bytes_in_groups(spec, kind, of_inputs, width) // of_all
    return numbers // of_all + 4 * rows // of_rows


def _bytes_in_groups(spec: ParameterSpec, kind: GroupType, of_inputs: int, width: int) -> int:
    """Bytes of a whole matrix in groups, each with a scale in bfloat16; in smaller groups where one of `of_inputs`
    devices would have a part of a group; widened for other dtypes than bfloat16, and where no groups divide a part."""
    numbers, own = math.prod(spec.shape), kind.for_inputs(spec.shape[-1] // of_inputs)
    if width != _BFLOAT16_BYTES or spec.shape[-1] % of_inputs or own is None:
        return width * numbers
    return numbers * _bits(kind) // 8 + numbers // own.weights * (_BFLOAT16_BYTES + kind.zeros)


def _bytes_of_experts(spec: ParameterSpec, kind: GroupType, over: Parallelism, width: int) -> int:
    """Bytes on each device of a matrix of experts, with whole experts or parts of their columns. In groups if some
    divide a device's inputs of all three matrices; few outputs are then folded, and outputs and groups filled up: see
    `expert_groups_pallas`."""
    experts, rows, inputs = (
        length // math.prod(map(over.parts, axes)) for length, axes in zip(spec.shape, spec.axes, strict=True)
    )
    own = kind.for_inputs(inputs)
    if width != _BFLOAT16_BYTES or own is None or kind.for_inputs(rows) is None:
        return width * experts * rows * inputs
    groups = inputs // own.weights
    folds = folds_of(groups, rows)
    outputs = -(-rows * folds // LANES) * LANES
    scales = -(-groups // folds // LEAST_ROWS) * LEAST_ROWS
    return experts * outputs * (inputs // folds * _bits(kind) // 8 + scales * (_BFLOAT16_BYTES + kind.zeros))


def _bits(kind: GroupType) -> int:
    """Bits of a level in memory."""
    return 4 if levels_in_memory(kind) == jnp.int4 else 8


def _largest_tp(model: ModelConfig, devices: int) -> int:
    """The largest number of devices that divides all devices and over which the model can be sharded."""
    return next(size for size in range(devices, 0, -1) if devices % size == 0 and parts_of_experts(model, size))


def parts_of_experts(model: ModelConfig, devices: int) -> list[int]:
    """The numbers of parts of experts with which a model can be spread over devices, in ascending order; empty if it
    cannot be. 1 for a model without experts."""
    parts = range(1, devices + 1) if any(layer.num_experts for layer in model.layers) else (1,)
    return [each for each in parts if devices % each == 0 and _can_be_spread(model, Parallelism(devices, each))]


def _can_be_spread(model: ModelConfig, over: Parallelism) -> bool:
    try:
        TensorParallel.of(model, over)
    except ConfigError:
        return False
    return True

"""Sizes of the blocks that the kernels work in, by chip and shape.

`DECODE_BLOCKS` and `PREFILL_BLOCKS` hold sizes that were chosen with a device or with the compiler's schedule
(benchmarks/tpu_kernel_estimate.py). What is not there gets sizes from a model of the costs, and a warning, once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import jax

from sglang_jax.kernels.ragged_paged_attention.pallas.decode import DecodeBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks

logger = logging.getLogger(__name__)

MIB = 1 << 20


class Chip(StrEnum):
    """TPU generations; `INTERPRETER` is none, where kernels run for tests."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    TPU7X = "tpu7x"
    INTERPRETER = "interpreter"


_CHIPS = {
    "TPU v4": Chip.V4,
    "TPU v5 lite": Chip.V5E,
    "TPU v5e": Chip.V5E,
    "TPU v5": Chip.V5P,
    "TPU v5p": Chip.V5P,
    "TPU v6 lite": Chip.V6E,
    "TPU v6e": Chip.V6E,
    "TPU7": Chip.TPU7X,
    "TPU7x": Chip.TPU7X,
    "cpu": Chip.INTERPRETER,
}
"""By the device kinds that JAX reports."""

VMEM_LIMITS = {
    Chip.V4: 14 * MIB,
    Chip.V5E: 96 * MIB,
    Chip.V5P: 48 * MIB,
    Chip.V6E: 96 * MIB,
    Chip.TPU7X: 48 * MIB,
    Chip.INTERPRETER: 96 * MIB,
}
"""What a kernel may take: three quarters of a chip's 16, 128 or 64 MiB, the rest being XLA's."""


def current_chip() -> Chip:
    """The chip that is compiled for: that of the mesh in use, or of the default device.

    **Raises:** `NotImplementedError` for a kind of device that the kernels were not made for.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    kind = described.device_kind if described is not None else jax.devices()[0].device_kind
    if kind not in _CHIPS:
        raise NotImplementedError(f"the Pallas kernels know {', '.join(_CHIPS)}, not {kind!r}; use 'xla'")
    return _CHIPS[kind]


@dataclass(frozen=True, slots=True)
class Shape:
    """What block sizes depend on: heads are those of one device, `parts` and `lanes` are those of its pages."""

    chip: Chip
    heads: int
    kv_heads: int
    parts: int
    lanes: int
    page_size: int
    storage: str
    """The type that holds keys and values."""

    @property
    def bytes_per_key(self) -> int:
        """Of one token in all kv heads."""
        return self.kv_heads * self.parts * self.lanes * jax.numpy.dtype(self.storage).itemsize


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Keys per block of decode, queries per block and keys per block of prefill."""

    decode_keys: int
    queries: int
    keys: int


_CHOSEN = {
    (Chip.V6E, 32, 8): _Chosen(512, 256, 512),
    (Chip.V6E, 64, 8): _Chosen(512, 256, 512),
    (Chip.V6E, 4, 1): _Chosen(2048, 256, 512),
    (Chip.V6E, 8, 1): _Chosen(2048, 256, 512),
    (Chip.TPU7X, 32, 8): _Chosen(512, 256, 512),
    (Chip.TPU7X, 64, 8): _Chosen(512, 128, 512),
    (Chip.TPU7X, 4, 1): _Chosen(2048, 256, 512),
    (Chip.TPU7X, 8, 1): _Chosen(2048, 256, 512),
}
"""By chip, heads and kv heads: those of Llama-8B and Qwen3-32B whole and on 8 chips, bfloat16, by the schedule."""


def _shapes_of(page_size: int) -> dict[Shape, _Chosen]:
    return {
        Shape(chip, heads, kv_heads, 2, 128, page_size, "bfloat16"): chosen
        for (chip, heads, kv_heads), chosen in _CHOSEN.items()
    }


_BY_SHAPE = {shape: chosen for page_size in (64, 128) for shape, chosen in _shapes_of(page_size).items()}

DECODE_BLOCKS = {shape: DecodeBlocks(16, chosen.decode_keys // shape.page_size) for shape, chosen in _BY_SHAPE.items()}
PREFILL_BLOCKS = {
    shape: PrefillBlocks(chosen.queries, chosen.keys // shape.page_size) for shape, chosen in _BY_SHAPE.items()
}


def decode_blocks(shape: Shape, rows: int, columns: int) -> DecodeBlocks:
    """Blocks for up to `rows` rows and `columns` columns of the page table."""
    found = DECODE_BLOCKS.get(shape) or _decode_by_costs(shape)
    return DecodeBlocks(min(found.rows, rows), _no_wider(found.pages, shape.page_size, columns))


def prefill_blocks(shape: Shape, tokens: int, columns: int) -> PrefillBlocks:
    """Blocks for up to `tokens` tokens and `columns` columns of the page table."""
    found = PREFILL_BLOCKS.get(shape) or _prefill_by_costs(shape)
    smallest = 16
    queries = max(min(found.queries, 1 << (tokens - 1).bit_length()), smallest)
    return PrefillBlocks(queries, _no_wider(found.pages, shape.page_size, columns))


def _no_wider(pages: int, page_size: int, columns: int) -> int:
    """No wider than the table needs, but whole registers of keys."""
    return max(min(pages, 1 << (columns - 1).bit_length()), 128 // page_size, 1)


@cache
def _decode_by_costs(shape: Shape) -> DecodeBlocks:
    """Keys whose scores take 16 registers, but 512 to 2048, within an eighth of the memory per buffer."""
    _warn(shape, "decode")
    sublanes = -(-shape.heads // 8)
    keys = min(max(16 // sublanes * 128, 512), 2048, VMEM_LIMITS[shape.chip] // 8 // shape.bytes_per_key)
    return DecodeBlocks(rows=16, pages=_pages(keys, shape.page_size))


@cache
def _prefill_by_costs(shape: Shape) -> PrefillBlocks:
    """512 keys, and as many queries as leave half of the memory to other things than sums and queries."""
    _warn(shape, "prefill")
    keys = min(512, VMEM_LIMITS[shape.chip] // 8 // shape.bytes_per_key)
    bytes_per_query = shape.heads * (4 * (2 * 128 + shape.lanes) + 8 * shape.lanes) + 8 * keys
    queries = min(256, VMEM_LIMITS[shape.chip] // 2 // bytes_per_query)
    return PrefillBlocks(max(_power_of_two(queries), 16), _pages(keys, shape.page_size))


def _pages(keys: int, page_size: int) -> int:
    return max(_power_of_two(keys) // page_size, 1)


def _power_of_two(number: int) -> int:
    """The largest that is no greater, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def _warn(shape: Shape, phase: str) -> None:
    if shape.chip is not Chip.INTERPRETER:
        logger.warning("no tuned %s blocks for %s: using sizes from the cost model", phase, shape)

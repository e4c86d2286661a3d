"""What the layers of a model keep of sequences, KV pages and recurrent states: layout, size, allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sglang_jax.architectures.model_config import StateArray, StateDtype
from torch_backend.recurrent.rows import States


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one layer, in pages; page 0 takes what padding writes.

    - `keys`, `values`: `[num_pages, kv_heads, page_size, head_dim]`, contiguous: the keys of one head in one page lie
      together, so that a kernel reads a page in one run and a tensor-parallel shard takes whole heads.
    - `key_scale`, `value_scale`: float32 `[kv_heads]`, given for float8 pages alone: what is stored is the value over
      its head's scale, so that a read multiplies by it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[2]

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scales: torch.Tensor | None = None,
    ) -> KVPages:
        """Zeroed pages; float8 ones with `scales` float32 `[kv_heads, 2]`, of keys (0) and values (1), or with 1."""
        shape = (num_pages, kv_heads, page_size, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.float8_e4m3fn:
            return cls(keys, values)
        if scales is None:
            scales = torch.ones((kv_heads, 2), dtype=torch.float32, device=device)
        # Kernels read the scales of one side as they lie.
        return cls(keys, values, scales[:, 0].contiguous(), scales[:, 1].contiguous())


def kv_bytes_per_token(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes over all layers of one rank."""
    return 2 * num_layers * kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What a layer keeps: pages, where it has attention, and the pools of its state, where it has one."""

    pages: KVPages | None = None
    states: States = ()


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """Types of the arrays of states: see `architectures.StateDtype`."""

    activations: torch.dtype
    recurrent: torch.dtype

    def of(self, kind: StateDtype) -> torch.dtype:
        """The type of an array of that kind."""
        return self.activations if kind is StateDtype.ACTIVATIONS else self.recurrent

    def allocate(self, slots: int, arrays: Iterable[StateArray], device: torch.device) -> States:
        """Zeroed pools of a layer's state."""
        return tuple(torch.zeros((slots, *array.shape), dtype=self.of(array.dtype), device=device) for array in arrays)

    def bytes_of_slot(self, arrays: Iterable[StateArray]) -> int:
        """Bytes of one slot of a layer."""
        return sum(math.prod(array.shape) * self.of(array.dtype).itemsize for array in arrays)

"""The KV pages of a model: layout, size, allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        cls, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVPages:
        """Zeroed pages; float8 ones with scales of 1."""
        shape = (num_pages, kv_heads, page_size, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.float8_e4m3fn:
            return cls(keys, values)
        key_scale, value_scale = (torch.ones(kv_heads, dtype=torch.float32, device=device) for _ in range(2))
        return cls(keys, values, key_scale, value_scale)


def kv_bytes_per_token(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes over all layers of one rank."""
    return 2 * num_layers * kv_heads * head_dim * dtype.itemsize

"""Memory of a model's layers: KV pages and recurrent states, their layout, size and allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from sglang_jax.architectures.kinds.part import CachedArray
from sglang_jax.architectures.kinds.recurrent import StateArray, StateDtype
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from torch_backend import host_memory
from torch_backend.recurrent.rows import States

LARGEST_INT8 = 127.0
LARGEST_FLOAT8 = 448.0
"""Of float8_e4m3."""


@dataclass(frozen=True, slots=True)
class KVForm:
    """Dtypes of stored keys and values. int8 ones have a float32 scale for each token and kv head; latent vectors in
    int8 or float8 have two for each token (`LatentScales`)."""

    keys: torch.dtype
    values: torch.dtype

    @property
    def name(self) -> str:
        keys, values = (str(dtype).removeprefix("torch.") for dtype in (self.keys, self.values))
        return keys if keys == values else f"{keys} keys, {values} values"

    def of(self, array: CachedArray) -> torch.dtype:
        return self.values if array.name == "values" else self.keys

    def bytes_per_token(self, arrays: Iterable[CachedArray]) -> int:

        def of_head(array: CachedArray) -> int:
            dtype = self.of(array)
            in_8_bits = len(array.parts) if array.parts else int(dtype == torch.int8)
            return array.width * dtype.itemsize + (4 * in_8_bits if dtype.itemsize == 1 else 0)

        return sum((array.heads or 1) * of_head(array) for array in arrays)


@dataclass(frozen=True, slots=True)
class TokenScales:
    """Scales of int8 keys and values of one layer. A token's scale depends only on that token, so that a page's content
    does not depend on which request wrote it, or when.

    - `keys`: float32 `[num_pages, kv_heads, page_size]`: a key is `key_mean + scale * stored`. `values`: the same,
      without a mean; None if values are not int8.
    - `key_mean`: float32 `[kv_heads, head_dim]`, fixed once the model is loaded. Keys have channels that are large for
      every token; without these, the remainder needs a smaller scale. The idea is from SageAttention (Zhang et al.
      2025), which uses the mean of the sequence.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    key_mean: torch.Tensor

    @classmethod
    def allocate(
        cls, num_pages: int, kv_heads: int, page_size: int, head_dim: int, form: KVForm, device: torch.device
    ) -> TokenScales:
        sides = [torch.zeros((num_pages, kv_heads, page_size), dtype=torch.float32, device=device) for _ in range(2)]
        mean = torch.zeros((kv_heads, head_dim), dtype=torch.float32, device=device)
        return cls(sides[0], sides[1] if form.values == torch.int8 else None, mean)


@dataclass(frozen=True, slots=True)
class LatentScales:
    """Scales of one layer's latent vectors and rotated keys in int8 or float8: two for each token, since their ranges
    differ. They depend only on the token, so that a page's content does not depend on which request wrote it, or when.

    - `values`: float32 `[num_pages, 2, page_size]`, first those of latent vectors, then those of rotated keys: the
      largest magnitude divided by the largest number of the dtype. 0 for a part whose numbers are all 0, and not finite
      for one that has numbers which are not.
    - `parts`: the sizes of a latent vector and of a rotated key.
    """

    values: torch.Tensor
    parts: tuple[int, ...]

    def gather(self, stored: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The numbers in `pages`, int64 `[..., P]`, of `stored` `[num_pages, 1, page_size, width]`, in order: float32
        `[..., P * page_size, width]`."""
        # Indexed as bytes, because few devices index float8.
        found = stored.view(torch.uint8)[pages].view(stored.dtype).squeeze(-3)
        return self.widen(found, self.values[pages].transpose(-1, -2)).flatten(-3, -2)

    def widen(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers `stored` `[..., width]` in 8 bits, with `scales` `[..., 2]`: float32 `[..., width]`."""
        parts = torch.split(stored.float(), list(self.parts), dim=-1)
        return torch.cat([part * scales[..., number, None] for number, part in enumerate(parts)], dim=-1)

    def write(self, stored: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        """Rounds `rows` `[T, width]` to the dtype of `stored` `[num_pages, 1, page_size, width]`, and writes them and
        their scales at (page, offset)."""
        integers = stored.dtype == torch.int8
        largest = LARGEST_INT8 if integers else LARGEST_FLOAT8
        scales, levels = [], []
        for part in torch.split(rows.float(), list(self.parts), dim=-1):
            scale = part.abs().amax(-1) / largest
            scaled = (part / torch.where(scale == 0.0, 1.0, scale)[:, None]).nan_to_num(0.0).clamp(-largest, largest)
            scales.append(scale)
            levels.append(scaled.round() if integers else scaled)
        # float8 is written as bytes, because few devices index it.
        narrow = torch.cat(levels, dim=-1).to(stored.dtype).view(torch.uint8)
        stored.view(torch.uint8)[:, 0].index_put_(slots, narrow)
        self.values.transpose(1, 2).index_put_(slots, torch.stack(scales, dim=-1))


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one layer, in pages; padding writes to page 0.

    - `keys`, `values`: `[num_pages, kv_heads, page_size, head_dim]`, contiguous: the keys of one head in one page are
      adjacent, so that a kernel reads a page in one run and a tensor-parallel shard has whole heads.
    - `key_scale`, `value_scale`: float32 `[kv_heads]`, only for float8 pages: values are stored divided by their head's
      scale, and a read multiplies by it.
    - `token_scales`: of int8 keys, and of values if these are int8 too.
    - `latent_scales`: of latent vectors in int8 or float8, which have none of the others.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    token_scales: TokenScales | None = None
    latent_scales: LatentScales | None = None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def shared(self) -> bool:
        """Whether values are the keys, as in latent attention."""
        return self.values is self.keys

    @property
    def parameters(self) -> dict[tuple[Part, ParameterKind], torch.Tensor]:
        """The KV parameters that a checkpoint may contain, by the manifest's names."""
        found = {
            (Part.KEY, ParameterKind.SCALE): self.key_scale,
            (Part.VALUE, ParameterKind.SCALE): self.value_scale,
            (Part.KEY, ParameterKind.MEAN): None if self.token_scales is None else self.token_scales.key_mean,
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        form: KVForm | torch.dtype,
        device: torch.device,
        *,
        shared: bool = False,
        parts: tuple[int, ...] = (),
    ) -> KVPages:
        """Allocates zeroed pages with the dtypes of a form, or one dtype; scales of float8 pages are 1. `shared`:
        values are the keys, as in latent attention, whose vectors have these `parts` (see `CachedArray`)."""
        form = form if isinstance(form, KVForm) else KVForm(form, form)
        shape = (num_pages, kv_heads, page_size, head_dim)
        if shared:
            keys = host_memory.zeros(shape, form.keys, device)
            if form.keys.itemsize > 1:
                return cls(keys, keys)
            scales = host_memory.zeros((num_pages, len(parts), page_size), torch.float32, device)
            return cls(keys, keys, latent_scales=LatentScales(scales, parts))
        keys, values = (host_memory.zeros(shape, dtype, device) for dtype in (form.keys, form.values))
        if form.keys == torch.int8:
            token_scales = TokenScales.allocate(num_pages, kv_heads, page_size, head_dim, form, device)
            return cls(keys, values, token_scales=token_scales)
        if form.keys != torch.float8_e4m3fn:
            return cls(keys, values)
        key_scale, value_scale = (torch.ones(kv_heads, dtype=torch.float32, device=device) for _ in range(2))
        return cls(keys, values, key_scale, value_scale)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of a layer: pages if it has attention, the pools of its recurrent state if it has one, and, if counted,
    the tokens routed to each expert, int64 `[experts]`. `shards`: those of a layer that is computed in several shards,
    instead; they share pages with equal content."""

    pages: KVPages | None = None
    states: States = ()
    expert_tokens: torch.Tensor | None = None
    shards: tuple[LayerMemory, ...] = ()

    @property
    def parts(self) -> tuple[LayerMemory, ...]:
        """Its shards, or itself."""
        return self.shards or (self,)

    @property
    def pools(self) -> Iterator[KVPages]:
        """Its pages, each pool once."""
        found = {id(part.pages): part.pages for part in self.parts if part.pages is not None}
        yield from found.values()


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """Dtypes of the arrays of states: see `architectures.StateDtype`."""

    activations: torch.dtype
    recurrent: torch.dtype

    def of(self, kind: StateDtype) -> torch.dtype:
        return self.activations if kind is StateDtype.ACTIVATIONS else self.recurrent

    def allocate(self, slots: int, arrays: Iterable[StateArray], device: torch.device) -> States:
        return tuple(torch.zeros((slots, *array.shape), dtype=self.of(array.dtype), device=device) for array in arrays)

    def bytes_of_slot(self, arrays: Iterable[StateArray]) -> int:
        return sum(math.prod(array.shape) * self.of(array.dtype).itemsize for array in arrays)

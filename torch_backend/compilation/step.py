"""The backend's own operations that a rewritten graph calls in addition to ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, StepAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LayerMemory
from torch_backend.operations import HeadNorms, Operations, Rotation
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.rotary import NoRotation


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Attention of a layer: the size of a head, the index of its cache group, and its options."""

    head_dim: int
    group: int
    options: AttentionOptions


Product = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer `[..., inputs]` → `[..., outputs]`, with fused operations."""


@dataclass(slots=True)
class GraphStep:
    """A step of the engine, as an argument of a graph's calls. `attention` and `write_slots`: by cache group;
    `products`: the model's linear layers. A step of the head has only operations, products and ranks."""

    operations: Operations
    products: Sequence[Product]
    layers: Sequence[LayerForm] = ()
    attention: Sequence[StepAttention] = ()
    write_slots: Sequence[torch.Tensor] = ()
    memory: Sequence[LayerMemory] = ()
    positions: torch.Tensor | None = None
    parallel: TensorParallel = SINGLE
    unrotated: dict[int, Rotation] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        groups: int,
        operations: Operations,
        attention: AttentionImplementation,
        layers: Sequence[LayerForm],
        memory: Sequence[LayerMemory],
        products: Sequence[Product],
        parallel: TensorParallel,
    ) -> GraphStep:
        batches = [batch.of_group(group) for group in range(groups)]
        prepared = [attention.prepare(own) for own in batches]
        slots = [own.write_slots for own in batches]
        return cls(operations, products, layers, prepared, slots, memory, batch.positions, parallel)

    def no_rotation(self, head_dim: int) -> Rotation:
        """Tables that do not rotate heads; created once for all layers."""
        found = self.unrotated.get(head_dim)
        if found is None:
            assert self.positions is not None
            found = self.unrotated[head_dim] = NoRotation(head_dim)(self.positions)
        return found


def attend(
    step: GraphStep,
    layer: int,
    qkv: torch.Tensor,
    rotation: Rotation | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Applies norms and rotation to queries and keys if given, writes keys and values to the layer's pages, and
    attends: `qkv` `[1, T, (heads + 2 * kv_heads) * head_dim]` → `[1, T, heads, head_dim]`."""
    form = step.layers[layer]
    pages = step.memory[layer].pages
    assert pages is not None
    if rotation is None:
        rotation = step.no_rotation(form.head_dim)
    norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, eps)
    slots = step.write_slots[form.group]
    queries = step.operations.rotate_and_write(qkv[0], rotation, norms, pages, slots)
    return step.attention[form.group](queries, pages, form.options)[None]


def multiply(step: GraphStep, number: int, x: torch.Tensor) -> torch.Tensor:
    return step.products[number](x)


def rotation(cosines: torch.Tensor, sines: torch.Tensor) -> Rotation:
    """Converts tables `[1, T, head_dim / 2]` to a `Rotation`."""
    return Rotation(cosines[0].float(), sines[0].float())


def rms_norm(step: GraphStep, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`; `x` `[..., hidden]`."""
    return step.operations.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def add_rms_norm(
    step: GraphStep, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Operations.add_rms_norm`: may overwrite its inputs. `x`, `residual` `[..., hidden]`."""
    rows = (-1, x.shape[-1])
    normed, total = step.operations.add_rms_norm(x.reshape(rows), residual.reshape(rows), weight, eps)
    return normed.view(x.shape), total.view(x.shape)


def all_reduce(step: GraphStep, x: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `x`, which may be overwritten."""
    return step.parallel.all_reduce(x)


def all_gather(step: GraphStep, x: torch.Tensor) -> torch.Tensor:
    """Concatenates every rank's `x [..., n]` in the order of ranks: `[..., size * n]`."""
    return step.parallel.all_gather_last(x)


def all_reduce_add_rms_norm(
    step: GraphStep, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum of every rank's `x`."""
    rows, own = (-1, x.shape[-1]), step.operations
    normed, total = own.all_reduce_add_rms_norm(x.reshape(rows), residual.reshape(rows), weight, eps, step.parallel)
    return normed.view(x.shape), total.view(x.shape)


def silu_mul(step: GraphStep, gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_mul`; `gate_up` `[..., 2 * intermediate]`."""
    return step.operations.silu_mul(gate_up.reshape(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], -1)


def gelu_mul(step: GraphStep, gate_up: torch.Tensor) -> torch.Tensor:
    """The same with `Operations.gelu_mul`."""
    return step.operations.gelu_mul(gate_up.reshape(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], -1)

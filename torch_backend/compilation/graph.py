"""Graphs of ATen operations as passes use them: nodes, their shapes, and the weights that they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from torch_backend.attention.interface import AttentionOptions

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight that a node reads: `parts` of the checkpoint, concatenated by rows, plus `offset`, in `dtype`."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """Attention of one layer in the graph. `sinks`: a weight's name."""

    heads: int
    kv_heads: int
    head_dim: int
    options: AttentionOptions
    sinks: str | None = None


@dataclass(slots=True)
class Program:
    """A model's body and head as graphs.

    - `body`: `step`, `tokens [1, T]`, `positions [1, T]` → hidden states `[1, T, hidden]`.
    - `head`: `step`, hidden states `[1, m, hidden]` → logits `[1, m, vocab]`.
    - `constants`: buffers and other tensors that are not weights of the checkpoint, by name.
    - `sites`: by layer, set by the pass that pages attention.
    """

    model_type: str
    dtype: torch.dtype
    body: fx.Graph
    head: fx.Graph
    constants: dict[str, torch.Tensor]
    sites: dict[int, AttentionSite] = field(default_factory=dict)

    @property
    def graphs(self) -> tuple[fx.Graph, fx.Graph]:
        return self.body, self.head


WEIGHT = "weight"
"""Key of a node's `Weight` in its `meta`."""

CONSTANT = "constant"
"""Key of the name of one of `Program.constants` in a node's `meta`."""

VALUE = "val"
"""Key under which tracing stores a fake tensor of the node's shape and dtype."""


def weight_of(node: object) -> Weight | None:
    """The weight that a node reads; None for any other node."""
    return node.meta.get(WEIGHT) if isinstance(node, fx.Node) else None


def known_weight(node: object) -> Weight:
    found = weight_of(node)
    assert found is not None, f"{node} reads no weight"
    return found


def read_weight(graph: fx.Graph, weight: Weight) -> fx.Node:
    """Returns a node that reads `weight`: an existing one, or a new one before all computation."""
    last: fx.Node | None = None
    node: fx.Node
    for node in graph.nodes:
        if node.op == "placeholder" or WEIGHT in node.meta:
            if node.meta.get(WEIGHT) == weight:
                return node
            last = node
    assert last is not None
    with graph.inserting_after(last):
        node = graph.create_node("get_attr", f"weight_{len(graph.nodes)}", name="weight")
    node.meta[WEIGHT] = weight
    node.meta[VALUE] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return node


def concatenate(weights: list[Weight]) -> Weight:
    """Along the first axis."""
    first = weights[0]
    rows = sum(weight.shape[0] for weight in weights)
    parts = tuple(part for weight in weights for part in weight.parts)
    return replace(first, parts=parts, shape=(rows, *first.shape[1:]))


def value(node: fx.Node) -> torch.Tensor:
    """A tensor with the shape and dtype of a node's result."""
    found: torch.Tensor = node.meta[VALUE]
    return found


def move(graph: fx.Graph, device: torch.device) -> None:
    """Makes a graph create its tensors on `device`, instead of the CPU, on which it was traced."""

    def moved(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) else arg

    node: fx.Node
    for node in graph.nodes:
        node.args = cast("tuple[Any, ...]", map_aggregate(node.args, moved))
        node.kwargs = cast("dict[str, Any]", map_aggregate(node.kwargs, moved))


def step_of(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(iter(graph.nodes))
    return first


def calls(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """Nodes that call one of `targets`, at the time of the call."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def args(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, untyped: their types depend on the operator."""
    return node.args


def source(node: fx.Node) -> fx.Node:
    """A node's first argument, which must be a node."""
    found = node.args[0]
    assert isinstance(found, fx.Node), f"{node.format_node()} reads no tensor first"
    return found


def is_call(node: object, *targets: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)


def before_casts(node: fx.Node) -> fx.Node:
    """The node before one or several casts."""
    while is_call(node, *CASTS):
        node = source(node)
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The node's only user; None if it has none or several, so that a pattern does not remove a value in use."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def call(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Creates a call of a function with the shape and dtype of `like`."""
    node = graph.call_function(target, args)
    node.meta[VALUE] = like.meta[VALUE]
    return node


def replace_node(node: fx.Node, by: fx.Node) -> None:
    """Replaces all uses of `node` by `by`, and erases `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether the results of two nodes have the same shape for any number of tokens."""
    mine, its = value(node).shape, value(other).shape
    return [str(size) for size in mine] == [str(size) for size in its]


def uncast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The node before casts from `dtype` to a wider dtype; the node itself if there are none."""
    found = node
    while is_call(found, *CASTS) and value(found).dtype != dtype:
        found = source(found)
    return found if value(found).dtype == dtype else node


def factors(node: object, target: object = aten.mul.Tensor) -> tuple[fx.Node, fx.Node] | None:
    """Both operands of a product (or of another operation of two tensors); None for any other node."""
    if is_call(node, target) and not node.kwargs and len(args(node)) == 2:
        first, second = args(node)
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            return first, second
    return None


RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default)
"""Operations that change only the shape."""


def before_reshapes(node: fx.Node) -> fx.Node:
    """The node before one or several reshapes."""
    while is_call(node, *RESHAPES):
        node = source(node)
    return node


def flattened_heads(graph: fx.Graph, heads: fx.Node) -> fx.Node:
    """Creates a node that reshapes `[1, T, heads, head_dim]` to `[1, T, heads * head_dim]`."""
    node = graph.call_function(aten.flatten.using_ints, (heads, 2, 3))
    node.meta[VALUE] = value(heads).flatten(2, 3)
    return node


def side_by_side(graph: fx.Graph, parts: list[fx.Node]) -> fx.Node:
    """Creates a node that concatenates tensors along their last axis."""
    node = graph.call_function(aten.cat.default, (parts, -1))
    node.meta[VALUE] = torch.cat([value(part) for part in parts], -1)
    return node


def parts_of(node: object) -> list[fx.Node] | None:
    """The tensors that `side_by_side`, or the model's own code, concatenates; None for another node."""
    if not is_call(node, aten.cat.default):
        return None
    tensors, *axis = args(node)
    last = value(node).dim() - 1
    return list(tensors) if axis and axis[0] in (-1, last) else None

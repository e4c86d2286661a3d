"""Graphs of ATen operations as passes see them: nodes, their shapes, and the weights that they read."""

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
    """What a node that reads a weight gives: `parts` of the checkpoint one after the other along the first axis, plus
    `offset`, in `dtype`."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """Attention of one layer in the graph: how many heads there are, and what is computed. `sinks`: a weight's name."""

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
    - `constants`: buffers and other tensors that are no weights of the checkpoint, by name.
    - `sites`: of each layer, once the pass that pages attention has run.
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
"""Under which a node's `meta` has its `Weight`."""

CONSTANT = "constant"
"""The same for the name of one of `Program.constants`."""

VALUE = "val"
"""Under which tracing leaves a fake tensor that has the node's shape and type."""


def weight_of(node: object) -> Weight | None:
    """The weight that a node reads; None for any other."""
    return node.meta.get(WEIGHT) if isinstance(node, fx.Node) else None


def known_weight(node: object) -> Weight:
    """The same of a node that is known to read one."""
    found = weight_of(node)
    assert found is not None, f"{node} reads no weight"
    return found


def read_weight(graph: fx.Graph, weight: Weight) -> fx.Node:
    """A node that reads `weight`: the one that does already, or a new one before all that computes."""
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


def merged(weights: list[Weight]) -> Weight:
    """One after the other along the first axis."""
    first = weights[0]
    rows = sum(weight.shape[0] for weight in weights)
    parts = tuple(part for weight in weights for part in weight.parts)
    return replace(first, parts=parts, shape=(rows, *first.shape[1:]))


def value(node: fx.Node) -> torch.Tensor:
    """Shape and type of what a node gives."""
    found: torch.Tensor = node.meta[VALUE]
    return found


def move(graph: fx.Graph, device: torch.device) -> None:
    """Lets a graph make its tensors on `device`: it was traced on the CPU, which code that makes some has named."""

    def moved(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) else arg

    node: fx.Node
    for node in graph.nodes:
        node.args = cast("tuple[Any, ...]", map_aggregate(node.args, moved))
        node.kwargs = cast("dict[str, Any]", map_aggregate(node.kwargs, moved))


def step_of(graph: fx.Graph) -> fx.Node:
    """The node that stands for the step."""
    first: fx.Node = next(iter(graph.nodes))
    return first


def calls(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """Nodes that call one of `targets`, as they are when this begins."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def args(node: fx.Node) -> tuple[Any, ...]:
    """What a node is called with: its operators know of what types."""
    return node.args


def source(node: fx.Node) -> fx.Node:
    """The first of these, where it is a node."""
    found = node.args[0]
    assert isinstance(found, fx.Node), f"{node.format_node()} reads no tensor first"
    return found


def is_call(node: object, *targets: object) -> TypeGuard[fx.Node]:
    """Whether a node calls one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)


def before_casts(node: fx.Node) -> fx.Node:
    """What was cast, maybe several times."""
    while is_call(node, *CASTS):
        node = source(node)
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The node's one user; None if it has none or several, which a pattern must not swallow."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def call(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A new call of a function, of the shape and type that `like` has."""
    node = graph.call_function(target, args)
    node.meta[VALUE] = like.meta[VALUE]
    return node


def put_in_place(node: fx.Node, by: fx.Node) -> None:
    """Lets all that used `node` use `by`, and takes `node` out."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes give tensors of one shape, whatever the number of tokens."""
    mine, its = value(node).shape, value(other).shape
    return [str(size) for size in mine] == [str(size) for size in its]


def uncast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What was cast from `dtype` to a wider type; the node itself if it is of `dtype`, or was never cast from it."""
    found = node
    while is_call(found, *CASTS) and value(found).dtype != dtype:
        found = source(found)
    return found if value(found).dtype == dtype else node


def factors(node: object, target: object = aten.mul.Tensor) -> tuple[fx.Node, fx.Node] | None:
    """Both operands of a product (or of another operation of two tensors); None if it is none."""
    if is_call(node, target) and not node.kwargs and len(args(node)) == 2:
        first, second = args(node)
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            return first, second
    return None


RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default)
"""The same numbers in the same order, in another shape."""


def before_reshapes(node: fx.Node) -> fx.Node:
    """What was brought into another shape, maybe several times."""
    while is_call(node, *RESHAPES):
        node = source(node)
    return node


def flattened_heads(graph: fx.Graph, heads: fx.Node) -> fx.Node:
    """A new node: `[1, T, heads, head_dim]` → `[1, T, heads * head_dim]`."""
    node = graph.call_function(aten.flatten.using_ints, (heads, 2, 3))
    node.meta[VALUE] = value(heads).flatten(2, 3)
    return node


def side_by_side(graph: fx.Graph, parts: list[fx.Node]) -> fx.Node:
    """A new node: tensors one after the other along their last axis."""
    node = graph.call_function(aten.cat.default, (parts, -1))
    node.meta[VALUE] = torch.cat([value(part) for part in parts], -1)
    return node


def parts_of(node: object) -> list[fx.Node] | None:
    """What `side_by_side` put together, here or in the model's own code; None for another node."""
    if not is_call(node, aten.cat.default):
        return None
    tensors, *axis = args(node)
    last = value(node).dim() - 1
    return list(tensors) if axis and axis[0] in (-1, last) else None

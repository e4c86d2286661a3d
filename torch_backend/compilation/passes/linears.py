"""Merges linear layers that read the same input, and replaces gated activations by the backend's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torch_backend.compilation.graph import (
    Program,
    args,
    aten,
    call,
    calls,
    concatenate,
    factors,
    is_call,
    known_weight,
    only_user,
    parts_of,
    read_weight,
    replace_node,
    same_shape,
    side_by_side,
    step_of,
    value,
    weight_of,
)
from torch_backend.compilation.step import gelu_mul, silu_mul

_ACTIVATIONS: dict[object, Callable[..., torch.Tensor]] = {aten.silu.default: silu_mul, aten.gelu.default: gelu_mul}


def fuse_gated_activations(program: Program) -> int:
    """Fuses `silu(gate) * up`, and the same with GELU by the tanh approximation."""
    found, graph = 0, program.body
    for node in calls(graph, *_ACTIVATIONS):
        product = only_user(node)
        operands = factors(product)
        if product is None or operands is None or not _is_known(node):
            continue
        up = operands[1] if operands[0] is node else operands[0]
        gate = args(node)[0]
        if up is node or not same_shape(up, node) or value(up).dtype != value(node).dtype:
            continue
        with graph.inserting_before(product):
            both = side_by_side(graph, [gate, up])
            new = call(graph, _ACTIVATIONS[node.target], (step_of(graph), both), like=product)
        replace_node(product, new)
        found += 1
    return found


def _is_known(node: fx.Node) -> bool:
    return node.target is aten.silu.default or node.kwargs.get("approximate") == "tanh"


def merge_linears(program: Program) -> int:
    """Merges linear layers that read one input, if their only use is the concatenation of their outputs."""
    found, graph = 0, program.body
    for node in calls(graph, aten.cat.default):
        parts = parts_of(node)
        if parts is None or len(parts) < 2 or not all(_is_mergeable(part, parts[0]) for part in parts):
            continue
        weights = [known_weight(args(part)[1]) for part in parts]
        reads = [args(parts[0])[0], read_weight(graph, concatenate(weights))]
        if len(args(parts[0])) == 3:
            reads.append(read_weight(graph, concatenate([known_weight(args(part)[2]) for part in parts])))
        with graph.inserting_before(node):
            new = call(graph, aten.linear.default, tuple(reads), like=node)
        replace_node(node, new)
        found += 1
    return found


def _is_mergeable(part: fx.Node, first: fx.Node) -> bool:
    return (
        is_call(part, aten.linear.default)
        and is_call(first, aten.linear.default)
        and args(part)[0] is args(first)[0]
        and len(args(part)) == len(args(first))
        and only_user(part) is not None
        and all(weight_of(arg) is not None for arg in args(part)[1:])
        and known_weight(args(part)[1]).dtype == known_weight(args(first)[1]).dtype
    )

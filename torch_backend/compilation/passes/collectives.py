"""Replaces marks by sums and gathers over ranks, fused with the following addition and norm where possible."""

from __future__ import annotations

from torch import fx

from torch_backend.compilation.graph import (
    Program,
    args,
    aten,
    call,
    calls,
    factors,
    is_call,
    only_user,
    replace_node,
    same_shape,
    source,
    step_of,
    value,
)
from torch_backend.compilation.markers import SIDE_BY_SIDE_OF_RANKS, SUM_OF_RANKS
from torch_backend.compilation.step import add_rms_norm, all_gather, all_reduce, all_reduce_add_rms_norm


def insert_collectives(program: Program) -> int:
    """Replaces every mark. Two partial results that are added to each other are added before one sum over ranks."""
    found = 0
    for graph in program.graphs:
        for node in calls(graph, SIDE_BY_SIDE_OF_RANKS):
            with graph.inserting_before(node):
                new = call(graph, all_gather, (step_of(graph), source(node)), like=node)
            replace_node(node, new)
            found += 1
    return found + _sum_over_ranks(program.body)


def _sum_over_ranks(graph: fx.Graph) -> int:
    found = 0
    for node in calls(graph, SUM_OF_RANKS):
        part = source(node)
        with graph.inserting_before(node):
            if only_user(part) is None or not is_call(part, aten.linear.default):
                # all_reduce may overwrite its input, which is used elsewhere.
                part = call(graph, aten.clone.default, (part,), like=part)
            new = call(graph, all_reduce, (step_of(graph), part), like=node)
        replace_node(node, new)
        found += 1
    for node in calls(graph, aten.add.Tensor):
        _sum_once(graph, node)
    return found


def _sum_once(graph: fx.Graph, node: fx.Node) -> None:
    parts = factors(node, aten.add.Tensor)
    if parts is None or parts[0] is parts[1]:
        return
    for part in parts:
        same_form = same_shape(part, node) and value(part).dtype == value(node).dtype
        if not is_call(part, all_reduce) or only_user(part) is None or not same_form:
            return
    with graph.inserting_before(node):
        both = call(graph, aten.add.Tensor, tuple(args(part)[1] for part in parts), like=node)
        new = call(graph, all_reduce, (step_of(graph), both), like=node)
    replace_node(node, new)
    for part in parts:
        graph.erase_node(part)


def fuse_all_reduces(program: Program) -> int:
    """Fuses a sum over ranks into the only `add_rms_norm` that reads it."""
    found = 0
    for graph in program.graphs:
        for node in calls(graph, add_rms_norm):
            found += _fuse(graph, node)
    return found


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    step, *summands, weight, eps = args(node)
    for reduced, residual in (summands, summands[::-1]):
        if is_call(reduced, all_reduce) and only_user(reduced) is not None:
            with graph.inserting_before(node):
                new = call(graph, all_reduce_add_rms_norm, (step, args(reduced)[1], residual, weight, eps), like=node)
            replace_node(node, new)
            graph.erase_node(reduced)
            return True
    return False

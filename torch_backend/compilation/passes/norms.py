"""Replaces RMS norms, also those after a sum, by the backend's own."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from torch_backend.compilation.graph import (
    CASTS,
    VALUE,
    Program,
    Weight,
    args,
    aten,
    before_casts,
    call,
    calls,
    factors,
    is_call,
    only_user,
    read_weight,
    replace_node,
    same_shape,
    source,
    step_of,
    uncast,
    value,
    weight_of,
)
from torch_backend.compilation.step import add_rms_norm, all_reduce_add_rms_norm, rms_norm


def fuse_norms(program: Program) -> int:
    """Fuses `weight * (x * rsqrt(mean(x ** 2) + eps))` in any order of casts and factors, also with `1 + weight`."""
    found = 0
    for graph in program.graphs:
        for node in calls(graph, aten.rsqrt.default):
            found += _fuse_norm(graph, node)
        for node in calls(graph, aten.rms_norm.default):
            found += _fuse_whole_norm(graph, node)
    return found


def _fuse_norm(graph: fx.Graph, rsqrt: fx.Node) -> bool:
    matched = _match_normalisation(rsqrt)
    if matched is None:
        return False
    wide, eps, scaled = matched
    while is_call(user := only_user(scaled), *CASTS):
        assert user is not None
        scaled = user
    product = only_user(scaled)
    operands = factors(product)
    if product is None or operands is None:
        return False
    weight = _scale(operands[1] if operands[0] is scaled else operands[0])
    dtype = value(before_casts(wide)).dtype
    x, end = uncast(wide, dtype), product
    if value(end).dtype != dtype and is_call(user := only_user(end), *CASTS):
        assert user is not None
        end = user
    if weight is None or weight.shape != value(x).shape[-1:] or value(end).dtype != dtype or not same_shape(x, end):
        return False
    with graph.inserting_before(end):
        read = read_weight(graph, weight)
        if is_call(x, aten.transpose.int) and set(args(x)[1:]) == {1, 2}:
            # Norms of heads are applied before the transpose, in whichever order the model has them.
            heads: fx.Node = args(x)[0]
            normed = call(graph, rms_norm, (step_of(graph), heads, read, eps), like=heads)
            new = call(graph, aten.transpose.int, (normed, 1, 2), like=end)
        else:
            new = call(graph, rms_norm, (step_of(graph), x, read, eps), like=end)
    replace_node(end, new)
    return True


def _match_normalisation(rsqrt: fx.Node) -> tuple[fx.Node, float, fx.Node] | None:
    """For `x * rsqrt(mean(x ** 2) + eps)`: x, eps and the product."""
    total = args(rsqrt)[0]
    if not is_call(total, aten.add.Tensor) or only_user(rsqrt) is None:
        return None
    mean, eps = args(total)[:2]
    if not is_call(mean, aten.mean.dim) or not isinstance(eps, float) or only_user(mean) is None:
        return None
    squares, axes, *keep = args(mean)
    if list(axes) not in ([-1], [value(mean).dim() - 1]) or keep != [True]:
        return None
    x = _match_square(squares)
    scaled = only_user(rsqrt)
    operands = factors(scaled)
    if x is None or scaled is None or operands is None or set(operands) != {x, rsqrt}:
        return None
    return x, eps, scaled


def _match_square(node: object) -> fx.Node | None:
    if is_call(node, aten.pow.Tensor_Scalar) and args(node)[1] == 2:
        return source(node)
    if is_call(node, aten.square.default):
        return source(node)
    operands = factors(node)
    return operands[0] if operands is not None and operands[0] is operands[1] else None


def _scale(node: fx.Node) -> Weight | None:
    """The weight that a norm multiplies by: as stored, or plus 1, which is then kept in float32."""
    node = before_casts(node)
    if is_call(node, aten.add.Tensor) and args(node)[1] in (1, 1.0) and not node.kwargs:
        weight = weight_of(before_casts(args(node)[0]))
        return None if weight is None or weight.offset else replace(weight, offset=1.0, dtype=torch.float32)
    return weight_of(node)


def _fuse_whole_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """Replaces torch's own norm over the last axis, with a weight."""
    x, shape, weight, eps = args(node) + (None,) * (4 - len(args(node)))
    read = weight_of(weight)
    if read is None or eps is None or not isinstance(x, fx.Node) or list(shape) != [value(x).shape[-1]]:
        return False
    with graph.inserting_before(node):
        new = call(graph, rms_norm, (step_of(graph), x, weight, eps), like=node)
    replace_node(node, new)
    return True


def fuse_sums_with_norms(program: Program) -> int:
    """Fuses a norm with the sum that it reads, if nothing reads the summands afterwards: they are overwritten."""
    found = 0
    for graph in program.graphs:
        for node in calls(graph, rms_norm):
            found += _fuse_sum(graph, node)
    return found


def _fuse_sum(graph: fx.Graph, norm: fx.Node) -> bool:
    step, total, weight, eps = args(norm)
    summands = factors(total, aten.add.Tensor)
    if summands is None or not isinstance(total, fx.Node):
        return False
    same_form = all(same_shape(each, total) and value(each).dtype == value(total).dtype for each in summands)
    if (
        not same_form
        or _owner(summands[0]) is _owner(summands[1])
        or not all(_may_overwrite(each, total) for each in summands)
    ):
        return False
    residual, x = summands
    with graph.inserting_before(total):
        both = graph.call_function(add_rms_norm, (step, x, residual, weight, eps))
        both.meta[VALUE] = (value(norm), value(total))
        normed = call(graph, operator.getitem, (both, 0), like=norm)
        summed = call(graph, operator.getitem, (both, 1), like=total)
    replace_node(norm, normed)
    replace_node(total, summed)
    return True


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result may share its input's memory, by its operator's schema."""
    if is_call(node, operator.getitem):
        return not is_call(node.args[0], add_rms_norm, all_reduce_add_rms_norm)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return node.target is aten.dropout.default or any(each.alias_info is not None for each in returns)


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory `node` may share."""
    while _is_view(node):
        node = args(node)[0]
    return node


def _may_overwrite(node: fx.Node, at: fx.Node) -> bool:
    """Whether the memory of `node` may be overwritten at `at`: nothing reads it afterwards, it is neither an input nor
    a weight, and it is not expanded, so that no number of it stands for several."""
    through = node
    while _is_view(through):
        if is_call(through, aten.expand.default):
            return False
        through = args(through)[0]
    if through.op != "call_function":
        return False
    waiting = [through]
    while waiting:
        shown = waiting.pop()
        for user in shown.users:
            if user is not at and user > at:
                return False
            if _is_view(user):
                waiting.append(user)
    return True

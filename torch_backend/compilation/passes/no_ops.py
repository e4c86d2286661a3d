"""Removes operations without effect: casts to the same dtype, reshapes to the same shape, full slices, transposes of
transposes, products with 1, dropout, and unused results. Known numbers are inserted where they are used."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_backend.compilation.graph import (
    CASTS,
    RESHAPES,
    VALUE,
    Program,
    args,
    aten,
    before_reshapes,
    is_call,
    replace_node,
    same_shape,
    value,
)

_END = 2**63 - 1
_ARITHMETIC = (operator.floordiv, operator.mul, operator.add, operator.sub, operator.neg)
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})
"""Functions that set modes of torch's autograd and autocast, which do not apply here."""


def remove_no_ops(program: Program) -> int:
    """Repeats until nothing more is found; returns the number of removed nodes."""
    total = 0
    for graph in program.graphs:
        while found := _remove_once(graph) + _remove_unused(graph):
            total += found
    return total


def _remove_once(graph: fx.Graph) -> int:
    found = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_mode(node):
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
        elif (number := _number(node)) is not None:
            for user in list(node.users):
                _put_number(user, node, number)
            graph.erase_node(node)
        elif (same := _unchanged_input(node)) is not None:
            replace_node(node, same)
        else:
            continue
        found += 1
    return found


def _put_number(user: fx.Node, node: fx.Node, number: int) -> None:

    def read(arg: fx.Node) -> Any:
        return number if arg is node else arg

    user.args, user.kwargs = fx.map_arg(user.args, read), fx.map_arg(user.kwargs, read)


def _remove_unused(graph: fx.Graph) -> int:
    """Erases nodes without users: none has side effects (`trace` refuses those)."""
    found = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            found += 1
    return found


def _is_mode(node: fx.Node) -> bool:
    return callable(node.target) and node.target.__name__ in _MODES


def _number(node: fx.Node) -> int | None:
    """A size that does not depend on the number of tokens, or a number computed from such sizes."""
    if is_call(node, aten.sym_size.int):
        size = value(args(node)[0]).shape[args(node)[1]]
        return size if isinstance(size, int) else None
    if is_call(node, *_ARITHMETIC) and all(isinstance(arg, int) for arg in args(node)):
        assert callable(node.target)
        return int(node.target(*args(node)))
    return None


def _unchanged_input(node: fx.Node) -> fx.Node | None:
    """The node whose value `node` returns unchanged; None if it changes it."""
    if not (args(node) and isinstance(node.meta.get(VALUE), torch.Tensor)):
        return None
    if is_call(node, aten.cat.default):
        return _whole(node)
    source = args(node)[0]
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get(VALUE), torch.Tensor):
        return None
    if is_call(node, *RESHAPES):
        base = before_reshapes(node)
        return base if same_shape(base, node) else None
    if is_call(node, aten.transpose.int) and is_call(source, aten.transpose.int):
        axes = ({axis % value(each).dim() for axis in args(each)[1:]} for each in (node, source))
        before = args(source)[0]
        return before if next(axes) == next(axes) and isinstance(before, fx.Node) else None
    unchanged = next((test for targets, test in _TESTS if is_call(node, *targets)), None)
    return source if unchanged is not None and unchanged(node, source) else None


def _is_full_slice(node: fx.Node, source: fx.Node) -> bool:
    _, axis, start, end, step = args(node) + (0, 0, _END, 1)[len(args(node)) - 1 :]
    size = value(source).shape[axis]
    to_the_end = end is None or end == _END or (isinstance(size, int) and isinstance(end, int) and end >= size)
    return start in (None, 0) and to_the_end and step == 1


def _is_identity(neutral: float) -> Callable[[fx.Node, fx.Node], bool]:
    def test(node: fx.Node, source: fx.Node) -> bool:
        plain = len(args(node)) == 2 and not node.kwargs and not isinstance(args(node)[1], fx.Node)
        return plain and args(node)[1] == neutral and value(node).dtype == value(source).dtype

    return test


def _keeps_type(node: fx.Node, source: fx.Node) -> bool:
    return value(node).dtype == value(source).dtype


def _drops_nothing(node: fx.Node, source: fx.Node) -> bool:
    return args(node)[1] == 0 or not args(node)[2]


def _always(node: fx.Node, source: fx.Node) -> bool:
    return True


_Test = Callable[[fx.Node, fx.Node], bool]

_TESTS: tuple[tuple[tuple[object, ...], _Test], ...] = (
    (CASTS, _keeps_type),
    ((aten.dropout.default,), _drops_nothing),
    ((aten.slice.Tensor,), _is_full_slice),
    ((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor), _is_identity(1.0)),
    ((aten.add.Tensor, aten.sub.Tensor), _is_identity(0.0)),
    ((aten.expand.default,), same_shape),
    ((aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default), _always),
)


def _whole(node: fx.Node) -> fx.Node | None:
    """For a concatenation: its only part that is not empty, or the tensor whose slices it reassembles."""
    tensors, *rest = args(node)
    axis = rest[0] if rest else 0
    assert isinstance(tensors, (list, tuple))
    assert isinstance(axis, int)
    parts = [part for part in tensors if isinstance(part, fx.Node) and value(part).shape[axis] != 0]
    if len(parts) == 1:
        return parts[0]
    if len(parts) < len(tensors):
        node.args = (parts, *rest)
    runs = [_slice_of(part, axis % value(node).dim()) for part in parts]
    expected: object = 0
    for source, start, end in runs:
        if source is not runs[0][0] or start != expected:
            return None
        expected = end
    source = runs[0][0]
    return source if source is not None and same_shape(source, node) else None


def _slice_of(part: fx.Node, axis: int) -> tuple[fx.Node | None, int, int]:
    """The tensor of which `part` is a slice along `axis`, its start and its end."""
    size = value(part).shape[axis]
    if is_call(part, operator.getitem):
        pieces, number = args(part)
        if is_call(pieces, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
            source = args(pieces)[0]
            along = args(pieces)[2] if len(args(pieces)) > 2 else 0
            sizes = [each.shape[axis] for each in pieces.meta[VALUE]]
            if along % value(part).dim() == axis:
                return source, sum(sizes[:number]), sum(sizes[: number + 1])
    elif is_call(part, aten.slice.Tensor) and len(args(part)) >= 3:
        source, along, start = args(part)[:3]
        if along % value(part).dim() == axis and (len(args(part)) < 5 or args(part)[4] == 1):
            start = start or 0
            if start < 0:
                start += value(source).shape[axis]
            return source, start, start + size
    return None, 0, 0

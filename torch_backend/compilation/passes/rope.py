"""Moves rotary embedding of queries and keys, and norms of their heads, into the operation that writes pages."""

from __future__ import annotations

from torch import fx

from torch_backend.compilation.graph import (
    CASTS,
    RESHAPES,
    VALUE,
    Program,
    args,
    aten,
    call,
    calls,
    factors,
    flattened_heads,
    is_call,
    only_user,
    parts_of,
    replace_node,
    side_by_side,
    source,
    uncast,
    value,
    weight_of,
)
from torch_backend.compilation.step import attend, rms_norm, rotation


def fuse_rope(program: Program) -> int:
    """Fuses the rotation of whole heads with pairs (i, i + head_dim / 2), if queries and keys use the same tables."""
    found, graph = 0, program.body
    tables: dict[tuple[fx.Node, fx.Node], fx.Node | None] = {}
    for node in calls(graph, attend):
        parts = parts_of(args(node)[2])
        if parts is None or len(parts) != 3 or len(args(node)) > 3:
            continue
        query, key = _match_rotation(parts[0]), _match_rotation(parts[1])
        if query is None or key is None or query[1:] != key[1:]:
            continue
        if query[1:] not in tables:
            tables[query[1:]] = _tables(graph, *query[1:])
        rotated_by = tables[query[1:]]
        if rotated_by is None:
            continue
        with graph.inserting_before(node):
            flat = [flattened_heads(graph, query[0]), flattened_heads(graph, key[0]), parts[2]]
            arguments = (*args(node)[:2], side_by_side(graph, flat), rotated_by)
            new = call(graph, attend, arguments, like=node)
        replace_node(node, new)
        found += 1
    return found


def _match_rotation(flat: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """For rotated heads: the heads before rotation, `[1, T, heads, head_dim]`, and the tables of cosines and sines."""
    if not is_call(flat, *RESHAPES):
        return None
    by_token = args(flat)[0]
    rotated = _match_transpose(by_token)
    if rotated is None or rotated.op != "call_function":
        return None
    dtype = value(rotated).dtype
    while is_call(rotated, *CASTS):
        rotated = args(rotated)[0]
    terms = factors(rotated, aten.add.Tensor)
    if terms is None:
        return None
    for straight, crossed in (terms, terms[::-1]):
        found = _match_rotated_sum(straight, crossed)
        if found is not None:
            heads = _match_transpose(uncast(found[0], dtype))
            return None if heads is None or value(heads).dtype != dtype else (heads, *found[1:])
    return None


def _match_rotated_sum(straight: fx.Node, crossed: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """For `x * cos + rotate_half(x) * sin`: x and the tables."""
    first, second = factors(straight), factors(crossed)
    if first is None or second is None:
        return None
    for x, cosines in (first, first[::-1]):
        for half_rotated, sines in (second, second[::-1]):
            by = _match_head_table(cosines), _match_head_table(sines)
            if by[0] is not None and by[1] is not None and _is_half_rotated(half_rotated, x):
                return x, by[0], by[1]
    return None


def _is_half_rotated(node: fx.Node, x: fx.Node) -> bool:
    """Whether `node` is `cat(-second half of x, first half of x)`."""
    parts = parts_of(node)
    if parts is None or len(parts) != 2 or not is_call(parts[0], aten.neg.default):
        return False
    half = value(x).shape[-1] // 2
    axis = value(x).dim() - 1
    second, first = args(parts[0])[0], parts[1]
    for part, start, end in ((first, 0, half), (second, half, 2 * half)):
        if not is_call(part, aten.slice.Tensor) or args(part)[0] is not x or args(part)[1] not in (-1, axis):
            return False
        begins, ends = (*args(part)[2:4], None)[:2]
        if (begins or 0) != start or min(2 * half if ends is None else ends, 2 * half) != end:
            return False
    return True


def _match_transpose(node: object) -> fx.Node | None:
    """For the transposition of `[1, heads, T, n]` and `[1, T, heads, n]`, in either direction: its input."""
    if is_call(node, aten.transpose.int) and set(args(node)[1:]) == {1, 2}:
        return source(node)
    return None


def _match_head_table(node: fx.Node) -> fx.Node | None:
    """A table `[1, T, head_dim]` that multiplies every head."""
    if is_call(node, aten.unsqueeze.default) and args(node)[1] == 1:
        return source(node)
    return None


def _tables(graph: fx.Graph, cosines: fx.Node, sines: fx.Node) -> fx.Node | None:
    """Creates the node that computes the backend's tables, once for all layers; None for tables whose halves differ."""
    parts = _match_table(cosines, aten.cos.default), _match_table(sines, aten.sin.default)
    if parts[0] is None or parts[1] is None or parts[0][0] is not parts[1][0]:
        return None
    angles = parts[0][0]
    with graph.inserting_after(max(cosines, sines)):
        node = graph.call_function(rotation, ())
    halves = []
    with graph.inserting_before(node):
        for part, target in zip(parts, (aten.cos.default, aten.sin.default), strict=True):
            assert part is not None
            table = call(graph, target, (angles,), like=angles)
            if part[1] != 1.0:
                table = call(graph, aten.mul.Tensor, (table, part[1]), like=angles)
            halves.append(table)
    node.args = tuple(halves)
    node.meta[VALUE] = None
    return node


def _match_table(node: fx.Node, function: object) -> tuple[fx.Node, float] | None:
    """For `function(cat(angles, angles)) * factor`, cast or not: the angles and the factor."""
    factor = 1.0
    while is_call(node, *CASTS) or (is_call(node, aten.mul.Tensor) and isinstance(args(node)[1], (int, float))):
        if is_call(node, aten.mul.Tensor):
            factor *= args(node)[1]
        node = args(node)[0]
    if not is_call(node, function):
        return None
    parts = parts_of(args(node)[0])
    if parts is None or len(parts) != 2 or parts[0] is not parts[1]:
        return None
    return parts[0], factor


def fuse_head_norms(program: Program) -> int:
    """Fuses RMS norms of each head of queries and keys that have the same eps."""
    found, graph = 0, program.body
    for node in calls(graph, attend):
        parts = parts_of(args(node)[2])
        if parts is None or len(parts) != 3 or len(args(node)) > 4:
            continue
        of_query, of_key = _match_norm(parts[0]), _match_norm(parts[1])
        if of_query is None or of_key is None or of_query[2] != of_key[2]:
            continue
        (query, query_weight, eps), (key, key_weight, _) = of_query, of_key
        with graph.inserting_before(node):
            flat = [flattened_heads(graph, query), flattened_heads(graph, key), parts[2]]
            rotated_by = args(node)[3] if len(args(node)) > 3 else None
            arguments = (*args(node)[:2], side_by_side(graph, flat), rotated_by, query_weight, key_weight, eps)
            new = call(graph, attend, arguments, like=node)
        replace_node(node, new)
        found += 1
    return found


def _match_norm(flat: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """For heads that are normalised one by one: the heads before the norm, the weight and eps."""
    if not is_call(flat, *RESHAPES) or not is_call(args(flat)[0], rms_norm) or only_user(args(flat)[0]) is None:
        return None
    _, heads, weight, eps = args(args(flat)[0])
    if value(heads).dim() != 4 or weight_of(weight) is None:
        return None
    return heads, weight, eps

"""Replaces attention by attention over pages, which first writes the step's keys and values."""

from __future__ import annotations

from typing import Any

from torch_backend.attention.interface import AttentionOptions
from torch_backend.compilation.graph import (
    AttentionSite,
    Program,
    args,
    call,
    calls,
    flattened_heads,
    replace_node,
    side_by_side,
    step_of,
    value,
    weight_of,
)
from torch_backend.compilation.markers import ATTENTION
from torch_backend.compilation.refusal import refused
from torch_backend.compilation.step import attend


def page_attention(program: Program) -> int:
    """Replaces every call of attention, and stores its options in `Program.sites`. Raises `ConfigError` if a layer
    attends twice, or has sinks that are not a weight."""
    found, graph = 0, program.body
    for node in calls(graph, ATTENTION):
        query, key, values, sinks, layer, *numbers = _arguments(node)
        if layer in program.sites:
            raise refused(
                program.model_type, f"layer {layer} computes attention twice; only one attention per layer is supported"
            )
        learnt = weight_of(sinks)
        if sinks is not None and learnt is None:
            raise refused(program.model_type, f"layer {layer} has sinks that are not a weight: {sinks}")
        program.sites[layer] = AttentionSite(
            heads=int(value(query).shape[2]),
            kv_heads=int(value(key).shape[2]),
            head_dim=int(value(query).shape[3]),
            options=AttentionOptions(*numbers),
            sinks=None if learnt is None else learnt.parts[0],
        )
        with graph.inserting_before(node):
            qkv = side_by_side(graph, [flattened_heads(graph, each) for each in (query, key, values)])
            new = call(graph, attend, (step_of(graph), layer, qkv), like=node)
        replace_node(node, new)
        found += 1
    return found


def _arguments(node: Any) -> Any:
    """All eight arguments; a trace omits trailing ones that have their defaults."""
    return tuple(args(node)) + (None,) * (8 - len(args(node)))

"""Functions of tensors as graphs for the passes that rewrite them, without a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_backend.compilation.graph import WEIGHT, Program, Weight

TOKENS = 7


def program_of(
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    weights: dict[str, torch.Tensor],
) -> Program:
    """The body of a program that computes `function(*inputs, *weights)`."""
    traced = make_fx(lambda *given: function(*given), tracing_mode="fake", pre_dispatch=True)(
        *inputs, *weights.values()
    )
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.placeholder("step")
    names = [None] * len(inputs) + list(weights)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name = names.pop(0)
            if name is None:
                copies[node] = graph.placeholder(node.name)
            else:
                copies[node] = graph.create_node("get_attr", name)
                value = weights[name]
                copies[node].meta[WEIGHT] = Weight((name,), tuple(value.shape), value.dtype)
        else:
            copies[node] = graph.node_copy(node, lambda other: copies[other])
        copies[node].meta["val"] = node.meta.get("val")
    empty = fx.Graph()
    empty.placeholder("step")
    empty.output(empty.placeholder("hidden"))
    return Program("made-up", torch.float32, graph, empty, {})


def called(program: Program) -> list[str]:
    """Names of the functions that the body calls, in order."""
    return [node.target.__name__ for node in program.body.nodes if node.op == "call_function"]

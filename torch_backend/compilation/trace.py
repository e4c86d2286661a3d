"""Traces a model of transformers to graphs of ATen operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from transformers import PreTrainedModel

from sglang_jax.errors import ConfigError
from torch_backend.compilation.graph import CONSTANT, VALUE, WEIGHT, Program, Weight, args, calls
from torch_backend.compilation.markers import HIDDEN_STATES, hidden_states
from torch_backend.compilation.refusal import refused

logger = logging.getLogger(__name__)

_TRACED_TOKENS = 9973
"""A prime that differs from all sizes of models. Only shapes are computed, so a large one costs nothing."""

_TRIED_TOKENS = (2, 3, 8, 16, 64, 100, 256, 4096)
"""Numbers of tokens that no condition of the trace may exclude. The twin checks single tokens."""

_DEPENDS_ON_DATA = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def trace(model: PreTrainedModel) -> Program:
    """Returns the graphs of a model, for any number of tokens. Raises `ConfigError` naming the reason and the place if
    a model's code cannot be traced."""
    begin = time.perf_counter()
    kind = model.config.model_type
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    untyped: Any = model
    body: torch.nn.Module = untyped.get_decoder()
    hook = body.register_forward_hook(_mark)
    shapes = ShapeEnv()
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    tokens = torch.zeros((1, _TRACED_TOKENS), dtype=torch.int64)
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DUCK])
    inputs = (
        fake.from_tensor(tokens, symbolic_context=dynamic),
        fake.from_tensor(tokens.clone(), symbolic_context=dynamic),
        {name: fake.from_tensor(each.detach(), static_shapes=True) for name, each in {**parameters, **buffers}.items()},
    )

    def run(tokens: torch.Tensor, positions: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        logits: torch.Tensor = torch.func.functional_call(model, state, kwargs=given).logits
        return logits

    try:
        with torch.no_grad():
            traced = make_fx(run, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
    except _DEPENDS_ON_DATA as error:
        raise refused(kind, f"its computation depends on data: {_first_line(error)}{_place(error)}") from error
    except ConfigError:
        raise  # attention refused it while it was traced
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, LookupError) as error:
        raise refused(kind, f"its code cannot be traced: {_first_line(error)}{_place(error)}") from error
    finally:
        hook.remove()
    _check_guards(shapes, kind)
    program = _cut(traced, kind, model.dtype, parameters, buffers)
    _refuse_mutation(program)
    logger.info(
        "Traced %s in %.1f s: %d operations",
        kind,
        time.perf_counter() - begin,
        sum(len(g.nodes) for g in program.graphs),
    )
    return program


def _mark(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Marks the hidden states between a model's body and its head."""
    output["last_hidden_state"] = hidden_states(output["last_hidden_state"])
    return output


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _place(error: BaseException) -> str:
    """The place in the model's own code where an error came from."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "/transformers/models/" in code.co_filename:
            name = code.co_filename.rpartition("/")[2]
            found = f" (in {code.co_qualname}, {name}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return found


def _check_guards(shapes: ShapeEnv, kind: str) -> None:
    """Refuses a trace that is only correct for some numbers of tokens."""
    for guard in shapes.guards:
        for count in _TRIED_TOKENS:
            found = guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, count))
            if found is sympy.false:
                raise refused(
                    kind, f"its code takes another path if {sympy.Not(guard.expr)}, for example with {count} tokens"
                )


def _cut(
    traced: fx.GraphModule,
    kind: str,
    dtype: torch.dtype,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Program:
    """Splits the trace into two graphs, before and after the hidden states, with weights instead of inputs."""
    constants: dict[str, torch.Tensor] = dict(buffers)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders[2:], [*parameters, *buffers], strict=True))
    marks = list(calls(traced.graph, HIDDEN_STATES))
    if len(marks) != 1:
        raise refused(kind, f"its body returns hidden states {len(marks)} times instead of once")
    (result,) = (node for node in traced.graph.nodes if node.op == "output")
    after_mark = _depends_on(marks[0])
    graphs = []
    for in_head in (False, True):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.placeholder("step")
        inputs = (marks[0],) if in_head else tuple(placeholders[:2])
        for node, name in zip(inputs, ("hidden",) if in_head else ("tokens", "positions"), strict=True):
            copies[node] = graph.placeholder(name)
            copies[node].meta.update(node.meta)
        end = args(result)[0] if in_head else args(marks[0])[0]
        end = end[0] if isinstance(end, (tuple, list)) else end
        wanted = _needed(end, stop=marks[0] if in_head else None)
        for node in traced.graph.nodes:
            if node not in wanted or node in copies:
                continue
            if in_head and node in placeholders[:2]:
                raise refused(kind, "its head reads tokens or positions")
            copies[node] = _copy(traced, graph, node, copies, names, parameters, constants)
        graph.output(copies[end])
        graphs.append(graph)
        assert in_head or not after_mark & copies.keys()
    return Program(kind, dtype, graphs[0], graphs[1], constants)


def _copy(
    traced: fx.GraphModule,
    graph: fx.Graph,
    node: fx.Node,
    copies: dict[fx.Node, fx.Node],
    names: Mapping[fx.Node, str],
    parameters: Mapping[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
) -> fx.Node:
    """Copies a node into one of the two graphs: inputs for weights and constants become nodes that read them."""
    if node in names:
        name = names[node]
        new = graph.create_node("get_attr", name.replace(".", "_"))
        if name in parameters:
            each = parameters[name]
            new.meta[WEIGHT] = Weight((name,), tuple(each.shape), each.dtype)
        else:
            new.meta[CONSTANT] = name
    elif node.op == "get_attr":
        held = getattr(traced, str(node.target))
        constants[str(node.target)] = held
        new = graph.create_node("get_attr", str(node.target))
        new.meta[CONSTANT] = str(node.target)
    else:
        new = graph.node_copy(node, lambda other: copies[other])
    new.meta[VALUE] = node.meta.get(VALUE)
    return new


def _needed(end: fx.Node, stop: fx.Node | None) -> set[fx.Node]:
    """The node and all nodes from which it is computed, not beyond `stop`."""
    found: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node is not stop:
                waiting += node.all_input_nodes
    return found


def _depends_on(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += each.users
    return found


def _refuse_mutation(program: Program) -> None:
    """Refuses operations with effects other than their result, because passes move and merge operations."""
    for graph in program.graphs:
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                raise refused(program.model_type, f"its code writes into a tensor: {node.format_node()}")

"""A rewritten graph with its weights, which the engine runs instead of a `Transformer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx, nn

from sglang_jax.architectures.model_config import ModelConfig, group_of_layers, num_paged_groups
from sglang_jax.architectures.parallelism import Parallelism
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.batch import ForwardBatch
from torch_backend.compilation.graph import (
    CONSTANT,
    Program,
    Weight,
    args,
    aten,
    calls,
    is_call,
    known_weight,
    move,
    only_user,
    step_of,
    weight_of,
)
from torch_backend.compilation.refusal import refused
from torch_backend.compilation.step import GraphStep, LayerForm, Product, gelu_mul, multiply, silu_mul
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.packed import PackedMatrix, packing_works
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations
from torch_backend.parallel import SINGLE, TensorParallel

ReadWeight = Callable[[Weight], torch.Tensor]
"""Creates the value of a weight, with its shape and dtype, on the host."""


class TracedTransformer:
    """A model that is built without values; `load` must be called before it runs. Each of several ranks has its shard.
    The graph's `sites` must agree with `config`."""

    def __init__(
        self,
        program: Program,
        config: ModelConfig,
        *,
        device: torch.device,
        operations: Operations,
        attention: AttentionImplementation,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        self.program = program
        self.config = config
        self.device = device
        self.shard = ModelShard.of(config, parallel.rank, Parallelism(parallel.size))
        self.dtype = program.dtype
        self._operations = operations
        self._attention = attention
        self._parallel = parallel
        self._groups = num_paged_groups(config)
        self._layers: tuple[LayerForm, ...] = ()
        self._products: list[Product] = []
        self._body: Callable[..., torch.Tensor] | None = None
        self._head: Callable[..., torch.Tensor] | None = None

    def __call__(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> torch.Tensor:
        """Returns hidden states `[T, hidden]`. Writes the step's keys and values into `kv`."""
        assert self._body is not None, "the model is loaded"
        step = GraphStep.of(
            batch, self._groups, self._operations, self._attention, self._layers, kv, self._products, self._parallel
        )
        return self._body(step, batch.tokens.long()[None], batch.positions.long()[None])[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 `[m, vocab]` for hidden states `[m, hidden]`."""
        assert self._head is not None, "the model is loaded"
        step = GraphStep(self._operations, self._products, parallel=self._parallel)
        return self._head(step, hidden[None])[0].float()

    @property
    def layers_with_sinks(self) -> tuple[int, ...]:
        return tuple(number for number, site in sorted(self.program.sites.items()) if site.sinks is not None)

    def weight_bytes(self) -> int:
        """Bytes of the weights once they are loaded; known before."""
        plain, matrices = self._uses()
        # Lookups read rows of tied embeddings in the plain form, whatever form the product reads.
        again = matrices if self._packs() else matrices - plain
        return sum(weight.nbytes for weight in (*plain, *again))

    def load(self, read: ReadWeight, *, pack: bool = True) -> None:
        """Loads every weight, created by `read` on the host. On a CPU where torch can, matrices are then packed, unless
        `pack` is false. At most one matrix is in memory twice. The graphs must not be rewritten afterwards."""
        self._layers = tuple(self._form(number, read) for number in range(self.config.num_layers))
        loaded: dict[Weight, torch.Tensor] = {}

        def value(weight: Weight) -> torch.Tensor:
            found = loaded.get(weight)
            return read(weight).to(self.device) if found is None else found

        plain, _ = self._uses()
        for weight in plain:
            loaded[weight] = value(weight)
        packs = pack and self._packs()
        self._body, self._head = (self._callable(graph, value, packs) for graph in self.program.graphs)

    def _packs(self) -> bool:
        return self.device.type == "cpu" and packing_works(self.dtype)

    def _form(self, layer: int, read: ReadWeight) -> LayerForm:
        site = self.program.sites[layer]
        options, group = site.options, group_of_layers(self.config)[layer]
        assert group is not None
        if site.sinks is not None:
            sinks = read(Weight((site.sinks,), (site.heads,), torch.float32))
            options = replace(options, sinks=sinks.to(self.device))
        return LayerForm(site.head_dim, group, options)

    def _uses(self) -> tuple[set[Weight], set[Weight]]:
        """The weights that are read in their plain form, and those of linear layers."""
        plain: set[Weight] = set()
        matrices: set[Weight] = set()
        for graph in self.program.graphs:
            for node in graph.nodes:
                weight = weight_of(node)
                if weight is not None:
                    in_linear = [_is_linear(user) and node in args(user)[1:] for user in node.users]
                    if any(in_linear):
                        matrices.add(weight)
                    if not all(in_linear):
                        plain.add(weight)
        return plain, matrices

    def _callable(self, graph: fx.Graph, value: ReadWeight, packs: bool) -> Callable[..., torch.Tensor]:
        """The graph as a function, with its linear layers bound to their matrices."""
        move(graph, self.device)
        for node in calls(graph, aten.linear.default):
            if _is_linear(node):
                self._bind(graph, node, value, packs)
        root = nn.Module()
        for number, node in enumerate(node for node in graph.nodes if node.op == "get_attr"):
            weight = weight_of(node)
            held = self.program.constants[node.meta[CONSTANT]].to(self.device) if weight is None else value(weight)
            node.target = f"held_{number}"
            root.register_buffer(node.target, held)
        module = fx.GraphModule(root, graph)
        return cast("Callable[..., torch.Tensor]", module.forward)

    def _bind(self, graph: fx.Graph, node: fx.Node, value: ReadWeight, packs: bool) -> None:
        x, *read = args(node)
        weight, bias = (*(value(known_weight(each)) for each in read), None)[:2]
        assert isinstance(weight, torch.Tensor)
        end = node
        user = only_user(node)
        if packs and is_call(user, silu_mul, gelu_mul):
            assert user is not None
            end, product = user, _packed_gated(weight, bias, silu=user.target is silu_mul)
        else:
            product = PackedMatrix(weight, bias).multiply if packs else _plain(weight, bias)
        with graph.inserting_before(end):
            new = graph.call_function(multiply, (step_of(graph), len(self._products), x))
        self._products.append(product)
        end.replace_all_uses_with(new)
        for done in dict.fromkeys((end, node)):
            graph.erase_node(done)
        for each in read:
            if isinstance(each, fx.Node) and not each.users:
                graph.erase_node(each)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: nn.functional.linear(x, weight, bias)


def _packed_gated(weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> Product:
    """`activation(gate(x)) * up(x)` in two products."""
    biases = (None, None) if bias is None else bias.chunk(2)
    gate, up = (PackedMatrix(*each) for each in zip(weight.chunk(2), biases, strict=True))
    activated = gate.multiply_then_silu if silu else gate.multiply_then_gelu
    return lambda x: up.multiply_then_scale(x, activated(x))


def _is_linear(node: fx.Node) -> bool:
    return is_call(node, aten.linear.default) and all(weight_of(each) is not None for each in args(node)[1:])


def check_sites(program: Program, config: ModelConfig, shard: ModelShard) -> None:
    """Raises `ConfigError` naming the first layer in which the graph's attention on this rank differs from the
    config."""
    unknown = sorted(program.sites.keys() - range(config.num_layers))
    for number, layer in enumerate(config.layers):
        attention, site = layer.kv_attention, program.sites.get(number)
        assert attention is not None
        if site is None or unknown:
            raise refused(
                program.model_type,
                f"attention is computed in layers {sorted(program.sites)}, but the config has {config.num_layers}",
            )
        window = site.options.window
        # A window that no sequence exceeds has no effect.
        sees = None if window is None or window >= config.longest_context else window
        found = (site.heads, site.kv_heads, site.head_dim, sees)
        heads, kv_heads = len(shard.heads(attention.num_heads)), len(shard.kv_heads(attention.num_kv_heads))
        wanted = (heads, kv_heads, attention.head_dim, attention.window)
        if found != wanted:
            raise refused(
                program.model_type,
                f"layer {number} has heads, kv heads, head size and window {found}, but the config says {wanted}",
            )

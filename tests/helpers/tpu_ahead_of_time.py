"""Compiles kernels for real TPUs, with libtpu and no TPU, in a separate process.

libtpu reads its environment once, when it is loaded, and stays loaded, so the tests' own process does not load it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tpu_kernels.schedule import DUMP_FLAGS

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:1x1",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:1x1",
    "tpu7x": "tpu7x:2x2x1",
}

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Kernel:
    """Attention over pages of this form, for a decode step (as many tokens as rows) or a mixed one, after a write.

    `blocks`: pages of each block of keys, and queries of each program, instead of the chosen ones. `value_dim`: of
    latent attention, whose values are the first numbers of the keys.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    storage: str = "bfloat16"
    tokens: int = 64
    rows: int = 64
    columns: int = 512
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scales: bool = False
    value_dim: int | None = None
    blocks: tuple[int, int] | None = None
    checked: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class StateKernel:
    """The scan of a layer with states, in a decode step (as many tokens as rows) or a mixed one."""

    heads: int = 32
    groups: int = 16
    key_dim: int = 128
    value_dim: int = 128
    delta: bool = True
    states: str = "float32"
    tokens: int = 64
    rows: int = 64
    slots: int = 80
    checked: bool = False
    fixed: bool = False

    @property
    def pool(self) -> tuple[int, ...]:
        return self.slots, self.heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class ConvolutionKernel:
    """The convolution of a layer with states, in a decode step (as many tokens as rows) or a mixed one."""

    channels: int = 8192
    width: int = 4
    bias: bool = False
    storage: str = "bfloat16"
    tokens: int = 64
    rows: int = 64
    slots: int = 80
    checked: bool = False
    fixed: bool = False

    @property
    def pool(self) -> tuple[int, ...]:
        from sglang_jax.kernels.causal_convolution import tail_shape

        return self.slots, *tail_shape(self.width - 1, self.channels, tiled=True)


@dataclass(frozen=True)
class FilterKernel:
    """Top-k and top-p of some lines of logits."""

    lines: int = 16
    vocab_size: int = 128_256


@dataclass(frozen=True)
class GroupKernel:
    """A product with weights in groups, in int4 also floats of 4 bits (`float4`). `experts`: the number of
    matrices, with `rows` rows for each; 0 for one matrix."""

    rows: int = 64
    inputs: int = 4096
    outputs: int = 1024
    group: int = 128
    levels: str = "int4"
    scales: str = "bfloat16"
    zeros: bool = False
    experts: int = 0


@dataclass(frozen=True)
class ExpertKernel:
    """The two kernels of a layer's experts on one of several devices: `own` of `experts`, of which each of `tokens`
    chooses some. By default, those of Qwen3-30B-A3B on four devices."""

    tokens: int = 64
    hidden: int = 2048
    columns: int = 768
    own: int = 32
    experts: int = 128
    chosen: int = 8
    dtype: str = "bfloat16"
    biases: bool = False


_TYPES = (Kernel, StateKernel, ConvolutionKernel, FilterKernel, GroupKernel, ExpertKernel)
AnyKernel = Kernel | StateKernel | ConvolutionKernel | FilterKernel | GroupKernel | ExpertKernel
_KINDS = {kind.__name__: kind for kind in _TYPES}


@dataclass(frozen=True)
class Outcome:
    """The compiler's result: an error or None, the bytes that it updates in place, and the bytes of temporary
    memory."""

    error: str | None
    in_place: int = 0
    temporary: int = 0


def compile_kernels(chip: str, kernels: Sequence[AnyKernel], dumps: Path | None = None) -> list[Outcome]:
    """One outcome for each kernel. `dumps`: a folder for the compiler's schedules."""
    request = json.dumps([(type(kernel).__name__, asdict(kernel)) for kernel in kernels])
    root = Path(__file__).parents[2]
    # `make test` keeps libtpu in a separate folder: wherever JAX can import it, JAX searches for a TPU.
    folders = [
        str(root),
        str(root / "tests"),
        str(root / "benchmarks"),
        str(Path(sys.prefix) / "libtpu"),
        os.environ.get("PYTHONPATH", ""),
    ]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, __file__, TOPOLOGIES[chip]],
        input=request.encode(),
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": path,
            **({} if dumps is None else {"LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=dumps)}),
        },
        check=True,
    )
    return [Outcome(**outcome) for outcome in json.loads(done.stdout.decode().splitlines()[-1])]


def _compile(topology_name: str, kernels: list[AnyKernel]) -> list[Outcome]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sglang_jax.kernels.expert_groups_pallas import ExpertTiles, filled_up, multiply_experts_in_groups
    from sglang_jax.kernels.experts import ExpertChoice, ExpertProducts, ExpertWeights, multiply_experts
    from sglang_jax.kernels.group_product_pallas import Float4, GroupedWeights, multiply_in_groups
    from sglang_jax.kernels.kept_distance_pallas import fits, kept_distance
    from sglang_jax.kernels.kv_storage import page_shape
    from sglang_jax.kernels.ragged_paged_attention import (
        AttentionImplementation,
        AttentionOptions,
        ragged_paged_attention,
        write_kv,
    )
    from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Shape, current_chip
    from sglang_jax.kernels.ragged_paged_attention.pallas.table import Entry, Phase, Source, tuned
    from sglang_jax.kernels.state_rows import StateRows
    from sglang_jax.kernels.state_scan import ScanInputs
    from sglang_jax.kernels.states import convolve_states, scan_states
    from sglang_jax.layers.batch import ForwardBatch

    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole)

    def implementation_of(kernel: Kernel | StateKernel | ConvolutionKernel) -> AttentionImplementation:
        if kernel.fixed:
            checked, unchecked = AttentionImplementation.PALLAS_FIXED_CHECKED, AttentionImplementation.PALLAS_FIXED
        else:
            checked, unchecked = AttentionImplementation.PALLAS_CHECKED, AttentionImplementation.PALLAS
        return checked if kernel.checked else unchecked

    def step(
        pallas: AttentionImplementation,
        kv_pages: jax.Array,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array | None,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]:
        kv_pages = write_kv(pallas, kv_pages, keys, values, batch.write_slots, options=options)
        return ragged_paged_attention(pallas, queries, kv_pages, batch, scale=0.1, options=options), kv_pages

    def one(kernel: Kernel) -> Outcome:
        tokens, rows = array((kernel.tokens,)), array((kernel.rows,))
        batch = ForwardBatch(
            tokens=tokens,
            positions=tokens,
            write_slots=tokens,
            page_table=array((kernel.rows, kernel.columns)),
            kv_lens=rows,
            query_starts=array((kernel.rows + 1,)),
            num_decode=array(()),
        )
        options = AttentionOptions(
            window=kernel.window,
            soft_cap=kernel.soft_cap,
            value_dim=kernel.value_dim,
            sinks=array((kernel.heads,), "float32") if kernel.sinks else None,
            kv_scales=array((kernel.kv_heads, 2), "float32") if kernel.scales else None,
        )
        activations = "float32" if kernel.storage == "float32" else "bfloat16"
        fresh = array((kernel.tokens, kernel.kv_heads, kernel.head_dim), activations)
        shape = page_shape(
            256, kernel.kv_heads, kernel.page_size, kernel.head_dim, tiled=True, shared=kernel.value_dim is not None
        )
        queries = array((kernel.tokens, kernel.heads, kernel.head_dim), activations)
        if kernel.blocks is not None:
            own = Shape.of(
                current_chip(),
                kernel.heads,
                kernel.kv_heads,
                kernel.head_dim,
                kernel.page_size,
                kernel.storage,
            )
            tuned()[own, Phase.PREFILL] = Entry(own, Phase.PREFILL, *kernel.blocks, Source.SCHEDULE)
        try:
            lowered = jax.jit(step, static_argnums=0, donate_argnums=1).lower(
                implementation_of(kernel),
                array(shape, kernel.storage),
                queries,
                fresh,
                None if kernel.value_dim is not None else fresh,
                batch,
                options,
            )
            memory = lowered.compile().memory_analysis()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def rows_of(kernel: StateKernel | ConvolutionKernel) -> StateRows:
        rows, tokens = array((kernel.rows,)), array((kernel.tokens,))
        return StateRows(
            begin=rows,
            fresh=array((kernel.rows,), "bool"),
            own=rows,
            sequences=tokens,
            offsets=tokens,
            query_starts=array((kernel.rows + 1,)),
            num_decode=array(()),
            decode_only=kernel.tokens == kernel.rows,
        )

    def one_of_convolutions(kernel: ConvolutionKernel) -> Outcome:
        x = array((kernel.tokens, kernel.channels), kernel.storage)
        weight = array((kernel.channels, kernel.width), kernel.storage)
        bias = array((kernel.channels,), kernel.storage) if kernel.bias else None
        try:
            lowered = jax.jit(convolve_states, static_argnums=0, donate_argnums=4).lower(
                implementation_of(kernel), x, weight, bias, array(kernel.pool, kernel.storage), rows_of(kernel)
            )
            memory = lowered.compile().memory_analysis()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def one_of_states(kernel: StateKernel) -> Outcome:
        of_tokens = lambda *shape: array((kernel.tokens, *shape), "float32")  # noqa: E731
        keys, decays = of_tokens(kernel.groups, kernel.key_dim), of_tokens(kernel.heads)
        values = of_tokens(kernel.heads, kernel.value_dim)
        inputs = ScanInputs(keys, keys, values, decays, decays if kernel.delta else None)
        try:
            lowered = jax.jit(scan_states, static_argnums=0, donate_argnums=2).lower(
                implementation_of(kernel), inputs, array(kernel.pool, kernel.states), rows_of(kernel)
            )
            memory = lowered.compile().memory_analysis()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def one_of_filters(kernel: FilterKernel) -> Outcome:
        def of_lines(dtype: str) -> jax.ShapeDtypeStruct:
            return array((kernel.lines,), dtype)

        if not fits(kernel.vocab_size):
            return Outcome("it does not fit")
        distances = array((kernel.lines, kernel.vocab_size), "float32")
        asked = of_lines("bool"), of_lines("bool")
        lowered = jax.jit(kept_distance).lower(distances, of_lines("int32"), of_lines("float32"), *asked)
        try:
            memory = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def one_of_groups(kernel: GroupKernel) -> Outcome:
        stack = (kernel.experts,) if kernel.experts else ()
        of_groups = *stack, kernel.inputs // kernel.group, kernel.outputs
        float4 = kernel.levels == "float4"
        weights = GroupedWeights(
            array((*stack, kernel.inputs, kernel.outputs), "int4" if float4 else kernel.levels),
            array(of_groups, kernel.scales),
            array(of_groups, "int8") if kernel.zeros else None,
            Float4.of_target() if float4 else None,
        )
        if stack:
            weights = jax.tree.map(lambda each: array(each.shape, each.dtype.name), jax.eval_shape(filled_up, weights))
        x = array((kernel.rows * max(kernel.experts, 1), kernel.inputs), "bfloat16")
        tiles = ExpertTiles(array(stack, "int32"), array((1,), "int32"), array((1,), "int32"))
        try:
            if kernel.experts:
                lowered = jax.jit(multiply_experts_in_groups).lower(x, weights, tiles)
            else:
                lowered = jax.jit(multiply_in_groups).lower(x, weights)
            memory = lowered.compile().memory_analysis()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def one_of_experts(kernel: ExpertKernel) -> Outcome:
        rows = array((kernel.own, kernel.columns, kernel.hidden), kernel.dtype)
        inner, outer = (array((kernel.own, size), "float32") for size in (kernel.columns, kernel.hidden))
        scales = (None,) * 3 if kernel.dtype == "bfloat16" else (inner, inner, outer)
        weights = ExpertWeights(rows, rows, rows, *[inner if kernel.biases else None] * 2, None, *scales)
        choices = (kernel.tokens, kernel.chosen)
        choice = ExpertChoice(array(choices), array(choices, "float32"))
        x = array((kernel.tokens, kernel.hidden), "bfloat16")

        def products(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice) -> jax.Array:
            gate = lambda gates, ups: jax.nn.silu(gates) * ups  # noqa: E731
            return multiply_experts(ExpertProducts.KERNELS, x, weights, choice, gate, experts=kernel.experts)

        try:
            memory = jax.jit(products).lower(x, weights, choice).compile().memory_analysis()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return Outcome(str(error))
        return Outcome(None, memory.alias_size_in_bytes, memory.temp_size_in_bytes)

    def compiled(kernel: AnyKernel) -> Outcome:
        match kernel:
            case Kernel():
                return one(kernel)
            case StateKernel():
                return one_of_states(kernel)
            case ConvolutionKernel():
                return one_of_convolutions(kernel)
            case FilterKernel():
                return one_of_filters(kernel)
            case GroupKernel():
                return one_of_groups(kernel)
            case ExpertKernel():
                return one_of_experts(kernel)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return [compiled(kernel) for kernel in kernels]


if __name__ == "__main__":
    found = _compile(sys.argv[1], [_KINDS[kind](**fields) for kind, fields in json.load(sys.stdin)])
    print(json.dumps([asdict(outcome) for outcome in found]))

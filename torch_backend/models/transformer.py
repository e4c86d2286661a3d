"""A decoder-only model: embeddings, a list of layers, and a head."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LearntPositions, ModelConfig, group_of_layers, num_paged_groups
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.checkpoint.rotary import RotaryScaling
from sglang_jax.runner.freed_memory import FreedMemory
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.batch import ForwardBatch
from torch_backend.elementwise import directly, evenly
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.bfloat16 import Bfloat16Matrix, Bfloat16Weights
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.experts import Experts, SharedExpert
from torch_backend.layers.fixed_rows import FixedRows
from torch_backend.layers.grouped import GroupedMatrix
from torch_backend.layers.layout import Layout, PackedLayout
from torch_backend.layers.linear import Linear
from torch_backend.layers.matrix import PlainMatrix, QuantisedMatrix, table_for
from torch_backend.layers.norm import Norm
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import AttentionStep, LayerStep, PartOptions
from torch_backend.layers.pooler import PooledHead
from torch_backend.layers.shard import ModelShard
from torch_backend.layers.shards import TreeSums, of_shard
from torch_backend.models.decoder_layer import DecoderLayer
from torch_backend.operations import Operations, Rotation
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.rotary import NoRotation, RotaryTables

_MANY_KEYS = 2**8
"""Keys of a step from which on threads share attention, about."""


class Recordings(Protocol):
    """Records steps of at most `max_rows` rows, and runs them again: see `cpu_kernels.recording`."""

    @property
    def max_rows(self) -> int: ...

    def run(
        self,
        kind: Hashable,
        inputs: Sequence[torch.Tensor],
        layers: Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]],
    ) -> torch.Tensor: ...


class Embedding(nn.Module):
    """Rows of a table `[vocab, hidden]`, of which each shard has a range."""

    def __init__(self, shard: ModelShard, options: PartOptions) -> None:
        super().__init__()
        self.matrix = table_for(shard.vocabulary_rows, options.hidden_size, Part.EMBEDDING, options)
        of_shard(self.matrix, shard)
        self.shard = shard

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32 `[T]`, all within the vocabulary → this shard's part of `[T, hidden]`, to be summed over shards."""
        if self.shard.size == 1:
            return self.matrix.rows(tokens)
        rows = tokens - self.shard.vocabulary.start
        elsewhere = (rows < 0) | (rows >= self.matrix.shape[0])
        found = self.matrix.rows(rows.masked_fill(elsewhere, 0))
        return found.masked_fill(elsewhere[:, None], 0)


class AddedEmbeddings(Loadable):
    """See `LearntPositions`; every rank has all of it."""

    def __init__(self, config: LearntPositions, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._config = config
        self.positions = self.declare("positions", (config.rows, hidden_size), dtype, Part.POSITION_EMBEDDING)
        self.types: nn.Parameter | None = None
        if config.token_types:
            self.types = self.declare("types", (config.token_types, hidden_size), dtype, Part.TYPE_EMBEDDING)

    def forward(self, embedded: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Embeddings `[T, hidden]` of the tokens of `batch`, at positions below the longest context → `[T, hidden]`."""
        rows = functional.embedding(batch.positions + self._config.first, self.positions)
        if self.types is not None:
            separator = self._config.separator
            of_tokens = self.types[0] if separator is None else self.types[_token_types(batch, separator)]
            embedded = embedded + of_tokens
        return embedded + rows


def _token_types(batch: ForwardBatch, separator: int) -> torch.Tensor:
    """Whether each token follows a separator of its text, int64 `[T]`. Texts are whole."""
    ends = (batch.tokens == separator).long()
    before = ends.cumsum(0) - ends
    starts = torch.arange(len(ends), device=ends.device) - batch.positions
    return (before > before[starts]).long()


class Head(nn.Module):
    """Logits by a matrix `[vocab, hidden]`; each rank computes those of the rows of its shards."""

    def __init__(self, vocab_size: int, options: PartOptions, shards: Sequence[ModelShard]) -> None:
        super().__init__()
        hidden, parts = options.hidden_size, (Part.HEAD,)
        self.linears = tuple(Linear(hidden, (shard.vocabulary_rows,), parts, options) for shard in shards)
        self.modules_of_shards = nn.ModuleList(map(of_shard, self.linears, shards))
        self._vocab_size = vocab_size
        self._parallel = options.parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` → float32 `[m, vocab]`, on every rank."""
        own = torch.cat([linear(hidden) for linear in self.linears], dim=-1)
        return self._parallel.all_gather_last(own)[:, : self._vocab_size].float()


class Transformer(nn.Module):
    """The decoder with its embeddings and head, or a rank's shard of it. For inference: nothing has gradients."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        attention: AttentionImplementation,
        states: StateImplementation,
        parallel: TensorParallel,
        encodings: Encodings = all_plain,
        block_matrices: BlockMatrices | None = None,
        keeps_groups: bool = False,
        bfloat16: Bfloat16Weights | None = None,
        fixed: bool = False,
        num_shards: int | None = None,
        expert_parts: int = 1,
        recordings: Recordings | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.recordings = recordings
        self.fixed = fixed
        self.shards = ModelShard.of_rank(config, parallel.rank, Parallelism(parallel.size, expert_parts), num_shards)
        self.device, self.dtype = device, dtype
        if num_shards is not None:
            parallel = TreeSums(parallel)
        options = PartOptions(
            hidden_size=config.hidden_size,
            shard=self.shards[0],
            shards=self.shards if num_shards is not None else (),
            dtype=dtype,
            operations=operations,
            parallel=parallel,
            encodings=encodings,
            block_matrices=block_matrices,
            keeps_groups=keeps_groups,
            bfloat16=bfloat16,
            each=evenly if fixed else directly,
            fixed=fixed,
        )
        self.embeddings = tuple(Embedding(shard, options) for shard in self.shards)
        self.embeddings_of_shards = nn.ModuleList(self.embeddings)
        learnt = config.learnt_positions
        self.added = None if learnt is None else AddedEmbeddings(learnt, config.hidden_size, dtype)
        self.decoder_layers = tuple(DecoderLayer(layer, options, number) for number, layer in enumerate(config.layers))
        self.layers = nn.ModuleList(self.decoder_layers)
        self.final_norm = Norm(
            config.hidden_size, config.final_norm, Part.FINAL_NORM, dtype=dtype, operations=operations
        )
        self.head: Head | PooledHead
        if config.pooler is None:
            self.head = Head(config.vocab_size, options, self.shards)
        else:
            self.head = PooledHead(config.pooler, config.hidden_size)
        self.tied = config.tie_word_embeddings
        if self.tied:
            self.tie()
        ropes = list(dict.fromkeys((attention.rope, attention.rotary_dim) for attention in config.attention))
        self._rotary = tuple(_tables(rope, head_dim, config.max_position, device) for rope, head_dim in ropes)
        kinds = [
            None if group is None or attention is None else (ropes.index((attention.rope, attention.rotary_dim)), group)
            for attention, group in zip(
                (layer.attention for layer in config.layers), group_of_layers(config), strict=True
            )
        ]
        self._steps = [kind for kind in dict.fromkeys(kinds) if kind is not None]
        # The last entry is the step of layers without attention.
        self._step_of_layer = tuple(-1 if kind is None else self._steps.index(kind) for kind in kinds)
        self._num_groups = num_paged_groups(config)
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))
        self._attention = attention
        self._states = states
        self._parallel, self._in_shards = parallel, num_shards is not None

    def tie(self) -> None:
        """Makes the embeddings the head, too, with their present values; rows of a head in blocks are looked up
        there."""
        assert isinstance(self.head, Head), "a pooler is not tied to embeddings"
        for linear, embedding in zip(self.head.linears, self.embeddings, strict=True):
            if isinstance(linear.matrix, QuantisedMatrix | GroupedMatrix):
                embedding.matrix = linear.matrix
                continue
            assert isinstance(linear.matrix, PlainMatrix | Bfloat16Matrix), "embeddings have no scale per row"
            assert isinstance(embedding.matrix, PlainMatrix | Bfloat16Matrix), "a table in blocks is a head in blocks"
            assert linear.matrix.weight.dtype == embedding.matrix.weight.dtype, "a table has the dtype of its head"
            linear.matrix.weight = embedding.matrix.weight

    @property
    def layers_with_sinks(self) -> tuple[int, ...]:
        mixers = enumerate(layer.attention for layer in self.config.layers)
        return tuple(number for number, attention in mixers if attention is not None and attention.sinks)

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> torch.Tensor:
        """Hidden states `[T, hidden]` after the final norm. Writes the step's keys, values and states into `kv`, the
        memory of each layer."""
        batches = [batch.of_group(group) for group in range(self._num_groups)]
        if not self.config.causal:
            batches = [replace(own, causal=False) for own in batches]
        rotations = [tables(batch.positions) for tables in self._rotary]
        found = [embedding(batch.tokens) for embedding in self.embeddings]
        x = self._parallel.all_reduce(torch.stack(found) if self._in_shards else found[0])
        if self.added is not None:
            x = self.added(x, batch)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        if self.recordings is not None and batch.decode_only and batches and len(x) <= self.recordings.max_rows:
            return self._recorded(self.recordings, x, batches, rotations, kv)
        return self._layers(batch, batches, rotations, kv)(x)

    def _recorded(
        self,
        recordings: Recordings,
        x: torch.Tensor,
        batches: Sequence[ForwardBatch],
        rotations: Sequence[Rotation],
        kv: Sequence[LayerMemory],
    ) -> torch.Tensor:
        """See `_layers`; by a recording of a step with as many rows, if there is one."""

        def layers(inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
            found = iter(inputs)
            own_x = next(found)
            own_rotations = [Rotation(next(found), next(found)) for _ in rotations]
            own = [
                replace(each, write_slots=next(found), page_table=next(found), kv_lens=next(found)) for each in batches
            ]
            return partial(self._layers(own[0], own, own_rotations, kv), own_x)

        inputs = [x]
        for rotation in rotations:
            inputs += [rotation.cosines, rotation.sines]
        for each in batches:
            inputs += [each.write_slots, each.page_table, each.kv_lens]
        # Pages may move, and threads share attention to many keys.
        pages = [memory.pages for memory in kv if memory.pages is not None]
        places = tuple((each.keys.data_ptr(), each.values.data_ptr()) for each in pages)
        many_keys = int(batches[0].kv_lens.sum()) > _MANY_KEYS
        shapes = tuple(each.shape for each in inputs)
        return recordings.run((shapes, places, many_keys), inputs, layers).clone()

    def _layers(
        self,
        batch: ForwardBatch,
        batches: Sequence[ForwardBatch],
        rotations: Sequence[Rotation],
        kv: Sequence[LayerMemory],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from embeddings to hidden states after the final norm; `batches`: of each cache group."""
        attention = [self._attention.prepare(own) for own in batches]
        states = None if batch.states is None else self._states.prepare(batch.states)
        steps = [
            LayerStep(batch, AttentionStep(attention[group], rotations[rope], batches[group].write_slots), states)
            for rope, group in self._steps
        ]
        steps.append(LayerStep(batch, None, states))

        def compute(x: torch.Tensor) -> torch.Tensor:
            residual = None
            for number, layer in enumerate(self.decoder_layers):
                x, residual = layer(x, residual, steps[self._step_of_layer[number]], kv[number])
            return self.final_norm.add(x, residual)[0]

        return compute

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[m, vocab]` of hidden states `[m, hidden]`, on every rank; of a model with a pooler, vectors
        or scores `[m, width]`."""
        found: torch.Tensor = self.head(hidden)
        if self.config.logit_multiplier != 1.0:
            found = found * self.config.logit_multiplier
        if self.config.logit_cap is not None:
            found = torch.tanh(found / self.config.logit_cap) * self.config.logit_cap
        return found

    def repack(self, layout: Layout) -> None:
        """Changes loaded matrices to a layout, one at a time, so that at most one of them is in memory twice. Tied
        embeddings stay in memory in both layouts: rows are looked up in the plain one."""
        freed = FreedMemory()
        tied = self.head.linears if self.tied and isinstance(self.head, Head) else ()
        for module in self.modules():
            if isinstance(module, Linear):
                module.repack(layout, keep_plain=module in tied)
                freed.add(sum(each.nbytes for each in module.matrix.parameters()))
        freed.give_back()

    def fix_rows(self, layout: PackedLayout | None) -> None:
        """Makes a token's results independent of the other tokens of a step, for matrices as they are now, in `layout`
        if they are packed: see `layers.fixed_rows`."""
        if layout is not None:
            layout.use_blocks()
        fixed = FixedRows(self.device)
        for module in self.modules():
            if isinstance(module, Linear | Experts | SharedExpert):
                module.fix_rows(fixed)
        fixed.log()


def _tables(
    rope: RopeConfig | None, head_dim: int, max_position: int, device: torch.device
) -> RotaryTables | NoRotation:
    if rope is None:
        return NoRotation(head_dim)
    return RotaryTables(RotaryScaling(rope, head_dim, max_position), device)


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    attention: AttentionImplementation,
    states: StateImplementation | None = None,
    parallel: TensorParallel = SINGLE,
    encodings: Encodings = all_plain,
    block_matrices: BlockMatrices | None = None,
    keeps_groups: bool = False,
    bfloat16: Bfloat16Weights | None = None,
    fixed: bool = False,
    num_shards: int | None = None,
    expert_parts: int = 1,
    recordings: Recordings | None = None,
) -> Transformer:
    """A model without values, until `weights.load_weights` fills it; each rank of `parallel` holds its shard. `states`:
    the kernels of recurrent layers, torch operations by default; `encodings`: how each matrix is stored, by default as
    plain numbers; `block_matrices`: makes the matrices that stay in blocks; `keeps_groups`: those in groups stay so
    without it; `bfloat16`: the matrices that stay in bfloat16; `fixed`: a token's results must not depend on the other
    tokens of a step (see `Transformer.fix_rows`, to be called once loaded); `num_shards`: of all ranks, whose sums do
    not depend on the number of ranks (see `TreeSums`), None for one shard on each rank; `expert_parts`: into which
    experts are divided (see `Parallelism`); `recordings`: of decode steps, if they are recorded. Raises `ConfigError`
    if the model cannot be divided into this number of shards."""
    return Transformer(
        config,
        dtype=dtype,
        device=device,
        operations=operations,
        attention=attention,
        states=NativeStates() if states is None else states,
        parallel=parallel,
        encodings=encodings,
        block_matrices=block_matrices,
        keeps_groups=keeps_groups,
        bfloat16=bfloat16,
        fixed=fixed,
        num_shards=num_shards,
        expert_parts=expert_parts,
        recordings=recordings,
    )

"""A decoder-only model: embeddings, a list of layers, and a head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LearntPositions, ModelConfig, group_of_layers, num_paged_groups
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.checkpoint.rotary import RotaryScaling
from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttentions, no_cpu_attention
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.attention import with_write_plan
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.block_matrix import BlockMatrix, BlockProduct, BlockProducts, no_blocks
from sglang_jax.layers.grouped_matrix import GroupedExperts, GroupedMatrix
from sglang_jax.layers.layout import Layout, OutInLayout, Table, TwoAxisLayout, fill_up_columns
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.matrix import Matrix, PlainMatrix, TwoFormMatrix, matrix_for
from sglang_jax.layers.norm import Norm
from sglang_jax.layers.parameter import Parameter, parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions, RotaryTables
from sglang_jax.layers.platform import PlatformLayout
from sglang_jax.layers.pooler import PooledHead
from sglang_jax.layers.rotary import rotary_tables, rotary_tables_once
from sglang_jax.layers.rounded_rows import MinRoundedRows, never_rounded
from sglang_jax.layers.shards import Shards
from sglang_jax.models.decoder_layer import DecoderLayer
from sglang_jax.models.kv_cache import KVCaches


class Embedding(nnx.Module):
    """Rows of a table `[vocab, hidden]`: plain, or in `blocks` if a kernel multiplies by these in all steps."""

    def __init__(self, vocab_size: int, options: PartOptions) -> None:
        self.width = options.hidden_size
        vocabulary, part = [(Axis.VOCABULARY, vocab_size)], (Part.EMBEDDING,)
        encoding = options.encoding_of(*part)
        product = None if encoding is None or encoding.block is None else options.block_products(encoding)
        if not isinstance(product, BlockProduct) or not product.serves_all_rows:
            self.table: Parameter | None
            self.table = parameter([*vocabulary, (Axis.HIDDEN, options.hidden_size)], options.dtype, *part)
            self.blocks: BlockMatrix | None = None
        else:
            self.table = None
            self.blocks = BlockMatrix(product, [(Axis.HIDDEN, options.hidden_size)], vocabulary, part, options.dtype)

    def fill_up(self) -> None:
        """See `PlatformLayout.whole_tiles_of_table`."""
        if self.table is not None:
            fill_up_columns(self.table, LANES)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[T]`, all within the vocabulary → `[T, hidden]`."""
        if self.blocks is not None:
            return self.blocks.rows(tokens)
        assert self.table is not None
        rows = self.table[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return rows[:, : self.width]


class AddedEmbeddings(nnx.Module):
    """See `LearntPositions`."""

    def __init__(self, config: LearntPositions, hidden_size: int, dtype: jnp.dtype) -> None:
        hidden = (Axis.HIDDEN, hidden_size)
        self.config = config
        self.positions = parameter([(Axis.POSITIONS, config.rows), hidden], dtype, Part.POSITION_EMBEDDING)
        types = (Axis.TOKEN_TYPES, config.token_types)
        self.types = parameter([types, hidden], dtype, Part.TYPE_EMBEDDING) if config.token_types else None

    def __call__(self, embedded: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Embeddings `[T, hidden]` of the tokens of `batch`, at positions below the longest context → `[T, hidden]`."""
        rows = self.positions[...].at[batch.positions + self.config.first].get(mode="promise_in_bounds")
        if self.types is not None:
            separator, types = self.config.separator, self.types[...]
            of_tokens = 0 if separator is None else _token_types(batch, separator)
            embedded = embedded + types[of_tokens]
        return embedded + rows


def _token_types(batch: ForwardBatch, separator: int) -> jax.Array:
    """Whether each token follows a separator of its text, int32 `[T]`. Texts are whole."""
    ends = (batch.tokens == separator).astype(jnp.int32)
    before = jnp.cumsum(ends) - ends
    starts = jnp.arange(len(ends), dtype=jnp.int32) - batch.positions
    return (before > before[starts]).astype(jnp.int32)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x: jax.Array,
    residual: jax.Array,
    step: LayerStep,
    memory: LayerMemory,
) -> tuple[jax.Array, jax.Array, LayerMemory]:
    """One layer as a function of its weights. A program traces and lowers equal layers once; the compiler inlines every
    call."""
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer(x, residual, step, memory)


class Transformer(nnx.Module):
    """The decoder with its embeddings and head. Layers are unrolled: a scan over stacked bfloat16 weights copies them
    all at every step on XLA's CPU backend."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        attention: AttentionImplementation,
        form: PlatformLayout,
        cpu_attention: CpuAttentions = no_cpu_attention,
        encodings: Encodings = all_plain,
        block_products: BlockProducts = no_blocks,
        min_rounded_rows: MinRoundedRows = never_rounded,
        num_shards: int | None = None,
        dp_ranks: int = 1,
    ) -> None:
        self.config = config
        self.attention = attention
        options = PartOptions(
            hidden_size=config.hidden_size,
            dtype=dtype,
            implementation=attention,
            kv_dtype=kv_dtype,
            cpu_attention=cpu_attention,
            encodings=encodings,
            block_products=block_products,
            min_rounded_rows=min_rounded_rows,
            num_shards=num_shards,
            dp_ranks=dp_ranks,
        )
        self.embedding = Embedding(config.vocab_size, options)
        learnt = config.learnt_positions
        self.added = None if learnt is None else AddedEmbeddings(learnt, config.hidden_size, dtype)
        self.shards = None if num_shards is None else Shards(num_shards, attention)
        self.layers = nnx.List([DecoderLayer(layer, options, number) for number, layer in enumerate(config.layers)])
        self.final_norm = Norm([(Axis.HIDDEN, config.hidden_size)], config.final_norm, dtype, Part.FINAL_NORM)
        hidden, vocabulary = [(Axis.HIDDEN, config.hidden_size)], [(Axis.VOCABULARY, config.vocab_size)]
        pooler = config.pooler
        self.pooled = None if pooler is None else PooledHead(pooler, config.hidden_size)
        self.head = matrix_for(hidden, vocabulary, (Part.HEAD,), options) if pooler is None else None
        if config.tie_word_embeddings and self.embedding.blocks is not None:
            self.head = self.embedding.blocks
        elif config.tie_word_embeddings and not form.own_head_for_tied_embeddings:
            self._share_table(self.embedding.table, Table())
        self.num_groups = num_paged_groups(config)
        self.group_of_layer = group_of_layers(config)
        self.form = form

    def repack(self, devices: int = 1) -> None:
        """Changes the weights, or their shapes, from the layout in which they are loaded and stored, the same on all
        platforms, to the one that the platform computes with, on `devices` devices."""
        self.pack()
        if self.form.matrices:
            self.put_in_matrices()
        elif self.form.outputs_first and (devices == 1 or self.shards is not None):
            self.put_outputs_first()

    def pack(self) -> None:
        """Changes matrices in blocks and groups, and the table of embeddings, or their shapes, from what is loaded to
        what takes memory."""
        if self.form.whole_tiles_of_table and self.has_own_head:
            self.embedding.fill_up()
        for _, module in nnx.iter_modules(self):
            if isinstance(module, BlockMatrix | GroupedMatrix | GroupedExperts):
                module.pack()

    def put_in_matrices(self) -> None:
        """Gives every matrix of the layers one axis of inputs and one of outputs: see `PlatformLayout`."""
        self._repack_layers(TwoAxisLayout())

    def put_outputs_first(self) -> None:
        """Stores every matrix as `[out, in]`: see `PlatformLayout`. Tied embeddings have this layout already, so a
        model with them needs no separate head."""
        self._repack_layers(OutInLayout())
        if self.config.tie_word_embeddings and self.embedding.table is not None:
            self._share_table(self.embedding.table, OutInLayout())
        elif self.head is not None:
            self.head.repack(OutInLayout())

    def _repack_layers(self, layout: Layout) -> None:
        for _, module in nnx.iter_modules(self):
            if isinstance(module, Linear):
                module.matrix.repack(layout)

    def _share_table(self, table: Parameter, layout: Layout) -> None:
        shared = PlainMatrix(table, 1, layout)
        if isinstance(self.head, TwoFormMatrix):
            self.head.plain = shared
        else:
            self.head = shared

    @property
    def has_own_head(self) -> bool:
        """Whether the head, if there is one, is another matrix than the table of embeddings."""
        if self.head is None:
            return True
        plain = self.head.plain if isinstance(self.head, TwoFormMatrix) else self.head
        if isinstance(plain, BlockMatrix):
            return plain is not self.embedding.blocks
        return not (isinstance(plain, PlainMatrix) and plain.kernel is self.embedding.table)

    def __call__(self, batch: ForwardBatch, kv_caches: KVCaches) -> tuple[jax.Array, KVCaches]:
        """Hidden states `[T, hidden]` after the final norm, and the layers' memory after the step."""
        residual = self._embed(batch)
        x = jnp.zeros_like(residual)
        rotary = self._rotary_tables(batch.positions)
        written = list(kv_caches)
        batches = [
            with_write_plan(self.attention, batch.of_group(group), written[self.group_of_layer.index(group)].pages)
            for group in range(self.num_groups)
        ]
        states = replace(batch, further=())
        for number, layer in enumerate(self.layers):
            group, attention = self.group_of_layer[number], layer.config.attention
            own = states if group is None else batches[group]
            tables = None if attention is None else rotary[attention.rope, attention.rotary_dim]
            step = LayerStep(own, tables)
            x, residual, written[number] = _run_layer(*nnx.split(layer), x, residual, step, written[number])
        hidden = in_tiles(lambda both: self.final_norm.add(*both)[0], (x, residual), self.attention.tile_rows)
        return hidden, tuple(written)

    def _embed(self, batch: ForwardBatch) -> jax.Array:
        embedded = self.embedding(batch.tokens)
        dtype = embedded.dtype
        if self.form.wide_activations:
            embedded = embedded.astype(jnp.float32)
        if self.added is not None:
            embedded = self.added(embedded, batch)
        if self.config.embedding_multiplier == 1.0:
            return embedded
        return embedded * jnp.asarray(self.config.embedding_multiplier, dtype).astype(embedded.dtype)

    def _rotary_tables(self, positions: jax.Array) -> dict[tuple[RopeConfig | None, int], RotaryTables | None]:
        """The tables of each pair of a rope config and a rotary dimension, each computed once."""
        tables = rotary_tables_once if self.form.computes_again_for_each_reader else rotary_tables
        kinds = dict.fromkeys((attention.rope, attention.rotary_dim) for attention in self.config.attention)
        return {
            (rope, head_dim): None
            if rope is None
            else in_tiles(
                partial(tables, RotaryScaling(rope, head_dim, self.config.max_position)),
                positions,
                self.attention.tile_rows,
            )
            for rope, head_dim in kinds
        }

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits float32 `[m, vocab]` of hidden states `[m, hidden]`; of a model with a pooler, vectors or scores `[m,
        width]`."""
        if self.pooled is not None:
            return self.pooled(hidden)
        assert self.head is not None
        with jax.named_scope("head"):
            if self.shards is not None:
                return self.shards.columns(self.head, hidden, self._logits)
            return in_tiles(partial(self._logits, self.head), hidden, self.attention.tile_rows)

    def _logits(self, head: Matrix, hidden: jax.Array) -> jax.Array:
        logits = head.multiply(hidden)
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        if self.config.logit_cap is not None:
            logits = self.config.logit_cap * jnp.tanh(logits / self.config.logit_cap)
        return logits

"""Drives a model over pages by hand: shuffled pages, NaN in every unwritten slot, page 0 included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sglang_jax.architectures.model_config import num_paged_groups
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.kernels.kv_storage import to_storage
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.layers.batch import ForwardBatch, GroupPages
from sglang_jax.layers.block_matrix import BlockProducts, no_blocks
from sglang_jax.layers.sharding import make_mesh, parallelism_of
from sglang_jax.models import AttentionImplementation, KVCaches, allocate, build_model, kv_cache_spec
from sglang_jax.runner.quantization import encodings_of

ROWS = 4
MIXED_TOKENS = 48


def pages_of_rows(groups: int, rows: int, columns: int) -> np.ndarray:
    """Numbers of pages `[groups, rows, columns]`, in random order, and different in each group."""
    numbers = [1 + np.random.default_rng(1 + group).permutation(rows * columns) for group in range(max(groups, 1))]
    return np.stack(numbers).reshape(-1, rows, columns).astype(np.int32)


def slots_of_rows(rows: int) -> np.ndarray:
    """A slot for each row, in random order, with unused ones between them."""
    return 1 + 2 * np.random.default_rng(2).permutation(rows).astype(np.int32)


class PagedModel:
    """A loaded checkpoint and its caches; two programs: decode (4 rows) and mixed (48 tokens, 4 rows).
    `block_products`: kernels for its blocked matrices. `quantization`: of its weights while they are loaded.
    `platform`: the one for whose layouts the model is built; by default, the one it runs on."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        attention: AttentionImplementation = AttentionImplementation.XLA,
        page_size: int = 4,
        columns: int = 16,
        mesh: Mesh | None = None,
        block_products: BlockProducts = no_blocks,
        quantization: Quantization | None = None,
        num_shards: int | None = None,
        platform: str | None = None,
    ) -> None:
        checkpoint = open_checkpoint(str(folder))
        mesh = mesh or make_mesh(jax.devices()[:1])
        stored = jnp.dtype(kv_dtype or dtype)
        parallel = TensorParallel.of(checkpoint.config, parallelism_of(mesh), num_shards)
        encodings = encodings_of(checkpoint, quantization)
        model = build_model(
            parallel.config,
            dtype=jnp.dtype(dtype),
            attention=attention,
            platform=platform,
            kv_dtype=stored,
            encodings=encodings,
            block_products=block_products,
            num_shards=num_shards,
        )
        load_weights(model, checkpoint.reader, checkpoint.config, mesh, quantization)
        model.repack(mesh.size)
        self.model = model
        graph, self.state = nnx.split(model)
        spec = kv_cache_spec(
            parallel.config,
            stored,
            1 + ROWS * columns,
            page_size,
            platform=platform,
            shards_on_device=parallel.shards_on_device,
        )
        self.num_groups = num_paged_groups(parallel.config)
        self.keeps_states = parallel.config.keeps_states
        caches = allocate(spec, mesh)

        def poisoned(cache: jax.Array) -> jax.Array:
            storage = spec.storage if cache.ndim == 5 else cache.dtype
            return jax.device_put(to_storage(jnp.full(cache.shape, jnp.nan), storage), cache.sharding)

        self.kv_caches: KVCaches = jax.tree.map(poisoned, caches)
        self.slots, self.begin = slots_of_rows(ROWS), dict[int, int]()
        self.all_pages = pages_of_rows(self.num_groups, ROWS, columns)
        self.page_size = page_size

        def step(state: nnx.State, kv_caches: KVCaches, batch: ForwardBatch) -> tuple[jax.Array, KVCaches]:
            model = nnx.merge(graph, state)
            hidden, kv_caches = model(batch, kv_caches)
            return model.logits(hidden)[:, : parallel.vocab_size], kv_caches

        self._step = jax.jit(step, donate_argnums=1)
        self._mesh = mesh.abstract_mesh if mesh.size > 1 else None

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        steps: Sequence[Mapping[int, int]],
        cached: Sequence[int] | None = None,
    ) -> list[np.ndarray]:
        """Computes `steps[i][row]` further tokens of each row in step i; returns the logits of every computed token,
        for each row that has any.

        The first `cached[row]` tokens of a row are already in its pages. A step that only has single tokens is a decode
        step. In others, rows that come first with one token are decode rows.
        """
        done = list(cached or [0] * len(sequences))
        logits: list[list[np.ndarray]] = [[] for _ in sequences]
        for step in steps:
            batch = self.batch(sequences, done, step)
            with nullcontext() if self._mesh is None else jax.sharding.use_abstract_mesh(self._mesh):
                found, self.kv_caches = self._step(self.state, self.kv_caches, batch)
            rows = np.split(np.asarray(found), np.cumsum(list(step.values())))
            for (row, count), part in zip(step.items(), rows, strict=False):
                done[row] += count
                logits[row].append(part)
        return [np.concatenate(parts) for parts in logits if parts]

    def temporary_bytes(self) -> int:
        """Temporary bytes of the decode program."""
        return self.program({0: 1}).compile().memory_analysis().temp_size_in_bytes

    def program(self, step: Mapping[int, int]) -> jax.stages.Lowered:
        """The program of a step, see `run`."""
        batch = self.batch([[5] * max(step.values())] * ROWS, [0] * ROWS, step)
        return self._step.lower(self.state, self.kv_caches, batch)

    def batch(self, sequences: Sequence[Sequence[int]], done: Sequence[int], step: Mapping[int, int]) -> ForwardBatch:
        counts = np.array(list(step.values()))
        num_decode = int(np.cumprod(counts == 1).sum())
        num_tokens = ROWS if num_decode == len(counts) else MIXED_TOKENS
        tokens, positions = np.zeros((2, num_tokens), np.int32)
        slots = np.zeros((len(self.all_pages), num_tokens), np.int32)
        page_table = np.zeros_like(self.all_pages)
        kv_lens = np.zeros(ROWS, np.int32)
        place = 0
        for index, (row, count) in enumerate(step.items()):
            mine = slice(place, place + count)
            positions[mine] = np.arange(done[row], done[row] + count)
            tokens[mine] = np.asarray(sequences[row])[positions[mine]]
            kv_lens[index] = done[row] + count
            used = -(-kv_lens[index] // self.page_size)
            page_table[:, index, :used] = self.all_pages[:, row, :used]
            slots[:, mine] = self.all_pages[:, row, positions[mine] // self.page_size] * self.page_size
            slots[:, mine] += positions[mine] % self.page_size
            place += count
        starts = np.full(ROWS + 1, place, np.int32)
        starts[: len(counts) + 1] = [0, *np.cumsum(counts)]
        arrays = (tokens, positions, slots[0], page_table[0], kv_lens, starts, np.int32(num_decode))
        batch = ForwardBatch(*(jnp.asarray(array) for array in arrays))
        further = zip(slots[1:], page_table[1:], strict=True)
        batch = replace(batch, further=tuple(GroupPages(jnp.asarray(a), jnp.asarray(b)) for a, b in further))
        if not self.keeps_states:
            return batch
        own = np.zeros(ROWS, np.int32)
        own[: len(counts)] = self.slots[list(step)]
        begin = own.copy()
        begin[: len(counts)] = [self.begin.pop(row, self.slots[row]) for row in step]
        sequences = np.minimum(np.searchsorted(starts[1:], np.arange(num_tokens), side="right"), ROWS - 1)
        decode_only = num_tokens == ROWS
        if decode_only:
            sequences = np.arange(ROWS)
        states = StateRows(
            begin=jnp.asarray(begin),
            fresh=jnp.asarray(kv_lens <= np.diff(starts)),
            own=jnp.asarray(own),
            sequences=jnp.asarray(sequences),
            offsets=jnp.asarray(np.arange(num_tokens) - starts[sequences]),
            query_starts=batch.query_starts,
            num_decode=batch.num_decode,
            decode_only=decode_only,
        )
        return replace(batch, states=states)

    def share(self, row: int, other: int) -> None:
        """Row `other` resumes from the current content of `row`: with the same pages, and from its state, which does
        not change if `row` computes no more."""
        self.all_pages[:, other] = self.all_pages[:, row]
        self.begin[other] = int(self.slots[row])

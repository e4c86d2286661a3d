"""Drives a model of the torch backend over pages by hand: shuffled pages, NaN in every unwritten slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from helpers.cpu_kernels import ThreadedKernels, cpu_attention, cpu_operations
from helpers.paged_model import pages_of_rows, slots_of_rows
from numpy.typing import NDArray

from sglang_jax.architectures.model_config import num_paged_groups
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.config import EngineConfig, ModelImpl
from sglang_jax.runner.quantization import encodings_of, matrices_in_bfloat16
from torch_backend.attention.fixed import BlockAttention, ChunksOnly, DecodeRowsOnly
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.attention.native import NativeAttention
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.compilation.building import build_traced
from torch_backend.compilation.traced_model import TracedTransformer
from torch_backend.kv_pages import KVPages, LayerMemory, StateDtypes
from torch_backend.layers.bfloat16 import Bfloat16Products, Bfloat16Weights
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.shard import ModelShard
from torch_backend.models import Transformer, build_model
from torch_backend.native_operations import EvenOperations, NativeOperations
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.rows import StateRows
from torch_backend.weights import load_weights

ROWS = 4


class TorchPagedModel:
    """A loaded checkpoint, or a rank's part of it, and its pages: page 0 and `columns` pages for each of 4 rows.

    `numba`: attention and fused operations are CPU kernels. `traced`: the model is transformers', rewritten. Without
    `load` the model has no weights yet. `quantization`: of its weights while they are loaded. `block_matrices`: the
    modules that keep their matrices in blocks, too. `bfloat16`: the products of matrices that stay in bfloat16.
    `recorded`: all matrices stay in blocks, with threads for their kernels; decode steps are recorded if it is true.
    `fixed`: a token's logits do not depend on the other tokens; `num_shards`: nor on the number of ranks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        attention: AttentionImplementation | None = None,
        states: StateImplementation | None = None,
        numba: bool = False,
        traced: bool = False,
        parallel: TensorParallel = SINGLE,
        page_size: int = 4,
        columns: int = 16,
        load: bool = True,
        quantization: Quantization | None = None,
        block_matrices: BlockMatrices | None = None,
        keeps_groups: bool = False,
        bfloat16: Bfloat16Products | None = None,
        recorded: bool | None = None,
        fixed: bool = False,
        num_shards: int | None = None,
        expert_parts: int = 1,
    ) -> None:
        impl = ModelImpl.TRANSFORMERS if traced else ModelImpl.NATIVE
        checkpoint = open_checkpoint(str(folder), model_impl=impl)
        config = checkpoint.config
        shards = ModelShard.of_rank(config, parallel.rank, Parallelism(parallel.size, expert_parts), num_shards)
        if numba:
            attention = cpu_attention(dtype, *shards[0].head_forms(config), latents=shards[0].latent_forms(config))
            if fixed:
                attention = (DecodeRowsOnly if attention.prompts is None else ChunksOnly)(attention)
        head_dims = dict.fromkeys(attention.head_dim for attention in config.kv_attention)
        operations = EvenOperations() if fixed else NativeOperations()
        kinds = {
            "dtype": dtype,
            "device": torch.device("cpu"),
            "operations": cpu_operations(dtype, *head_dims) if numba else operations,
            "attention": attention or (BlockAttention() if fixed else NativeAttention()),
        }
        self.model: Transformer | TracedTransformer
        if traced:
            self.model, read = build_traced(EngineConfig(), checkpoint, parallel=parallel, **kinds)
            self.model.load(read)
        else:
            encodings = encodings_of(checkpoint, quantization)
            kinds |= {"states": states or NativeStates(fixed=fixed), "encodings": encodings}
            kinds |= {
                "block_matrices": block_matrices,
                "keeps_groups": keeps_groups,
                "fixed": fixed,
                "num_shards": num_shards,
                "expert_parts": expert_parts,
            }
            if bfloat16 is not None:
                kinds["bfloat16"] = Bfloat16Weights(matrices_in_bfloat16(checkpoint, quantization), bfloat16)
            if recorded is not None:
                threaded = ThreadedKernels.of(dtype, list(shards[0].head_forms(config)), recorded=recorded)
                kinds |= {field.name: getattr(threaded, field.name) for field in fields(threaded)}
            self.model = build_model(config, parallel=parallel, **kinds)
        if load and not traced:
            layout = load_weights(self.model, checkpoint.reader, config, quantization=quantization)
            if fixed:
                self.model.fix_rows(layout)
        self.keeps_states = config.keeps_states
        self.kv: list[LayerMemory] = []
        for layer in config.layers:
            parts = []
            for shard in shards:
                arrays = () if layer.recurrent is None else shard.recurrent(layer.recurrent).state
                states = StateDtypes(dtype, torch.float32).allocate(2 + 2 * ROWS, arrays, self.model.device)
                pages = None
                if layer.attention is not None:
                    arrays = shard.cached(layer.attention.cached)
                    shape = (1 + ROWS * columns, arrays[0].heads or 1, page_size, arrays[0].width)
                    sides = [torch.full(shape, torch.nan, dtype=dtype) for _ in arrays]
                    pages = KVPages(sides[0], sides[-1])
                parts.append(LayerMemory(pages, tuple(pool.fill_(torch.nan) for pool in states)))
            self.kv.append(parts[0] if num_shards is None else LayerMemory(shards=tuple(parts)))
        self.slots, self.begin = slots_of_rows(ROWS), dict[int, int]()
        self.all_pages = pages_of_rows(num_paged_groups(self.model.config), ROWS, columns)
        self.page_size = page_size

    def run(
        self,
        sequences: Sequence[NDArray[np.int32]],
        steps: Sequence[Mapping[int, int]],
        cached: Sequence[int] | None = None,
    ) -> list[np.ndarray]:
        """Computes `steps[i][row]` further tokens of each row in step i; returns the logits of every computed token,
        for each row that has any.

        The first `cached[row]` tokens of a row are already in its pages. Rows that come first with one token are decode
        rows. Steps with only such rows are padded to 4 rows.
        """
        done = list(cached or [0] * len(sequences))
        logits: list[list[np.ndarray]] = [[] for _ in sequences]
        for step in steps:
            with torch.inference_mode():
                found = self.model.logits(self.model(self.batch(sequences, done, step), self.kv)).numpy()
            assert found.dtype == np.float32
            parts = np.split(found, np.cumsum(list(step.values())))
            for (row, count), part in zip(step.items(), parts, strict=False):
                done[row] += count
                logits[row].append(part)
        return [np.concatenate(parts) for parts in logits if parts]

    def greedy(self, prompt: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """The prompt and `count` further tokens, each the most likely one, decoded in row 0 one by one."""
        tokens, done = prompt, 0
        for _ in range(count):
            batch = self.batch([tokens], [done], {0: len(tokens) - done})
            with torch.inference_mode():
                hidden = self.model(batch, self.kv)[len(tokens) - done - 1, None]
                sampled = self.model.logits(hidden).argmax(-1)
            done = len(tokens)
            tokens = np.append(tokens, sampled.numpy().astype(np.int32))
        return tokens

    def batch(
        self, sequences: Sequence[NDArray[np.int32]], done: Sequence[int], step: Mapping[int, int]
    ) -> ForwardBatch:
        counts = np.array(list(step.values()))
        num_decode = int(np.cumprod(counts == 1).sum())
        padding = ROWS - len(counts) if num_decode == len(counts) else 0
        groups, _, columns = self.all_pages.shape
        page_table = np.zeros((groups, len(counts) + padding, columns), np.int32)
        kv_lens = np.zeros(len(counts) + padding, np.int32)
        tokens, positions, slots = [], [], []
        for index, (row, count) in enumerate(step.items()):
            places = np.arange(done[row], done[row] + count)
            used = -(-(done[row] + count) // self.page_size)
            page_table[:, index, :used] = self.all_pages[:, row, :used]
            kv_lens[index] = done[row] + count
            positions.append(places)
            tokens.append(sequences[row][places])
            pages = self.all_pages[:, row, places // self.page_size]
            slots.append(pages * self.page_size + places % self.page_size)
        unused = [np.zeros(padding, np.int32)]
        all_slots = np.concatenate([*slots, np.zeros((groups, padding), np.int32)], axis=1).astype(np.int64)
        pages, *further = (
            GroupPages(torch.from_numpy(slots), torch.from_numpy(table))
            for slots, table in zip(all_slots, page_table, strict=True)
        )
        return ForwardBatch(
            tokens=torch.from_numpy(np.concatenate(tokens + unused).astype(np.int32)),
            positions=torch.from_numpy(np.concatenate(positions + unused).astype(np.int32)),
            write_slots=pages.write_slots,
            page_table=pages.page_table,
            kv_lens=torch.from_numpy(kv_lens),
            query_starts=torch.from_numpy(np.cumsum([0, *counts, *[1] * padding]).astype(np.int32)),
            num_decode=num_decode + padding,
            further=tuple(further),
            states=self._states(step, counts, kv_lens, num_decode, padding) if self.keeps_states else None,
        )

    def _states(
        self, step: Mapping[int, int], counts: np.ndarray, kv_lens: np.ndarray, num_decode: int, padding: int
    ) -> StateRows:
        own = np.concatenate((self.slots[list(step)], np.zeros(padding, np.int32)))
        begin = own.copy()
        begin[: len(counts)] = [self.begin.pop(row, self.slots[row]) for row in step]
        counts = np.concatenate((counts, np.ones(padding, np.int64)))
        starts = np.concatenate(([0], np.cumsum(counts)))
        sequences = np.repeat(np.arange(len(counts)), counts)
        return StateRows(
            begin=torch.from_numpy(begin).long(),
            fresh=torch.from_numpy(kv_lens <= counts),
            own=torch.from_numpy(own).long(),
            sequences=torch.from_numpy(sequences),
            offsets=torch.from_numpy(np.arange(starts[-1]) - starts[sequences]),
            query_starts=torch.from_numpy(starts.astype(np.int32)),
            num_decode=num_decode + padding,
        )

    def share(self, row: int, other: int) -> None:
        """Row `other` resumes from the current content of `row`: with the same pages, and from its state, which does
        not change if `row` computes no more."""
        self.all_pages[:, other] = self.all_pages[:, row]
        self.begin[other] = int(self.slots[row])

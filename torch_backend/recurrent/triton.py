"""Recurrent states with Triton kernels: decode rows by single tokens, chunks by blocks of tokens."""

from __future__ import annotations

import torch

from torch_backend.kernels.short_convolution import convolve_chunks, convolve_rows
from torch_backend.kernels.state_chunks import ChunkMatrices, ChunkTile, plan_chunks, scan_chunks
from torch_backend.kernels.state_rows import scan_rows
from torch_backend.kernels.work_items import WorkItems
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs


class TritonStates:
    """`StateImplementation` for CUDA. Nothing is read on the host, so that every step can be captured."""

    @property
    def reads_lengths(self) -> bool:
        return False

    def prepare(self, rows: StateRows) -> TritonStepStates:
        """See `StateImplementation`. Blocks are planned at the first layer of each size."""
        return TritonStepStates(rows)


class TritonStepStates:
    """`StepStates` of one step. Plans are made once for all layers of one size of blocks."""

    def __init__(self, rows: StateRows) -> None:
        self._rows = rows
        self._plans: dict[int, WorkItems] = {}
        self._matrices: ChunkMatrices | None = None

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if self._rows.num_decode:
            convolve_rows(x, weight, bias, pool, self._rows, out)
        if not self._rows.decode_only:
            convolve_chunks(x, weight, bias, pool, self._rows, out)
        return out

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        outputs = torch.empty(inputs.values.shape, dtype=torch.float32, device=pool.device)
        if rows.num_decode:
            scan_rows(inputs, pool, rows, outputs)
        if rows.decode_only:
            return outputs
        tile = ChunkTile.of(inputs)
        if tile.tokens not in self._plans:
            self._plans[tile.tokens] = plan_chunks(rows, len(outputs), tile)
        # Layers run one after the other and share these buffers.
        if self._matrices is None or not self._matrices.fits(inputs, tile):
            self._matrices = ChunkMatrices.allocate(inputs, tile)
        scan_chunks(inputs, pool, rows, outputs, self._plans[tile.tokens], self._matrices, tile)
        return outputs

"""Recurrent states with torch operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_backend.recurrent.convolution import convolve
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs, scan


class NativeStates:
    """`StateImplementation` on any device."""

    @property
    def reads_lengths(self) -> bool:
        return True

    def prepare(self, rows: StateRows) -> NativeStepStates:
        return NativeStepStates(rows)


@dataclass(frozen=True, slots=True)
class NativeStepStates:
    rows: StateRows

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        found, tails = convolve(x, weight, bias, self.rows.read(pool), self.rows)
        self.rows.write(pool, tails)
        return found

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        if self.rows.drafts is not None and len(self.rows.depths) > 1:
            return self._scan_drafts(inputs, pool)
        outputs, matrices = scan(inputs, self.rows.read(pool).float(), self.rows)
        self.rows.write(pool, matrices)
        return outputs

    def _scan_drafts(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        """Computes all rows' own tokens, then all their first drafts, and so on."""
        outputs = torch.empty_like(inputs.values)
        for sequences in self.rows.depths:
            rows = self.rows.of(sequences)
            outputs[sequences], matrices = scan(inputs.at(sequences), rows.read(pool).float(), rows)
            rows.write(pool, matrices)
        return outputs

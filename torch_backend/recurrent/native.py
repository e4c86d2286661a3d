"""Recurrent states with torch operations: depthwise convolutions over the last tokens, with inputs that are kept from
step to step, and scans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs, scan, scan_tokens


class NativeStates:
    """`StateImplementation` on any device. `fixed`: a token's results do not depend on the chunk that it is in."""

    def __init__(self, *, fixed: bool = False) -> None:
        self._scan = scan_tokens if fixed else scan

    @property
    def reads_lengths(self) -> bool:
        return True

    def prepare(self, rows: StateRows) -> NativeStepStates:
        return NativeStepStates(rows, self._scan)


@dataclass(frozen=True, slots=True)
class NativeStepStates:
    rows: StateRows
    compute: Callable[[ScanInputs, torch.Tensor, StateRows], tuple[torch.Tensor, torch.Tensor]]

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        found, tails = convolve(x, weight, bias, self.rows.read(pool), self.rows)
        self.rows.write(pool, tails)
        return found

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        if self.rows.drafts is not None and len(self.rows.depths) > 1:
            return self._scan_drafts(inputs, pool)
        outputs, matrices = self.compute(inputs, self.rows.read(pool).float(), self.rows)
        self.rows.write(pool, matrices)
        return outputs

    def _scan_drafts(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        """Computes all rows' own tokens, then all their first drafts, and so on."""
        outputs = torch.empty_like(inputs.values)
        for sequences in self.rows.depths:
            rows = self.rows.of(sequences)
            outputs[sequences], matrices = self.compute(inputs.at(sequences), rows.read(pool).float(), rows)
            rows.write(pool, matrices)
        return outputs


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tails: torch.Tensor, rows: StateRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes each token's output from its own input and those of the `width - 1` tokens before it, float32 `[T,
    channels]`, and the tails after the step. Inputs are first rounded to the dtype of `tails`, so a result does not
    depend on where chunks start.

    `x` `[T, channels]`; `weight` `[channels, width]`, the tap of the token itself last; `bias` `[channels]`; `tails`
    `[R, width - 1, channels]`, the last inputs of each sequence before the step, oldest first.
    """
    width = weight.shape[1]
    x = x.to(tails.dtype)
    taps = weight.float().t()
    total = x.float() * taps[-1]
    for back in range(1, width):
        total.addcmul_(_inputs_before(x, tails, rows, back).float(), taps[-1 - back])
    if bias is not None:
        total += bias.float()
    return total, _tails_after(x, tails, rows)


def _inputs_before(x: torch.Tensor, tails: torch.Tensor, rows: StateRows, back: int) -> torch.Tensor:
    kept = tails.shape[1]
    if rows.drafts is not None:
        of_tail = tails[torch.arange(len(tails), device=x.device), (kept + rows.drafts - back).clamp(0, kept - 1)]
        return torch.where((rows.drafts >= back)[:, None], x.roll(back, 0), of_tail)
    if rows.decode_only:
        return tails[:, kept - back]
    of_tail = tails[rows.sequences, (kept + rows.offsets - back).clamp(0, kept - 1)]
    return torch.where((rows.offsets >= back)[:, None], x.roll(back, 0), of_tail)


def _tails_after(x: torch.Tensor, tails: torch.Tensor, rows: StateRows) -> torch.Tensor:
    kept = tails.shape[1]
    if rows.drafts is not None:
        return torch.stack([*(_inputs_before(x, tails, rows, back) for back in range(kept - 1, 0, -1)), x], dim=1)
    if rows.decode_only:
        return torch.cat((tails[:, 1:], x[:, None]), dim=1)
    places = torch.arange(kept, device=x.device)
    starts = rows.query_starts.long()
    lengths = starts.diff()[:, None]
    computed = x[(starts[1:, None] - kept + places).clamp(min=0)]
    older = tails.gather(1, (lengths + places).clamp(max=kept - 1)[..., None].expand_as(tails))
    return torch.where((lengths - kept + places >= 0)[..., None], computed, older)

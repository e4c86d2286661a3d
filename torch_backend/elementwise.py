"""Functions of single elements, and how to apply them so that results do not depend on an element's place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Function = Callable[[torch.Tensor], torch.Tensor]
Apply = Callable[[Function, torch.Tensor], torch.Tensor]
"""Applies a function to every element."""

_VECTORS = 64
"""A multiple of the elements that torch's loops take at once."""

_PIECE = 2**14
"""Elements of a piece: fewer than torch divides among threads."""


def directly(function: Function, x: torch.Tensor) -> torch.Tensor:
    return function(x)


def evenly(function: Function, x: torch.Tensor) -> torch.Tensor:
    """The same bits for an element wherever it is. On a CPU, torch computes the last elements of each thread's part one
    by one, and some functions (sigmoid, silu, gelu, softplus, pow) then round otherwise than in vectors. Here all
    elements are in vectors."""
    if x.device.type != "cpu":
        return function(x)
    padded = functional.pad(x.reshape(-1), (0, -x.numel() % _VECTORS))
    pieces = [function(piece) for piece in torch.split(padded, _PIECE)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: x.numel()].view(x.shape)

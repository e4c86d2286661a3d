"""Recorded layers: the kernel calls of all layers of a decode step, run again by one call.

A decode step of a small model has hundreds of kernel calls, and preparing one in Python takes as long as its work. All
that differs between two steps with as many rows is data: tokens, pages and lengths. So the calls are recorded once,
with the memory that they read and write, and run again on other inputs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from torch_backend.cpu_kernels.threads import OwnThreads, RecordedCall

logger = logging.getLogger(__name__)

_MAX_ROWS = 32
"""Rows of a step that is recorded: with more, the work takes much longer than preparing it."""

_MAX_BYTES = 2**26
"""Of the memory of all recordings of a model; the one used longest ago is dropped."""

_NEW = {"torch.empty", "torch.empty_like", "torch.Tensor.new_empty"}
_VIEWS = {f"torch.Tensor.{name}" for name in ("__getitem__", "contiguous", "reshape", "unflatten", "view")}
_FACTS = {
    f"torch.Tensor.{name}"
    for name in (
        "__len__",
        "data_ptr",
        "dim",
        "is_contiguous",
        "numel",
        "size",
        "stride",
        "shape.__get__",
        "dtype.__get__",
    )
} | {"torch.Tensor.device.__get__", "torch.Tensor.is_meta.__get__"}
"""Functions that compute no values, so that a recording needs only the kernel calls between them."""

Layers = Callable[[Sequence[torch.Tensor]], Callable[[], torch.Tensor]]
"""From a step's inputs to a function that computes its result."""


class _Watch(TorchFunctionMode):
    """Keeps the memory that a function allocates; notes torch functions that compute something, as `computing`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.computing: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(function) or repr(function)
        result = function(*args, **(kwargs or {}))
        if name in _NEW:
            self.kept.append(result)
        elif name in _VIEWS:
            if result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
                self.computing.add(name)
        elif name not in _FACTS:
            self.computing.add(name)
        return result


@dataclass(frozen=True, slots=True)
class _Recording:
    """`inputs`, `output`: tensors in fixed memory; `kept`: what else the calls use."""

    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor
    kept: list[torch.Tensor]
    calls: list[RecordedCall]
    program: Callable[[], None]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.inputs, *self.kept))


class RecordedLayers:
    """The recordings of a model, to be used by one thread at a time. `threads`: of all its kernels."""

    def __init__(self, threads: OwnThreads) -> None:
        self._threads = threads
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._possible = True

    @property
    def max_rows(self) -> int:
        """Rows of a step that is recorded."""
        return _MAX_ROWS

    @property
    def count(self) -> int:
        """Recordings at present."""
        return len(self._recordings)

    def run(self, kind: Hashable, inputs: Sequence[torch.Tensor], layers: Layers) -> torch.Tensor:
        """The result of `layers` for `inputs`; all else that it reads must not change between steps of one `kind`. It
        is valid until the next call."""
        if not self._possible:
            return layers(inputs)()
        found = self._recordings.get(kind)
        if found is None:
            return self._record(kind, inputs, layers)
        self._recordings.move_to_end(kind)
        for target, value in zip(found.inputs, inputs, strict=True):
            target.copy_(value)
        found.program()
        return found.output

    def _record(self, kind: Hashable, inputs: Sequence[torch.Tensor], layers: Layers) -> torch.Tensor:
        own = tuple(each.clone() for each in inputs)
        compute = layers(own)
        with _Watch() as watch, self._threads.recorded() as calls:
            output = compute()
        if watch.computing:
            self._possible = False
            named = ", ".join(sorted(watch.computing))
            logger.info("Layers are computed call by call: besides kernels, they use %s", named)
            return output
        self._recordings[kind] = _Recording(own, output, watch.kept, calls, self._threads.program(calls))
        while sum(each.nbytes for each in self._recordings.values()) > _MAX_BYTES and len(self._recordings) > 1:
            self._recordings.popitem(last=False)
        return output

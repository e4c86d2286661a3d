"""Triton's CPU interpreter, made correct and strict: importing this module changes it for the whole process.

A process either interprets kernels or compiles them: `tests/conftest.py` sets `TRITON_INTERPRET=1` before anything
imports Triton, so tests interpret, and compile in a separate process (`helpers.triton_ahead_of_time`).

Correct: bfloat16 arithmetic (the interpreter works on the bit patterns as integers), float8 rounding, minima and maxima
of NaN, the type of loop variables, and a matrix product that rounds the same at every place of a tile, for any tile
shape and CPU. Strict: a load, store or atomic outside the tensors of its launch is an error; a masked load without
`other` gives NaN, or absurd integers; programs can be run in any order (`shuffled_programs`).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from torch_backend.kernels import dependent_launch

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle

_TORCH_FLOATS = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@contextmanager
def shuffled_programs(seed: int | None) -> Iterator[None]:
    """Runs the programs of a launch in an order drawn from `seed` instead of the grid's; None changes nothing."""
    before, _order.seed = _order.seed, seed
    try:
        yield
    finally:
        _order.seed = before


@dataclass
class Loads:
    """Elements that kernels have loaded."""

    elements: int = 0


@contextmanager
def counted_loads() -> Iterator[Loads]:
    """Counts what launches within load."""
    before, _memory.loads = _memory.loads, Loads()
    try:
        yield _memory.loads
    finally:
        _memory.loads = before


@dataclass
class Waits:
    """For kernels that start while the one before them ends: how many programs have waited for it.

    - `free`: bytes that may be read before the wait, first and past-the-last of each tensor.
    - `plain`: kernels that are launched when the one before them has ended.
    """

    free: list[tuple[int, int]]
    plain: Sequence[str] = ()
    programs: int = 0
    waited: bool = False

    def wait(self) -> None:
        """Replaces `griddepcontrol.wait`."""
        self.waited = True
        self.programs += 1

    def check(self, lanes: np.ndarray, access: str) -> None:
        inside = np.zeros(lanes.shape, bool)
        for first, last in self.free if access == "load" else []:
            inside |= (lanes >= first) & (lanes < last)
        if not self.waited and not inside.all():
            raise RuntimeError(f"a program's {access} comes before it has waited for the kernel before it")


@contextmanager
def dependent_launches(*free: torch.Tensor, plain: Sequence[str] = ()) -> Iterator[Waits]:
    """Interprets kernels that start while the one before them ends: an access before a program has waited is an error,
    except for reads of `free`, and for kernels of the names `plain`, which are launched after it."""
    waits = Waits(list(_extents(list(free))), plain)
    _memory.waits = waits
    try:
        with (
            patch.object(dependent_launch, "gdc_wait", waits.wait),
            patch.object(dependent_launch, "gdc_launch_dependents", lambda: None),
        ):
            yield waits
    finally:
        _memory.waits = None


# -- Types that numpy does not know ------------------------------------------------------------------------------------


def _is_odd(handle: Any) -> bool:
    return handle.dtype.scalar in _TORCH_FLOATS


def _to_float32(handle: Any) -> Any:
    """The values of a handle of bfloat16 or float8 bits; any other handle as it is."""
    if not _is_odd(handle):
        return handle
    bits = torch.from_numpy(np.array(handle.data, copy=True, order="C"))
    return Handle(bits.view(_TORCH_FLOATS[handle.dtype.scalar]).float().numpy(), tl.float32)


def _from_float(data: np.ndarray, dtype: Any) -> Any:
    """Rounds to nearest, ties to even; float8 saturates, as the conversions of GPUs do."""
    values = torch.from_numpy(np.array(data, dtype=np.float32, order="C"))
    kind = _TORCH_FLOATS[dtype]
    if kind.itemsize == 1:
        values = values.clamp(torch.finfo(kind).min, torch.finfo(kind).max)
    bits = torch.uint8 if kind.itemsize == 1 else torch.uint16
    return Handle(values.to(kind).view(bits).numpy(), dtype)


def _install_casts() -> None:
    plain = Builder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == to.scalar:
            return source
        source = _to_float32(source)
        if to.scalar in _TORCH_FLOATS:
            return _from_float(source.data, to.scalar)
        return plain(self, source, to)

    Builder.cast_impl = cast
    Builder.create_fp_to_fp = lambda self, source, to, rounding: cast(self, source, to)


def _install_arithmetic() -> None:
    def through_float32(plain: Callable[..., Any], result_like: int) -> Callable[..., Any]:
        def compute(self: Any, *arguments: Any) -> Any:
            like = arguments[result_like]
            out = plain(self, *[_to_float32(x) if isinstance(x, Handle) else x for x in arguments])
            return _from_float(out.data, like.dtype.scalar) if _is_odd(like) and out.data.dtype != bool else out

        return compute

    Builder.binary_op = through_float32(Builder.binary_op, 0)
    Builder.unary_op = through_float32(Builder.unary_op, 0)
    Builder.create_rsqrt = through_float32(Builder.create_rsqrt, 0)
    Builder.create_fma = through_float32(Builder.create_fma, 2)
    Builder.create_dot = through_float32(_dot, 2)
    Builder.create_clampf = through_float32(Builder.create_clampf, 0)
    # PTX's min and max give the other operand for a NaN.
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Sums the products of an element one after the other, as no BLAS does: BLAS rounds an element by its place in the
    matrix, by the matrix's shape and by the CPU, and tests that compare bits of kernels would test BLAS instead."""
    dtype = d.data.dtype
    columns = np.moveaxis(a.data, -1, 0).astype(dtype, order="C")
    rows = np.moveaxis(b.data, -2, 0).astype(dtype, order="C")
    total, products = np.zeros_like(d.data), np.empty_like(d.data)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column[..., :, None], row[..., None, :], out=products)
        np.add(total, products, out=total)
    return Handle(total + d.data, d.dtype.scalar)


def _install_reductions() -> None:
    def widened(plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, inputs: Any) -> Any:
            if not any(_is_odd(x.handle) for x in inputs):
                return plain(self, inputs)
            wide = [self.to_tensor(_to_float32(x.handle).data, tl.float32) if _is_odd(x.handle) else x for x in inputs]
            out = plain(self, tuple(wide))
            results = list(out) if isinstance(out, (list, tuple)) else [out]
            for i, (result, x) in enumerate(zip(results, inputs, strict=False)):
                if _is_odd(x.handle) and result.dtype == tl.float32:
                    handle = _from_float(result.handle.data, x.dtype)
                    shaped = tl.block_type(x.dtype, list(result.shape)) if result.shape else x.dtype
                    results[i] = tl.core.tensor(handle, shaped)
            return results if isinstance(out, (list, tuple)) else results[0]

        return apply

    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = widened(operation.apply_impl)


# -- What a compiled kernel sees ---------------------------------------------------------------------------------------


def _visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.For:
    """Makes the variable of a `range` loop a tensor, as it is in a compiled kernel; the interpreter leaves an int."""
    self.generic_visit(node)
    call = node.iter.func if isinstance(node.iter, ast.Call) else None
    name = call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""
    if name == "range" and isinstance(node.target, ast.Name):
        own = ast.Assign(
            targets=[ast.Name(node.target.id, ast.Store())],
            value=ast.Name(node.target.id, ast.Load()),
            lineno=node.lineno,
        )
        node.body.insert(0, self.visit(own))
    return node


def _poison(dtype: Any, shape: tuple[int, ...]) -> Any:
    """The content of a masked lane when the kernel gives no value: NaN, or an integer far outside of any tensor."""
    if dtype.is_ptr():
        return Handle(np.full(shape, 8, np.uint64), dtype)
    if dtype in _TORCH_FLOATS:
        return _from_float(np.full(shape, np.nan), dtype)
    kind = interpreter._get_np_dtype(dtype)
    if kind.kind == "f":
        return Handle(np.full(shape, np.nan, kind), dtype)
    return Handle(np.full(shape, True if kind.kind == "b" else np.iinfo(kind).max // 3, kind), dtype)


# -- Bounds ------------------------------------------------------------------------------------------------------------


@dataclass
class _Memory:
    """First and past-the-last byte of every tensor of the running launch, the loaded elements, and the programs that
    have waited."""

    first: np.ndarray
    last: np.ndarray
    loads: Loads
    waits: Waits | None = None
    kernel: str = ""

    def check(self, pointers: Any, mask: Any, access: str) -> None:
        lanes = np.asarray(pointers.data, dtype=np.uint64)
        lanes = lanes[np.broadcast_to(mask.data, lanes.shape) != 0] if mask is not None else lanes.ravel()
        if access == "load":
            self.loads.elements += lanes.size
        if self.waits is not None and self.kernel not in self.waits.plain:
            self.waits.check(lanes, access)
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        inside = np.zeros(lanes.shape, bool)
        for first, last in zip(self.first, self.last, strict=True):
            inside |= (lanes >= first) & (lanes + size <= last)
        if inside.all():
            return
        bad = int(lanes[~inside][0])
        nearest = min(range(len(self.first)), key=lambda i: abs(bad - int(self.first[i])), default=None)
        where = "the launch has no tensor"
        if nearest is not None:
            start, length = int(self.first[nearest]), int(self.last[nearest]) - int(self.first[nearest])
            where = f"the first is {bad - start} bytes from the start of tensor {nearest} of {length} bytes"
        raise IndexError(f"{access} out of bounds: {int((~inside).sum())} of {inside.size} lanes; {where}")


_memory = _Memory(np.array([], np.uint64), np.array([], np.uint64), Loads())


def _extents(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _extents(part)
    elif isinstance(value, interpreter.TensorDescriptor):
        yield from _extents(value.base)
    else:
        value = interpreter._unwrap_tensor(value)
        if isinstance(value, torch.Tensor) and value.numel():
            span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            yield value.data_ptr(), value.data_ptr() + span * value.element_size()


def _install_bounds() -> None:
    prepare = interpreter.GridExecutor._init_args_hst
    load, store = Builder.create_masked_load, Builder.create_masked_store
    exchange, compare = Builder.create_atomic_rmw, Builder.create_atomic_cas

    def prepared(self: Any, arguments: Any, keywords: Any) -> Any:
        host, host_keywords = prepare(self, arguments, keywords)
        _memory.kernel = self.fn.__name__
        extents = list(_extents([*host, *host_keywords.values()]))
        _memory.first = np.array([first for first, _ in extents], np.uint64)
        _memory.last = np.array([last for _, last in extents], np.uint64)
        return host, host_keywords

    def checked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **keywords: Any) -> Any:
        mask = Handle(mask, tl.int1) if isinstance(mask, np.ndarray) else mask
        _memory.check(pointers, mask, "load")
        other = _poison(pointers.get_element_ty(), np.shape(pointers.data)) if other is None else other
        return load(self, pointers, mask, other, *rest, **keywords)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask = Handle(mask, tl.int1) if isinstance(mask, np.ndarray) else mask
        _memory.check(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest)

    def checked_exchange(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _memory.check(pointers, mask, "atomic")
        return exchange(self, operation, pointers, value, mask, *rest)

    def checked_compare(self: Any, pointers: Any, *rest: Any) -> Any:
        _memory.check(pointers, None, "atomic")
        return compare(self, pointers, *rest)

    interpreter.GridExecutor._init_args_hst = prepared
    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.create_atomic_rmw, Builder.create_atomic_cas = checked_exchange, checked_compare


# -- Order of programs -------------------------------------------------------------------------------------------------


@dataclass
class _Order:
    seed: int | None = None
    permutation: np.ndarray | None = None


_order = _Order()


def _install_order() -> None:
    set_dim, set_index = Builder.set_grid_dim, Builder.set_grid_idx

    def shuffled_dim(self: Any, x: int, y: int, z: int) -> None:
        set_dim(self, x, y, z)
        _order.permutation = None if _order.seed is None else np.random.default_rng(_order.seed).permutation(x * y * z)

    def shuffled_index(self: Any, x: int, y: int, z: int) -> None:
        if _order.permutation is not None:
            turn = int(_order.permutation[np.ravel_multi_index((x, y, z), self.grid_dim)])
            x, y, z = (int(i) for i in np.unravel_index(turn, self.grid_dim))
        set_index(self, x, y, z)
        if _memory.waits is not None:
            _memory.waits.waited = False

    Builder.set_grid_dim, Builder.set_grid_idx = shuffled_dim, shuffled_index


def _install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported; tests/conftest.py does")
    _install_casts()
    _install_arithmetic()
    _install_reductions()
    _install_bounds()
    _install_order()
    interpreter.ASTTransformer.visit_For = _visit_for
    # GPUs divide by zero in silence.
    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = np.errstate(all="ignore")(launch)
    # Asserts about integer overflow, which compiled kernels have in debug mode only; they double the time.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


_install()

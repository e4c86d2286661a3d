"""Passes on small graphs: the patterns that each must find, and those that it must leave unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.traced_graphs import TOKENS, called, program_of
from torch.nn import functional

from torch_backend.compilation.graph import Program, move, weight_of
from torch_backend.compilation.markers import attention, sum_of_ranks
from torch_backend.compilation.passes.collectives import fuse_all_reduces, insert_collectives
from torch_backend.compilation.passes.linears import fuse_gated_activations, merge_linears
from torch_backend.compilation.passes.no_ops import remove_no_ops
from torch_backend.compilation.passes.norms import fuse_norms, fuse_sums_with_norms
from torch_backend.compilation.passes.paged_attention import page_attention
from torch_backend.compilation.passes.rope import fuse_rope

HIDDEN = 8
X = torch.zeros(1, TOKENS, HIDDEN)
W = {"w": torch.zeros(HIDDEN)}

Function = Callable[..., torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def fused(function: Function, *inputs: torch.Tensor, weights: dict[str, torch.Tensor]) -> Program:
    """The program after the passes for no-ops and norms."""
    program = program_of(function, *inputs, weights=weights)
    remove_no_ops(program)
    fuse_norms(program)
    remove_no_ops(program)
    return program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    [
        norm,
        lambda x, w: (w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, keepdim=True) + 1e-6))).to(x.dtype),
        lambda x, w: (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + 1e-6) * w.float()).to(x.dtype),
    ],
    ids=["llama", "cast at the end", "weight behind"],
)
def test_norms_are_found_in_every_order_of_casts(form: Function, dtype: torch.dtype) -> None:
    program = fused(form, X.to(dtype), weights={"w": W["w"].to(dtype)})
    # two casts of one tensor are two nodes, which no pattern merges
    separate = form is not norm and dtype is torch.bfloat16
    assert (called(program) == ["rms_norm"]) == (not separate)


def test_one_plus_the_stored_weight_is_kept_in_float32() -> None:
    program = fused(lambda x, w: norm(x, 1.0 + w), X, weights=W)
    assert called(program) == ["rms_norm"]
    (node,) = (node for node in program.body.nodes if node.op == "call_function")
    weight = weight_of(node.args[2])
    assert weight is not None
    assert (weight.offset, weight.dtype, weight.parts) == (1.0, torch.float32, ("w",))


@pytest.mark.parametrize(
    "form",
    [
        lambda x, w: norm(x, 2.0 + w),
        lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)),
        lambda x, w: w * (x * (scale := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))) + scale,
        lambda x, w: w * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w: norm(x, w).double(),
        lambda x, w: w.double() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    ],
    ids=["2 + w", "cubes", "another axis", "scale used twice", "another x", "double behind", "double within"],
)
def test_similar_graphs_that_are_not_norms_are_unchanged(form: Function) -> None:
    program = fused(form, X, weights=W)
    assert ("rms_norm" in called(program)) == (
        called(program)[-1] == "to.dtype" and "rsqrt.default" not in called(program)
    )


def residuals(form: Function) -> list[str]:
    """The calls in the graph of two computed summands."""
    program = fused(lambda x, y, w: form(x * 2, y * 3, w), X, X.clone(), weights=W)
    fuse_sums_with_norms(program)
    remove_no_ops(program)
    return called(program)


def test_a_sum_and_its_norm_are_fused() -> None:
    assert residuals(lambda x, y, w: norm(x + y, w))[2:] == ["add_rms_norm", "getitem"]
    both = residuals(lambda x, y, w: norm(total := x + y, w) * total)
    assert both[2:] == ["add_rms_norm", "getitem", "getitem", "mul.Tensor"]
    before = residuals(lambda x, y, w: norm(x + y + norm(x, w), w))
    assert before.count("add_rms_norm") == 1


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y, w: norm(x + y, w) * x,
        lambda x, y, w: norm(x + y, w) * y.transpose(1, 2).transpose(2, 1).reshape(1, TOKENS, HIDDEN).exp(),
        lambda x, y, w: norm(x + x, w),
        lambda x, y, w: norm(x + y[:, :1], w),
        lambda x, y, w: norm(x + y[:, :1].expand(1, TOKENS, HIDDEN), w),
        lambda x, y, w: norm(x - y, w),
        lambda x, y, w: norm(torch.add(x, y, alpha=2), w),
    ],
    ids=["x used behind", "a view used behind", "x twice", "broadcast", "expanded", "difference", "factor"],
)
def test_sums_whose_summands_are_needed_are_unchanged(form: Function) -> None:
    """The operation writes into both."""
    assert "add_rms_norm" not in residuals(form)


def test_inputs_are_never_written_to() -> None:
    program = fused(lambda x, y, w: norm(x + y, w), X, X.clone(), weights=W)
    assert fuse_sums_with_norms(program) == 0


def summed(form: Function) -> list[str]:
    """The calls in the graph of a residual stream of two parts, sums over ranks and a weight, after the products."""
    program = program_of(
        lambda x, y, a, b, w: form(x * 2, functional.linear(y, a), functional.linear(y, b), w),
        X,
        X.clone(),
        weights={"a": torch.zeros(HIDDEN, HIDDEN), "b": torch.zeros(HIDDEN, HIDDEN)} | W,
    )
    passes = (insert_collectives, fuse_norms, fuse_sums_with_norms, fuse_all_reduces)
    for rewrite in (remove_no_ops, *passes):
        rewrite(program)
        remove_no_ops(program)
        program.body.lint()
    assert [rewrite(program) for rewrite in passes] == [0] * len(passes)
    return [name for name in called(program) if name not in ("mul.Tensor", "linear.default", "getitem")]


@pytest.mark.parametrize(
    "form",
    [
        lambda x, a, b, w: norm(x + sum_of_ranks(a), w),
        lambda x, a, b, w: norm(sum_of_ranks(a) + x, w),
        lambda x, a, b, w: norm(total := x + sum_of_ranks(a), w) * total,
    ],
    ids=["residual first", "part first", "sum used behind"],
)
def test_a_sum_over_ranks_goes_into_the_sum_and_its_norm(form: Function) -> None:
    assert summed(form) == ["all_reduce_add_rms_norm"]


def test_two_parts_are_added_before_they_are_summed_over_ranks() -> None:
    """Also where the three are normed together."""
    assert summed(lambda x, a, b, w: sum_of_ranks(a) + sum_of_ranks(b)) == ["add.Tensor", "all_reduce"]
    found = summed(lambda x, a, b, w: norm(sum_of_ranks(a) + sum_of_ranks(b) + x, w))
    assert found == ["add.Tensor", "all_reduce_add_rms_norm"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda x, a, b, w: norm((r := sum_of_ranks(a)) + x, w) * r, ["all_reduce", "add.Tensor", "rms_norm"]),
        (
            lambda x, a, b, w: (r := sum_of_ranks(a)).exp() * norm(x + r, w),
            ["all_reduce", "exp.default", "add_rms_norm"],
        ),
        (lambda x, a, b, w: norm(x + sum_of_ranks(a) * 3, w), ["all_reduce", "add_rms_norm"]),
        (lambda x, a, b, w: norm(sum_of_ranks(a), w) + x, ["all_reduce", "rms_norm", "add.Tensor"]),
        (lambda x, a, b, w: x + sum_of_ranks(a), ["all_reduce", "add.Tensor"]),
        (lambda x, a, b, w: norm(x - sum_of_ranks(a), w), ["all_reduce", "sub.Tensor", "rms_norm"]),
        (lambda x, a, b, w: sum_of_ranks(a) * a, ["clone.default", "all_reduce"]),
        (lambda x, a, b, w: sum_of_ranks(a.transpose(1, 2)) * 2, ["transpose.int", "clone.default", "all_reduce"]),
        (lambda x, a, b, w: (r := sum_of_ranks(a)) + r, ["all_reduce", "add.Tensor"]),
        (lambda x, a, b, w: (r := sum_of_ranks(a)) + sum_of_ranks(b) + r, ["all_reduce"] * 2 + ["add.Tensor"] * 2),
        (lambda x, a, b, w: sum_of_ranks(a) + sum_of_ranks(b)[:, :1], None),
    ],
    ids=[
        "used",
        "used before",
        "factor",
        "norm between",
        "no norm",
        "difference",
        "part used",
        "view",
        "twice",
        "kept",
        "broadcast",
    ],
)
def test_sums_over_ranks_that_are_not_fused(form: Function, expected: list[str] | None) -> None:
    """The sum writes into its input, so nothing else may read that."""
    found = summed(form)
    if expected is None:
        assert found.count("all_reduce") == 2
    else:
        assert found == expected


MATRICES = {"gate": torch.zeros(6, HIDDEN), "up": torch.zeros(6, HIDDEN)}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda x, g, u: functional.silu(x @ g.T) * (x @ u.T), ["silu_mul"]),
        (lambda x, g, u: functional.linear(x, u) * functional.silu(functional.linear(x, g)), ["linear", "silu_mul"]),
        (
            lambda x, g, u: functional.gelu(functional.linear(x, g), approximate="tanh") * functional.linear(x, u),
            ["linear", "gelu_mul"],
        ),
        (
            lambda x, g, u: functional.gelu(functional.linear(x, g)) * functional.linear(x, u),
            ["linear", "gelu", "linear"],
        ),
        (
            lambda x, g, u: functional.silu(functional.linear(x, g)) * functional.linear(x * 2, u),
            ["linear", "linear", "silu_mul"],
        ),
        (
            lambda x, g, u: functional.silu(a := functional.linear(x, g)) * functional.linear(x, u) + a,
            ["linear", "linear", "silu_mul"],
        ),
    ],
    ids=["products", "up first", "gelu by tanh", "gelu by erf", "two inputs", "gate used twice"],
)
def test_gated_activations_and_their_matrices_are_fused(form: Function, expected: list[str]) -> None:
    program = program_of(form, X, weights=MATRICES)
    for rewrite in (remove_no_ops, fuse_gated_activations, remove_no_ops, merge_linears, remove_no_ops):
        rewrite(program)
    found = [name.partition(".")[0] for name in called(program)]
    assert [name for name in found if name in ("linear", "silu_mul", "gelu_mul", "gelu")] == expected


def test_tensors_created_in_code_are_on_the_models_device() -> None:
    program = program_of(lambda x: x + torch.arange(HIDDEN, device=x.device), X, weights={})
    move(program.body, torch.device("meta"))
    made = [node.kwargs.get("device") for node in program.body.nodes if "arange" in node.name]
    assert made == [torch.device("meta")]


def test_slices_that_cover_a_tensor_become_that_tensor() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first, second, x[..., :0]], -1) + torch.cat([x[..., :3], x[..., 3:]], -1)

    program = program_of(halves, X, weights={})
    remove_no_ops(program)
    assert called(program) == ["add.Tensor"]

    def swapped(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([second, first], -1) + torch.cat([x[..., :3], x[..., 4:]], -1).sum()

    program = program_of(swapped, X, weights={})
    remove_no_ops(program)
    assert called(program).count("cat.default") == 2


HEAD_DIM = 8
PROJECTIONS = {name: torch.zeros(2 * HEAD_DIM, HIDDEN) for name in ("q", "k", "v")}
POSITIONS = torch.zeros(1, TOKENS, dtype=torch.int64)


def halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def ropes_found(
    rotate: Function = halves,
    *,
    tables: Function = lambda angles: torch.cat((angles, angles), -1),
    of_keys: float = 1.0,
    turn: Callable[..., torch.Tensor] = lambda x, turned, cos, sin: x * cos + turned * sin,
) -> int:
    """How many of one layer's rotations are fused, and how many with its three projections."""

    def attending(x: torch.Tensor, positions: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() * torch.arange(1.0, HEAD_DIM / 2 + 1)
        query, key, values = (functional.linear(x, w).view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for w in weights)
        emb = tables(angles)
        of_query = emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)
        other = of_query if of_keys == 1.0 else ((emb * of_keys).cos().unsqueeze(1), (emb * of_keys).sin().unsqueeze(1))
        heads = [turn(each, rotate(each), *by) for each, by in ((query, of_query), (key, other))]
        by_token = (each.transpose(1, 2) for each in (*heads, values))
        return attention(*by_token, None, 0, 1.0, None, None)

    program = program_of(attending, X, POSITIONS, weights=PROJECTIONS)
    for rewrite in (remove_no_ops, page_attention, remove_no_ops):
        rewrite(program)
    found = fuse_rope(program)
    remove_no_ops(program)
    assert merge_linears(program) == found
    assert ("rotation" in called(program)) == bool(found)
    return found


def test_rotations_of_halves_are_found() -> None:
    assert ropes_found() == 1
    assert ropes_found(turn=lambda x, turned, cos, sin: sin * turned + cos * x) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"rotate": neighbours},
        {"rotate": lambda x: torch.cat((x[..., HEAD_DIM // 2 :], -x[..., : HEAD_DIM // 2]), -1)},
        {"rotate": lambda x: torch.cat((-x[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :]), -1)},
        {"rotate": lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1)},
        {"rotate": lambda x: torch.cat((-x[..., HEAD_DIM // 2 - 1 :], x[..., 1 : HEAD_DIM // 2]), -1)},
        {"tables": lambda angles: torch.cat((angles, angles * 2), -1)},
        {"of_keys": 2.0},
        {"turn": lambda x, turned, cos, sin: x * cos - turned * sin},
        {"turn": lambda x, turned, cos, sin: x * cos + turned * cos},
        {"turn": lambda x, turned, cos, sin: x * sin + turned * cos},
    ],
    ids=[
        "neighbours",
        "sign",
        "one half twice",
        "a quarter",
        "one over",
        "tables",
        "keys",
        "difference",
        "cosines",
        "exchanged",
    ],
)
def test_other_rotations_are_unchanged(changes: dict[str, Any]) -> None:
    assert ropes_found(**changes) == 0

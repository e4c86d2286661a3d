"""The fused operations as Triton kernels, in the interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.equal_ranks import EqualRanks
from helpers.triton_interpreter import shuffled_programs

from torch_backend.kernels.operations import TritonOperations
from torch_backend.kernels.rotate_and_write import encode_e4m3
from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Operations, Rotation

assert helpers.triton_interpreter

OPERATIONS: Operations = TritonOperations()
TYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """`actual` is float64 `exact` rounded to its type, apart from float32 errors right at the edge of two roundings."""
    step = torch.finfo(actual.dtype).eps
    tolerance = 0.5 * step + 2e-6 if actual.dtype != torch.float32 else 2e-6
    assert actual.isfinite().all()
    error = (actual.double() - exact).abs()
    assert (error <= tolerance * exact.abs() + torch.finfo(actual.dtype).smallest_normal + 1e-7).all()


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


# -- Norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1, 63, 576, 4096, 5120, 8192])
def test_rms_norm(hidden: int, dtype: torch.dtype) -> None:
    x, weight = random(3, hidden, dtype=dtype, spread=30.0), random(hidden, dtype=dtype, seed=1)
    given = x.clone()
    assert_rounded_once(OPERATIONS.rms_norm(x, weight, EPS), exact_norm(x, weight))
    assert torch.equal(x, given)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [63, 576, 4096, 5120, 8192])
def test_add_rms_norm_norms_the_rounded_sum(hidden: int, dtype: torch.dtype) -> None:
    x, residual = random(3, hidden, dtype=dtype), random(3, hidden, dtype=dtype, seed=1, spread=20.0)
    weight = random(hidden, dtype=dtype, seed=2)
    total = x + residual
    normed, summed = OPERATIONS.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, total)
    assert_rounded_once(normed, exact_norm(total, weight))


def test_the_sum_over_ranks_is_added_and_normed() -> None:
    x, residual, weight = random(3, 576), random(3, 576, seed=1), random(576, seed=2)
    expected = OPERATIONS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    found = OPERATIONS.all_reduce_add_rms_norm(x / 2, residual, weight, EPS, EqualRanks())
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_float32_are_not_rounded(dtype: torch.dtype) -> None:
    """Like Gemma's, which are 1 + w."""
    x, residual = random(3, 576, dtype=dtype), random(3, 576, dtype=dtype, seed=1)
    weight = 1 + random(576, seed=2, spread=0.01)
    assert_rounded_once(OPERATIONS.rms_norm(x, weight, EPS), exact_norm(x, weight))
    total = x + residual
    assert_rounded_once(OPERATIONS.add_rms_norm(x, residual, weight, EPS)[0], exact_norm(total, weight))


def test_norms_of_zeros_and_of_large_values() -> None:
    x = torch.stack([torch.zeros(576), torch.full((576,), 60_000.0)]).half()
    weight = torch.ones(576).half()
    assert_rounded_once(OPERATIONS.rms_norm(x, weight, EPS), exact_norm(x, weight))


def test_no_rows_launch_nothing() -> None:
    weight = torch.ones(64)
    empty = torch.empty(0, 64)
    assert OPERATIONS.rms_norm(empty, weight, EPS).shape == (0, 64)
    assert OPERATIONS.add_rms_norm(empty, empty.clone(), weight, EPS)[0].shape == (0, 64)
    assert OPERATIONS.silu_mul(empty).shape == (0, 32)
    rotation = Rotation(torch.empty(0, 32), torch.empty(0, 32))
    kv = KVPages.allocate(2, 1, 4, 64, torch.float32, torch.device("cpu"))
    queries = OPERATIONS.rotate_and_write(torch.empty(0, 256), rotation, None, kv, torch.empty(0, dtype=torch.int64))
    assert queries.shape == (0, 2, 64)


def test_wrong_shapes_are_refused() -> None:
    x = random(4, 64)
    with pytest.raises(ValueError, match=r"the weight torch.float32 \[63\]"):
        OPERATIONS.rms_norm(x, torch.ones(63), EPS)
    with pytest.raises(ValueError, match=r"strides \[1, 4\]"):
        OPERATIONS.rms_norm(random(64, 4).T, torch.ones(64), EPS)
    with pytest.raises(ValueError, match="residual"):
        OPERATIONS.add_rms_norm(x, x.half(), torch.ones(64), EPS)
    with pytest.raises(ValueError, match="gate and up"):
        OPERATIONS.silu_mul(random(4, 63))


# -- Activation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("intermediate", [1, 100, 1023, 1024, 1025, 3072])
def test_silu_mul(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * intermediate, dtype=dtype, spread=8.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded_once(OPERATIONS.silu_mul(gate_up), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("intermediate", [1, 1023, 1025])
def test_gelu_mul(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * intermediate, dtype=dtype, spread=2.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_rounded_once(OPERATIONS.gelu_mul(gate_up), exact)


def test_gelu_mul_of_extreme_gates() -> None:
    gates = torch.tensor([-3e4, -100.0, -20.0, 0.0, 20.0, 100.0, 3e4])
    found = OPERATIONS.gelu_mul(torch.cat([gates, torch.full((7,), 2.0)])[None])
    assert torch.equal(found[0], 2 * gates.clamp(min=0))


def test_silu_mul_of_extreme_gates() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]])
    assert OPERATIONS.silu_mul(gate_up).tolist() == [[-0.0, 200.0, 0.0]]


# -- Rotation and writing ----------------------------------------------------------------------------------------------


class Case:
    """Tokens to be written, and the expected result in float64."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, pages: torch.dtype,
        has_norms: bool, spread: float = 1.0, tokens: int = 5,
    ) -> None:  # fmt: skip
        generator = np.random.default_rng(3)
        self.dtype = dtype
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, spread=spread)
        angles = random(tokens, head_dim // 2, seed=1, spread=5.0)
        self.rotation = Rotation(angles.cos(), angles.sin())
        weights = random(2, head_dim, dtype=dtype, seed=2)
        self.norms = HeadNorms(weights[0].contiguous(), weights[1].contiguous(), EPS) if has_norms else None
        # poisoned: unwritten slots must stay
        num_pages = 4 + tokens
        shape = (num_pages, kv_heads, page_size, head_dim)
        self.kv = KVPages(*(torch.full(shape, torch.nan).to(pages) for _ in range(2)))
        if pages == FLOAT8:
            scales = [random(kv_heads, seed=seed).abs() + 0.5 for seed in (4, 5)]
            self.kv = replace(self.kv, key_scale=scales[0], value_scale=scales[1])
        slots = generator.permutation(np.arange(page_size, num_pages * page_size))[:tokens]
        self.slots = torch.from_numpy(slots)

    def run(self) -> torch.Tensor:
        return OPERATIONS.rotate_and_write(self.qkv, self.rotation, self.norms, self.kv, self.slots)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, float64 `[T, heads, head_dim]`."""
        head_dim = self.kv.keys.shape[3]
        parts = self.qkv.double().view(len(self.qkv), -1, head_dim)
        queries, keys, values = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norms:
            queries = exact_norm(queries, self.norms.query, self.norms.eps)
            keys = exact_norm(keys, self.norms.key, self.norms.eps)
        return self._rotated(queries), self._rotated(keys), values

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cosines, sines = self.rotation.cosines.double()[:, None], self.rotation.sines.double()[:, None]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    def written(self, pages: torch.Tensor) -> torch.Tensor:
        """The content of the slots, `[T, kv_heads, head_dim]`."""
        page_size = pages.shape[2]
        return torch.stack([pages[slot // page_size, :, slot % page_size] for slot in self.slots.tolist()])

    def untouched(self, pages: torch.Tensor) -> bool:
        """Asserts that all other slots are unchanged."""
        bits = pages.view(torch.uint8).clone()
        for slot in self.slots.tolist():
            bits[slot // pages.shape[2], :, slot % pages.shape[2]] = 0
        poison = torch.full(pages.shape, torch.nan).to(pages.dtype).view(torch.uint8)
        return bool(((bits == poison) | (bits == 0)).all())


def assert_near(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once from a float32 sum of two products, which may cancel: the error is relative to the terms."""
    assert actual.isfinite().all()
    tolerance = 0.5 * torch.finfo(actual.dtype).eps * exact.abs() + 4e-6 * exact.abs().amax(-1, keepdim=True)
    assert ((actual.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(9, 3, 64, 16), (5, 5, 80, 1), (2, 1, 96, 4), (32, 8, 128, 64), (3, 1, 256, 16), (40, 20, 64, 2)],
)
def test_rotate_and_write(
    heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, has_norms: bool
) -> None:
    case = Case(heads, kv_heads, head_dim, page_size, dtype, dtype, has_norms)
    queries = case.run()
    exact_queries, exact_keys, exact_values = case.exact()
    assert queries.dtype == dtype
    assert queries.is_contiguous()
    assert_near(queries, exact_queries)
    assert_near(case.written(case.kv.keys), exact_keys)
    assert torch.equal(case.written(case.kv.values).double(), exact_values)
    assert case.untouched(case.kv.keys)
    assert case.untouched(case.kv.values)


def test_norms_of_heads_in_float32_are_not_rounded() -> None:
    case = Case(4, 2, 64, 16, torch.bfloat16, torch.bfloat16, has_norms=True)
    assert case.norms is not None
    query, key = (1 + random(64, seed=seed, spread=0.01) for seed in (8, 9))
    case.norms = HeadNorms(query, key, EPS)
    queries = case.run()
    exact_queries, exact_keys, _ = case.exact()
    assert_near(queries, exact_queries)
    assert_near(case.written(case.kv.keys), exact_keys)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_float8_pages_hold_values_over_their_heads_scale(head_dim: int, spread: float) -> None:
    case = Case(4, 2, head_dim, 4, torch.bfloat16, FLOAT8, has_norms=False, spread=spread)
    case.run()
    _, keys, values = case.exact()
    for pages, exact, scale in ((case.kv.keys, keys, case.kv.key_scale), (case.kv.values, values, case.kv.value_scale)):
        stored = case.written(pages).double()
        wanted = (exact / scale.double()[:, None]).clamp(-448, 448)
        assert stored.isfinite().all()
        # half a step of three bits, or of the smallest numbers
        assert ((stored - wanted).abs() <= (wanted.abs() / 16 + 1e-5).clamp(min=2.0**-10)).all()
        assert case.untouched(pages)
    assert (case.written(case.kv.values).float().abs().max() == 448) == (spread > 1)


def test_padding_writes_into_page_zero() -> None:
    case = Case(4, 2, 64, 4, torch.float32, torch.float32, has_norms=False)
    real = case.slots.clone()
    case.slots[3:] = 0
    case.run()
    case.slots = real[:3]
    assert_near(case.written(case.kv.keys), case.exact()[1][:3])
    case.kv.keys[0] = torch.nan
    assert case.untouched(case.kv.keys)


def test_the_order_of_programs_does_not_matter() -> None:
    results = []
    for seed in (None, 1, 2):
        case = Case(9, 3, 80, 4, torch.bfloat16, FLOAT8, has_norms=True)
        with shuffled_programs(seed):
            results.append(
                (case.run().view(torch.uint16), case.kv.keys.view(torch.uint8), case.kv.values.view(torch.uint8))
            )
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_unsupported_sizes_are_refused() -> None:
    kv = KVPages.allocate(2, 1, 4, 48, torch.float32, torch.device("cpu"))
    rotation = Rotation(torch.ones(1, 24), torch.ones(1, 24))
    with pytest.raises(ValueError, match="head_dim among"):
        OPERATIONS.rotate_and_write(torch.ones(1, 144), rotation, None, kv, torch.zeros(1, dtype=torch.int64))


# -- Float8 ------------------------------------------------------------------------------------------------------------


@triton.jit
def _encode_kernel(x, codes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + at, encode_e4m3(tl.load(x + at)))


def test_float8_is_encoded_as_torch_does_but_saturates() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(FLOAT8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halfway = (numbers[1:] + numbers[:-1]) / 2  # ties, which go to the even neighbour
    x = torch.cat([numbers, halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(-1e9))])
    x = torch.cat([x, random(4096 - len(x) - 3, spread=3.0), torch.tensor([torch.inf, -1e30, torch.nan])])
    encoded = torch.empty(4096, dtype=torch.uint8)
    _encode_kernel[(4,)](x, encoded, BLOCK=1024)
    expected = x.clamp(-448, 448).to(FLOAT8).view(torch.uint8)
    assert torch.equal(encoded, expected)

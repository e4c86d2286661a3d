"""Sums in the GPUs' own memory against a stand-in for torch's library, and over two processes connected by gloo."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.distributed._symmetric_memory  # defines the operators of symm_mem
import torch.multiprocessing

from torch_backend import process_group, symmetric_memory
from torch_backend.parallel import DistributedTensorParallel
from torch_backend.symmetric_memory import Method, NoSymmetricMemoryError, SymmetricSums

CPU = torch.device("cpu")
KIB = 1024


@dataclass(frozen=True)
class Met:
    multicast_ptr: int = 0


@dataclass
class StandIn:
    """Has the signatures of torch's library; where there are several ranks, it does over gloo what the kernels do."""

    met: Met = field(default_factory=Met)
    fails_at: str = ""
    calls: list[str] = field(default_factory=list)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._note("empty")
        return torch.zeros(size, dtype=dtype, device=device)

    def rendezvous(self, buffer: torch.Tensor, group_name: str) -> Met:
        self._note("rendezvous")
        return self.met

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, local: torch.Tensor, operation: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        self._note("one_shot")
        assert buffer.shape == local.shape == out.shape
        buffer.copy_(local)
        return out.copy_(self._sum_of_all(buffer, operation))

    def two_shot_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        self._note("two_shot")
        return buffer.copy_(self._sum_of_all(buffer, operation))

    def multimem_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        self._note("multimem")
        return buffer.copy_(self._sum_of_all(buffer.float(), operation).to(buffer.dtype))

    def _sum_of_all(self, x: torch.Tensor, operation: str) -> torch.Tensor:
        """Sums in the order of ranks, rounded after each, as the kernels do."""
        assert operation == "sum"
        if not torch.distributed.is_initialized():
            return x
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise RuntimeError(f"{call} is not to be had\nand much more")


def yes(said: bool) -> bool:
    return said


def sums(size: int = 2, multicast: int = 0) -> SymmetricSums:
    return SymmetricSums.connect("group", size, CPU, yes, StandIn(Met(multicast)))


@pytest.mark.parametrize(
    ("size", "multicast", "kib", "method"),
    [
        (2, 0, 64, Method.ONE_SHOT),
        (2, 0, 1024, Method.ONE_SHOT),
        (2, 0, 1040, Method.TWO_SHOT),
        (8, 0, 144, Method.ONE_SHOT),
        (8, 0, 160, Method.TWO_SHOT),
        (8, 4096, 144, Method.ONE_SHOT),
        (8, 4096, 160, Method.MULTIMEM),
        (8, 4096, 16 * KIB, Method.MULTIMEM),
        (6, 4096, 16, Method.MULTIMEM),
        (3, 0, 16, Method.TWO_SHOT),
        (2, 0, 16 * KIB + 16, None),
    ],
)
def test_the_method_follows_from_size_and_chip(size: int, multicast: int, kib: int, method: Method | None) -> None:
    x = torch.empty(kib * KIB // 2, dtype=torch.bfloat16)
    assert sums(size, multicast).method(x) is method


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(8, 64, dtype=torch.float16),
        torch.zeros(8, 64).T,
        torch.zeros(3),
        torch.zeros(0, 64),
        torch.zeros(80)[2:66],
    ],
    ids=["type", "strides", "odd size", "nothing", "odd place"],
)
def test_unsupported_sums_use_nccl(x: torch.Tensor) -> None:
    assert sums().all_reduce(x) is None


def test_the_operators_have_the_called_signatures() -> None:
    operators = torch.ops.symm_mem
    found = [
        str(operator.default._schema)
        for operator in (
            operators.one_shot_all_reduce_copy_out,
            operators.two_shot_all_reduce_,
            operators.multimem_all_reduce_,
        )
    ]
    assert found == [
        "symm_mem::one_shot_all_reduce_copy_out(Tensor symm_buffer, Tensor local_input, str reduce_op, "
        "str group_name, Tensor(a!) out) -> Tensor(a!)",
        "symm_mem::two_shot_all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
        "symm_mem::multimem_all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    ]


@pytest.mark.parametrize("call", ["empty", "rendezvous"])
def test_if_one_rank_cannot_use_it_none_does(call: str) -> None:
    with pytest.raises(NoSymmetricMemoryError, match=rf"^{call} is not to be had$"):
        SymmetricSums.connect("group", 2, CPU, yes, StandIn(fails_at=call))
    answers = iter([True, False] if call == "rendezvous" else [False])
    with pytest.raises(NoSymmetricMemoryError, match="another rank cannot"):
        SymmetricSums.connect("group", 2, CPU, lambda _: next(answers), StandIn())


def test_the_switch_works_only_if_all_ranks_are_connected() -> None:
    answers = iter([True, True, False])
    found = SymmetricSums.connect("group", 2, CPU, lambda _: next(answers), StandIn(Met(4096)))
    assert not found.multicast


class Alone:
    """A group of two whose other rank has the same values."""

    rank, size = 0, 2

    def minimum(self, value: int) -> int:
        return value


@pytest.mark.parametrize(
    ("library", "wanted", "line"),
    [
        (
            StandIn(),
            True,
            "Sums over ranks: symmetric memory, one-shot up to 1024 KiB, two-shot up to 16 MiB, NCCL beyond",
        ),
        (StandIn(Met(1)), True, "one-shot up to 1024 KiB, multimem up to 16 MiB, NCCL beyond"),
        (
            StandIn(fails_at="rendezvous"),
            True,
            "NCCL, because the GPUs cannot read each other's memory: rendezvous is not",
        ),
        (StandIn(), False, "Sums over ranks: NCCL, because of --disable-custom-all-reduce"),
    ],
)
def test_the_log_says_which_method_sums_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, library: StandIn, wanted: bool, line: str
) -> None:
    monkeypatch.setattr(symmetric_memory, "TorchLibrary", lambda: library)
    caplog.set_level(logging.INFO)
    found = process_group._symmetric_sums(Alone(), "group", CPU, wanted)  # type: ignore[arg-type]
    assert line in caplog.text
    assert (found is None) is ("NCCL, " in line)


SHAPES = {"one_shot": (16, 64), "two_shot": (257, 4096), "nccl": (9, 3)}


def test_two_processes_get_the_same_bits_by_either_method(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    for name, total in first.items():
        assert torch.equal(total, second[name]), name
    for name in SHAPES:
        one, other = _numbers(0, name), _numbers(1, name)
        assert torch.equal(first[name], one + other)
        assert torch.equal(first[f"{name}, gloo"], one + other)
        assert torch.equal(first[f"{name}, in order"], one + other)


def _numbers(rank: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator).bfloat16()


def _rank(rank: int, scratch: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=2)
    world = torch.distributed.group.WORLD
    assert world is not None
    plain, library = DistributedTensorParallel(world, world), StandIn()
    agree: Callable[[bool], bool] = lambda said: plain.minimum(int(said)) == 1  # noqa: E731
    parallel = DistributedTensorParallel(world, world, SymmetricSums.connect("group", 2, CPU, agree, library))
    in_order = DistributedTensorParallel(world, world, in_order=True)
    found = {}
    for name in SHAPES:
        found[name] = parallel.all_reduce(_numbers(rank, name)).clone()
        found[f"{name}, gloo"] = plain.all_reduce(_numbers(rank, name))
        found[f"{name}, in order"] = in_order.all_reduce(_numbers(rank, name))
    assert library.calls == ["empty", "rendezvous", "one_shot", "two_shot"]
    torch.save(found, Path(scratch) / str(rank))
    torch.distributed.destroy_process_group()

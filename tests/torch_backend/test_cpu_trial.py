"""CPU kernels are compiled once, tried before they are used, and replaced by torch only with a log line."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError

from sglang_jax.cpu_kernels.compiling import KernelCompiler
from sglang_jax.cpu_kernels.language import add, floats, load, store, take
from sglang_jax.cpu_kernels.rms_norm import build_rms_norm
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER
from torch_backend import cpu_trial
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_kernels import team
from torch_backend.cpu_kernels.compiling import caching_compiler
from torch_backend.cpu_kernels.operations import CpuOperations
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads
from torch_backend.cpu_trial import CpuForm, CpuKernelsError, make_cpu_kernels
from torch_backend.kv_pages import KVPages
from torch_backend.operations import Rotation

FORM = CpuForm(torch.float32, torch.float32, (HeadForm(16, 2),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the three kernels of `FORM`, compiled here; tests may add others."""
    folder = tmp_path_factory.mktemp("cache")
    make_cpu_kernels(FORM, folder)
    assert len(list(folder.rglob("*.nbc"))) == 3
    return folder


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_compiled_kernels_are_found_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = files(folder)
    with caplog.at_level(logging.INFO, logger="torch_backend"):
        kernels = make_cpu_kernels(FORM, folder)
    assert isinstance(kernels.attention, CpuAttention)
    assert isinstance(kernels.operations, CpuOperations)
    assert files(folder) == before
    (message,) = caplog.messages
    assert message.startswith("CPU kernels for torch.float32 ready after ")


def test_pages_that_are_not_contiguous_are_refused(folder: Path) -> None:
    """Their address does not say where a slot is, and a copy would swallow the writes."""
    kernels = make_cpu_kernels(FORM, folder)
    whole = torch.zeros(3, 2, 4, 16)
    scattered = torch.zeros(3, 4, 2, 16).transpose(1, 2)
    rotation = Rotation(torch.ones(1, 8), torch.zeros(1, 8))
    for kv in (KVPages(scattered, whole), KVPages(whole, scattered)):
        with pytest.raises(ValueError, match="pages must be contiguous"):
            kernels.operations.rotate_and_write(torch.ones(1, 8 * 16), rotation, None, kv, torch.tensor([5]))
        batch = ForwardBatch(
            tokens=torch.zeros(1, dtype=torch.int32),
            positions=torch.zeros(1, dtype=torch.int32),
            write_slots=torch.tensor([4]),
            page_table=torch.ones(1, 1, dtype=torch.int32),
            kv_lens=torch.ones(1, dtype=torch.int32),
            query_starts=torch.arange(2, dtype=torch.int32),
            num_decode=1,
        )
        with pytest.raises(ValueError, match="pages must be contiguous"):
            kernels.attention.prepare(batch)(torch.ones(1, 4, 16), kv, AttentionOptions(scale=0.25))
    assert not whole.any()
    assert not scattered.any()


def test_another_shape_is_compiled_alongside_it(folder: Path) -> None:
    before = files(folder)
    make_cpu_kernels(CpuForm(torch.float32, torch.float32, (HeadForm(16, 3),)), folder)
    after = files(folder)
    assert len([path for path in after.keys() - before.keys() if path.suffix == ".nbc"]) == 1
    assert all(after[path] == time for path, time in before.items() if path.suffix == ".nbc")


@pytest.mark.parametrize("file", ["language.py", "rms_norm.py"])
def test_a_change_of_any_kernel_file_recompiles_them(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes
    assert caching_compiler(folder).folder in {path.parent.parent for path in files(folder)}
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == file else b""))
    assert caching_compiler(folder).folder not in {path.parent.parent for path in files(folder)}


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with caplog.at_level(logging.INFO, logger="sglang_jax"):
        compiler = caching_compiler(in_the_way)
    assert compiler.folder is None
    (message,) = caplog.messages
    assert message.startswith("CPU kernels are compiled again at each start: ")
    assert str(in_the_way) in message
    assert build_rms_norm(compiler, 4).address


def test_without_numba_torch_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_trial, "find_spec", lambda name: None)
    with pytest.raises(CpuKernelsError, match=r"need numba, which is not installed: pip install -e '\.\[torch\]'"):
        make_cpu_kernels(FORM, folder)


@pytest.mark.parametrize(
    "error", [TypingError("no such type"), OSError("no room"), RuntimeError("LLVM ERROR")], ids=repr
)
def test_a_numba_that_cannot_compile_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(compiler: KernelCompiler, kernel: Callable[[Any], None]) -> None:
        raise error

    monkeypatch.setattr(KernelCompiler, "__call__", fail)
    with pytest.raises(CpuKernelsError, match=f"numba cannot compile them \\(.*{error.args[0]}"):
        make_cpu_kernels(FORM, folder)


@pytest.mark.parametrize(
    ("kernels", "method", "what"),
    [
        (CpuOperations, "add_rms_norm", "norm"),
        (CpuOperations, "rotate_and_write", "queries"),
        (CpuAttention, "attend", "attention"),
    ],
)
@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_kernels_that_compute_wrongly_are_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: type[object], method: str, what: str, wrong: float
) -> None:
    right = vars(kernels)[method]

    def scaled(*arguments: object) -> object:
        found = right(*arguments)
        return tuple(part * wrong for part in found) if isinstance(found, tuple) else found * wrong

    monkeypatch.setattr(kernels, method, scaled)
    with pytest.raises(CpuKernelsError, match=rf"wrong results on this machine \({what}\)"):
        make_cpu_kernels(FORM, folder)


def test_a_torch_without_openmp_runs_them_on_one_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    team.openmp_parallel.cache_clear()
    monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    try:
        with caplog.at_level(logging.INFO, logger="torch_backend"):
            make_cpu_kernels(FORM, folder)
    finally:
        team.openmp_parallel.cache_clear()
    assert caplog.messages[0] == "CPU kernels run on one thread: this torch was built without OpenMP"
    assert len([message for message in caplog.messages if "one thread" in message]) == 1


def test_large_work_is_shared_by_torchs_threads(folder: Path) -> None:
    """Every participating thread marks its slot."""

    def mark(work):  # type: ignore[no-untyped-def]
        marks = floats(work[FIRST_FIELD])
        slot = take(work, SLOT_COUNTER)
        store(marks, slot, load(marks, slot) + np.float32(1))

    launcher = Launcher(caching_compiler(folder)(mark), "q")
    marks = torch.zeros(4096)
    alone, together = [1.0] + [0.0] * 4095, [1.0] * launcher.slots + [0.0] * (4096 - launcher.slots)
    assert launcher.slots == torch.get_num_threads()
    for elements, items, expected in ((100, 50, alone), (10**6, 1, alone), (10**6, 50, together), (100, 50, alone)):
        marks.zero_()
        launcher(elements, items, marks.data_ptr())
        assert marks.tolist() == expected


def test_own_threads_share_work_and_end(folder: Path) -> None:
    """Each item is done once in each of many calls, by two callers with teams of their own at once. In the last call of
    each, the first thread waits until another one has an item too, and that one is slow. Threads that sleep wake up;
    without their team they end."""

    def count(work):  # type: ignore[no-untyped-def]
        marks, together = floats(work[FIRST_FIELD]), work[FIRST_FIELD + 1]
        slot = take(work, SLOT_COUNTER)
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            while together != 0 and slot == 0 and add(work, ITEM_COUNTER, 0) < 2:
                pass
            spins = 0
            while together != 0 and slot != 0 and spins < 1_000_000:
                spins += add(work, ITEM_COUNTER, 0) * 0 + 1
            store(marks, item, load(marks, item) + np.float32(1))

    compiler = caching_compiler(folder)
    kernel = compiler(count)

    def many_calls(number: int) -> list[torch.Tensor]:
        launcher = Launcher(kernel, "qq", OwnThreads(compiler, 3))
        found = []
        for call in range(300):
            items = 1 + (7 * call + number) % 40
            marks = torch.zeros(64)
            if call % 100 == 99:
                time.sleep(0.02)  # longer than threads wait before they sleep
            last = call == 299
            launcher(10**6, items + last, marks.data_ptr(), int(last))
            found.append(marks[: items + last].eq(1).all() & marks[items + last :].eq(0).all())
        return found

    before = threading.active_count()
    with ThreadPoolExecutor(2) as callers:
        for found in callers.map(many_calls, range(2)):
            assert all(found)
    for _ in range(500):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before

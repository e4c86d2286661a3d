"""The GPU suite runs on a CPU with tiny shapes, detects errors, and survives sections that fail."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers.triton_interpreter  # noqa: F401 - kernels in this process are interpreted
import pytest
import torch
from helpers.scaled_grouped_mm import scaled_grouped_mm

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.attention.interface import AttentionOptions, StepAttention
from torch_backend.attention.native import NativeAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.operations import TritonRounding
from torch_backend.kv_pages import KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.native_sampler import NativeSampler
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.rounded_rows import RoundedRows
from torch_backend.sampler import SamplerInputs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.py"
CPU = torch.device("cpu")
PATIENT = ("--time-limit", "200")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the suite."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return lambda name: importlib.import_module(f"gpu.{name}")


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def rows_of(module: ModuleType, bench: Any) -> list[dict[str, Any]]:
    with torch.inference_mode():
        tables = list(module.run(bench))
    assert all(table.title for table in tables)
    return [row for table in tables for row in table.rows]


# -- Dry runs ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_and_writes_its_results(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run_suite(
        "--device", "cpu", "--small", "--only", "check-sampling", "engine", "eager", "--output", str(file), *PATIENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tokens with and without CUDA graphs (batches [1, 4]): equal" in done.stdout
    found = json.loads(file.read_text())
    assert found["settings"] == {"device": "cpu", "kernels": "native", "small": True}
    assert found["machine"].keys() >= {"processor", "python", "torch", "triton", "device"}
    assert [section["section"] for section in found["sections"]] == ["check-sampling", "engine", "eager"]
    assert all(section["error"] is None for section in found["sections"])
    engine = {table["title"]: table["rows"] for table in found["sections"][1]["tables"]}
    batches, steps, workload, *_ = engine.values()
    assert [row["batch"] for row in batches] == [1, 4]
    assert all(row["output tok/s"] > 0 for row in batches)
    assert steps[0]["rows"] == 1
    assert steps[0]["step us"] >= steps[0]["device us"] > 0
    assert workload[0]["prompts"] == 8


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("check_operations", {"what", "ok"}),
        ("check_attention", {"what", "ok"}),
        ("check_products", {"what", "ok"}),
        ("check_groups", {"what", "ok"}),
        ("check_experts", {"what", "ok"}),
        ("check_sampling", {"what", "ok"}),
        ("decode_speed", {"us", "share of copy"}),
        ("extend_speed", {"us", "share of matmul", "sdpa"}),
        ("operations_speed", {"us", "share of copy", "native us"}),
        ("products_speed", {"us", "speed-up", "share of copy"}),
        ("experts_speed", {"us", "share of copy", "share of products", "speed-up"}),
        ("sampling_speed", {"us", "reads"}),
    ],
)
def test_every_section_runs_on_native_operations(load: Any, name: str, columns: set[str]) -> None:
    rows = rows_of(load(name), load("bench").Bench(CPU, small=True, kernels_name="native"))
    assert rows
    assert all(row.keys() >= columns for row in rows)
    assert all(row.get("ok", True) for row in rows)


@pytest.mark.parametrize(
    "name",
    [
        "check_operations",
        "check_products",
        "check_groups",
        "operations_speed",
        "products_speed",
        "check_sampling",
        "check_attention",
        "experts_speed",
        "sampling_speed",
    ],
)
def test_kernels_run_in_the_interpreter(load: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = load(name)
    if name == "check_attention":  # one of the two dozen cases of each kind
        chosen = module.cases
        monkeypatch.setattr(module, "cases", lambda bench: chosen(bench)[::4])
    rows = rows_of(module, load("bench").Bench(CPU, small=True, kernels_name="triton"))
    assert rows
    assert all(row.get("ok", True) for row in rows)


# -- Faults ------------------------------------------------------------------------------------------------------------


class NoEpsilon(NativeOperations):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.2)


class UnroundedSum(NativeOperations):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = super().add_rms_norm(x, residual.clone(), weight, eps)
        return normed, residual


class UpFirst(NativeOperations):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))


class OneSlotOn(NativeOperations):
    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        slots = (write_slots + 1) % (kv.keys.shape[0] * kv.page_size)
        return super().rotate_and_write(qkv, rotation, norms, kv, slots)


@pytest.mark.parametrize(
    ("faulty", "what"),
    [
        (NoEpsilon(), "rms_norm"),
        (UnroundedSum(), "add_rms_norm: sum"),
        (UpFirst(), "silu_mul"),
        (OneSlotOn(), "rotate_and_write"),
    ],
)
def test_a_wrong_operation_is_found(load: Any, faulty: NativeOperations, what: str) -> None:
    bench = load("bench").Bench(CPU, small=True, kernels_name="native")
    bench.kernels = replace(bench.kernels, operations=faulty)
    rows = rows_of(load("check_operations"), bench)
    assert not any(row["ok"] for row in rows if row["what"] == what)
    # one operation may be made of another; the others are right
    assert all(row["ok"] for row in rows if what.split("_")[-1] not in row["what"])


def test_a_wrong_rounding_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sum before the norm's own rounding; and by the scale of the next row, everywhere."""
    module = load("check_operations")
    bench = load("bench").Bench(CPU, small=True, kernels_name="triton")
    right = TritonRounding.round

    def unscaled(self: TritonRounding, x: torch.Tensor, weight: torch.Tensor, eps: float) -> RoundedRows:
        return right(self, bench.kernels.operations.rms_norm(x, weight, 2 * eps + 0.1))

    def of_next_row(self: TritonRounding, gate_up: torch.Tensor, activation: Activation) -> RoundedRows:
        found = right(self, bench.kernels.operations.silu_mul(gate_up))
        return replace(found, scales=found.scales.roll(1))

    for name, faulty, what in (("rms_norm", unscaled, "rms_norm"), ("gated", of_next_row, "silu_mul")):
        with monkeypatch.context() as patch:
            patch.setattr(TritonRounding, name, faulty)
            rows = [row for row in rows_of(module, bench) if "rounded" in row["what"]]
        assert len(rows) == 2 * 2 * 3 * 2
        assert all(row["ok"] != row["what"].startswith(f"{what}: rounded") for row in rows)


def test_a_wrong_product_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of the next row; and a product that differs slightly with the number of rows."""
    products, module = load("products"), load("check_products")
    bench = load("bench").Bench(CPU, small=True, kernels_name="triton")
    for product in products.products(bench):
        right = product.multiply
        shifted = replace(product, multiply=lambda x, v, s, b, right=right: right(x, v, s.roll(1), b))
        uneven = replace(
            product, multiply=lambda *given, right=right: right(*given) * (1 + 0.004 * (len(given[0]) > 1))
        )
        for faulty in (shifted, uneven):
            monkeypatch.setattr(module, "products", lambda bench, faulty=faulty: [faulty])
            rows = rows_of(module, bench)
            if faulty is shifted:
                assert not any(row["ok"] for row in rows if "itself" not in row["what"])
            else:
                assert not any(row["ok"] for row in rows if "itself" in row["what"])
                assert any("itself" in row["what"] for row in rows) is (product.alike > 0)


def test_a_wrong_product_of_experts_in_float8_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's is replaced by an oracle, here with the scales of the next output."""
    module = load("check_experts")
    bench = load("bench").Bench(CPU, small=True, kernels_name="triton")
    monkeypatch.setattr(Chip, "of", lambda device: bench.chip)

    def shifted(mat_a: Any, mat_b: Any, *, scale_b: Any, **given: Any) -> torch.Tensor:
        return scaled_grouped_mm(mat_a, mat_b, scale_b=scale_b.roll(1, 1), **given)

    for product in (scaled_grouped_mm, shifted):
        monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", product)
        for row in module.float8_rows(bench, (3, 0, 1, 12)):
            assert row["ok"] is (product is scaled_grouped_mm)


def test_both_products_of_experts_that_are_timed_compute_the_same(load: Any) -> None:
    module, bench = load("experts_speed"), load("bench").Bench(CPU, small=True, kernels_name="triton")
    stacks = [module.Stack(bench.normal(4, *sides) / 8, None) for sides in ((64, 64), (64, 32))]
    given = bench.normal(5, 64), *stacks, module._choices(bench, 5, 4, 2)
    grouped, kernel = (multiply(*given).float() for multiply in module._products(bench).values())
    assert 0 < (grouped - kernel).abs().max() < 0.02 * grouped.abs().max()


def test_a_wrong_product_in_groups_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of the next output, of a matrix and of experts; and a product that differs with the number of rows."""
    module = load("check_groups")
    bench = load("bench").Bench(CPU, small=True, kernels_name="triton")
    for name in ("_multiply", "_multiply_experts"):
        right = getattr(module, name)

        def shifted(bench: Any, x: torch.Tensor, weights: Any, *rest: Any, right: Any = right) -> torch.Tensor:
            return right(bench, x, replace(weights, scales=weights.scales.roll(1, 1)), *rest)

        def uneven(bench: Any, x: torch.Tensor, *rest: Any, right: Any = right) -> torch.Tensor:
            return right(bench, x, *rest) * (1 + 0.004 * (len(x) > 1))

        for faulty, alone in ((shifted, False), (uneven, True)):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, faulty)
                rows = rows_of(module, bench)
            own = [row for row in rows if ("(" in row["case"]) is (name == "_multiply_experts")]
            assert not any(row["ok"] for row in own if ("itself" in row["what"]) is alone)
            assert all(row["ok"] for row in rows if row not in own)


class WideWindow:
    """Attention whose windows are one key too wide, or that leaves the last key of each sequence out."""

    def __init__(self, *, short: bool) -> None:
        self._short = short

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        lens = batch.kv_lens - (batch.kv_lens > batch.query_starts.diff()).int() if self._short else batch.kv_lens
        step = NativeAttention().prepare(replace(batch, kv_lens=lens))

        def attend(queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
            window = None if options.window is None or self._short else options.window + 1
            return step(queries, kv, replace(options, window=window))

        return attend


@pytest.mark.parametrize("short", [False, True])
def test_wrong_attention_is_found(load: Any, short: bool) -> None:
    bench = load("bench").Bench(CPU, small=True, kernels_name="native")
    bench.kernels = replace(bench.kernels, attention=WideWindow(short=short))
    for row in rows_of(load("check_attention"), bench):
        # a window of 70 tokens is as long as the longest sequence
        assert row["ok"] == ("window 5" not in row["case"] and not short), row


class NextPosition(NativeSampler):
    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        return super().sample(logits, replace(parameters, position=parameters.position + 1))


def test_wrong_samples_are_found(load: Any) -> None:
    bench = load("bench").Bench(CPU, small=True, kernels_name="native")
    bench.kernels = replace(bench.kernels, sampler=NextPosition())
    rows = rows_of(load("check_sampling"), bench)
    wrong = {row["what"]: row["wrong"] for row in rows}
    assert wrong["greedy"] == wrong["greedy alone"] == 0
    # with other noise the same token is sampled now and then
    assert sum(wrong.values()) >= 3
    assert all(row["ok"] == (row["wrong"] == 0) for row in rows)


def test_a_section_that_times_out_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    sections = ("check-sampling", "check-operations")
    limits = ("--time-limit", "1")
    done = run_suite("--device", "cpu", "--small", "--only", *sections, *limits, "--output", str(file))
    assert done.returncode == 1
    found = json.loads(file.read_text())["sections"]
    assert [section["error"] for section in found] == ["it took longer than 1 s and was ended"] * 2


def test_results_before_a_section_failed_are_kept(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench_module, module = load("bench"), load("check_sampling")
    suite = importlib.import_module("gpu_suite")

    def run(bench: Any) -> Iterator[Any]:
        yield bench_module.Table("first", [{"what": "a", "ok": False}])
        raise RuntimeError("out of memory\nmore lines")

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--device", "cpu", "--small"])
    part = tmp_path / "part.json"
    with pytest.raises(RuntimeError, match="out of memory"):
        suite.run_section("check-sampling", part, suite._parse())
    outcome = suite.Outcome(**json.loads(part.read_text()))
    assert outcome.error == "RuntimeError: out of memory"
    assert outcome.tables == [{"title": "first", "rows": [{"what": "a", "ok": False}]}]
    assert outcome.failed
    assert outcome.wrong() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_suite_says_so() -> None:
    done = run_suite()
    assert done.returncode == 2
    assert "No CUDA GPU" in done.stdout
    assert "--device cpu --small" in done.stdout


# -- Parts -------------------------------------------------------------------------------------------------------------


def test_a_step_has_its_own_pages_and_nan_everywhere_else(load: Any) -> None:
    steps = load("steps")
    bench = load("bench").Bench(CPU, small=True, kernels_name="native")
    shape = steps.Shape((1, 3), (5, 9), num_decode=1)
    batch = steps.make_batch(bench, shape, 4)
    used = batch.page_table[batch.page_table > 0]
    assert sorted(used.tolist()) == list(range(1, shape.pages(4)))
    assert batch.page_table.shape == (2, 3)
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert shape.visible_pairs() == 5 + (7 + 8 + 9)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        kv = steps.random_pages(bench, shape.pages(4), 2, 4, 8, dtype)
        steps.poison_unused(kv, batch)
        for stored in (kv.keys.float(), kv.values.float()):
            slots = ~stored.isnan().any(-1).any(1)
            assert torch.equal(slots, ~stored.isnan().all(-1).all(1))
            assert int(slots.sum()) == 5 + 9
            assert not slots[0].any()
            for row, length in enumerate((5, 9)):
                for position in range(length):
                    assert slots[batch.page_table[row, position // 4], position % 4]


def test_decode_times_come_from_adjacent_decode_steps(load: Any) -> None:
    timed_steps = load("timed_steps")
    log = timed_steps.StepLog(
        starts=[0.0, 1.5, 2.75, 4.0, 5.0], ends=[1.0, 2.5, 3.75, 4.5, 6.0], decodes=[2, 2, 2, 0, 2]
    )
    times = log.decode_times(2)
    assert times == timed_steps.DecodeTimes(step=1.375, device=1.0, gap=0.375, steps=2)
    assert log.decode_times(3) is None
    log.ends.pop()
    with pytest.raises(RuntimeError, match="one piece of work"):
        log.decode_times(2)


# -- CUDA's clock, without CUDA ----------------------------------------------------------------------------------------


class FakeClock:
    """Time that advances when the test says so, and a little with every event."""

    now = 0.0


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        FakeClock.now += 1e-6
        self.at = FakeClock.now

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("fake_cuda")
def test_the_stopwatch_gives_the_median_after_warm_up(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench")
    monkeypatch.setattr(bench.CudaStopwatch, "_COLD_BYTES", 2**10)
    durations = iter([100.0, 50.0, 3.0, 1.0, 2.0, 9.0, 2.5])

    def work() -> None:
        FakeClock.now += next(durations)

    assert bench.CudaStopwatch(CPU).seconds(work, repeats=5) == pytest.approx(2.5, abs=1e-4)
    assert list(durations) == []


@pytest.mark.usefixtures("fake_cuda")
def test_a_steps_time_is_from_its_inputs_to_the_end_of_its_work(load: Any) -> None:
    timed_steps = load("timed_steps")
    log = timed_steps.StepLog()
    stream = timed_steps._TimedCudaStream(CPU, log)

    def work() -> torch.Tensor:
        FakeClock.now += 1.0  # packing the plan
        moved = stream.to_device(torch.arange(3))
        FakeClock.now += 3.0
        return stream.to_device(moved)

    for _ in range(2):
        log.decodes.append(1)
        stream.submit(work)
    times = log.decode_times(1)
    assert times.steps == 1
    assert times.gap == pytest.approx(1.0, abs=1e-4)
    assert times.device == pytest.approx(3.0, abs=1e-4)
    assert times.step == pytest.approx(4.0, abs=1e-4)


def test_a_graph_that_ignores_new_lengths_is_found(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that does nothing leaves the result for the lengths at capture."""

    class NoGraph:
        def replay(self) -> None:
            """Does nothing."""

    @contextmanager
    def capture(graph: NoGraph) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps, module = load("steps"), load("check_attention")
    bench = load("bench").Bench(CPU, small=True, kernels_name="native")
    case = module.Case(dtype=torch.float32, kv_heads=2, group=2, head_dim=64)
    batch = steps.make_batch(bench, steps.Shape.decode((9, 30)), case.page_size)
    kv = steps.random_pages(bench, 4, 2, case.page_size, 64, torch.float32)
    row = module._replayed(bench, case, batch, bench.normal(2, 4, 64, dtype=torch.float32), kv, AttentionOptions(0.1))
    assert not row["ok"]

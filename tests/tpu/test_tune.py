"""Tuning with libtpu's compiler: the kernel calls that it compares, its choice, and the written table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from helpers.tpu_interpreter import CopyMode, Interpreted
from tpu_kernels import tuning
from tpu_kernels.kernel_costs import Blocks, Cost, Step, decode_cost, decode_with_copies, prefill_cost
from tpu_kernels.schedule import Loop
from tpu_kernels.tuning import Comparison, Heads, KernelCall, choices
from tpu_tune import _best_of_each, tune

from sglang_jax.errors import ConfigError
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import Groups, Sizes
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, Shape
from sglang_jax.kernels.ragged_paged_attention.pallas.table import Entry, Phase, Source, read_table
from sglang_jax.kernels.ragged_paged_attention.reference import reference_attention
from sglang_jax.layers.batch import ForwardBatch
from tpu.topologies import Generation

ROOT = Path(__file__).parents[2]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "program", ["helpers.few_choices", pytest.param("tpu_tune", marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_the_best_by_the_schedule_is_written(model: Path, tmp_path: Path, program: str) -> None:
    """Into a table with other entries. Two block sizes in each phase, whose kernels are compiled; `make soak`
    compares all, which `test_every_choice_has_whole_pages` counts."""
    table = tmp_path / "table.json"
    old = {"chip": "v4", "heads": 8, "kv_heads": 8, "head_dim": 64, "page_size": 16, "dtype": "int8"}
    table.write_text(json.dumps([old | {"phase": "decode", "queries": 16, "pages": 8, "by": "device"}]))
    # `make test` keeps libtpu in a separate folder: wherever JAX can import it, it looks for a TPU
    paths = [
        str(Path(sys.prefix) / "libtpu"),
        str(ROOT / "tests"),
        str(ROOT / "benchmarks"),
        os.environ.get("PYTHONPATH", ""),
    ]
    command = ["-m", program, "--model", str(model), "--tp", "2", "--chip", "v6e", "--output", str(table)]
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = read_table(table)
    shape = Shape.of(Chip.V6E, 2, 1, 128, 64, "bfloat16")
    assert len(found) == 3
    for phase in Phase:
        entry = found[shape, phase]
        assert entry.source is Source.SCHEDULE
        assert f"{entry.queries} x {entry.pages * 64}" in finished.stdout
    # longer blocks have fewer iterations, and the longest compute keys that no row needs
    assert 8 <= found[shape, Phase.DECODE].pages <= 64
    assert found[shape, Phase.PREFILL].queries >= 128


def chosen(*costs: float | None) -> tuple[list[Entry], list[Entry]]:
    """The entries of one shape and phase with these costs, and the chosen one."""
    shape = Shape.of(Chip.V6E, 4, 2, 128, 64, "bfloat16")
    entries = [Entry(shape, Phase.DECODE, 16, 4 << place, Source.DEVICE) for place in range(len(costs))]
    compared = iter([Comparison(entry, cost) for entry, cost in zip(entries, costs, strict=True)])
    return entries, list(_best_of_each(compared, "us"))


def test_the_cheapest_that_compiles_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    entries, found = chosen(5e-6, 3e-6, None, 4e-6)
    assert found == [entries[1]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode on v6e: 4 heads, 2 kv heads of 128, pages of 64, bfloat16"
    assert [line.split() for line in lines[2:]] == [
        ["16", "x", "256", "5"],
        ["16", "x", "512", "3", "chosen"],
        ["16", "x", "1024", "does", "not", "compile"],
        ["16", "x", "2048", "4"],
    ]
    with pytest.raises(ConfigError, match="no block sizes compile for decode on v6e"):
        chosen(None, None)


def test_one_that_spills_is_chosen_only_if_all_do(capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape.of(Chip.V6E, 4, 2, 128, 64, "bfloat16")
    first, second = (Entry(shape, Phase.DECODE, 16, pages, Source.SCHEDULE) for pages in (8, 16))
    mixed = [Comparison(first, 300.0), Comparison(second, 200.0, spills=True)]
    assert list(_best_of_each(iter(mixed), "cycles")) == [first]
    assert [line.split()[3:] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["300", "chosen"],
        ["200", "spills"],
    ]
    both = [Comparison(first, 300.0, spills=True), Comparison(second, 200.0, spills=True)]
    assert list(_best_of_each(iter(both), "cycles")) == [second]


def test_of_equal_costs_the_fewest_instructions_are_chosen() -> None:
    shape = Shape.of(Chip.V6E, 4, 2, 128, 64, "bfloat16")
    entries = [Entry(shape, Phase.DECODE, 16, pages, Source.SCHEDULE) for pages in (4, 8, 16, 32)]
    figures = ((1000.0, 900.0), (1009.0, 500.0), (1011.0, 400.0), (1005.0, 450.0))
    compared = [Comparison(entry, cost, False, own) for entry, (cost, own) in zip(entries, figures, strict=True)]
    assert list(_best_of_each(iter(compared), "cycles")) == [entries[3]]
    compared[3] = replace(compared[3], spills=True)
    assert list(_best_of_each(iter(compared), "cycles")) == [entries[1]]


def test_every_choice_has_whole_pages() -> None:
    every = (Heads(8, 2, 128, 512, "bfloat16"), Heads(8, 2, 64, 16, "int8"))
    found = list(choices(Generation.V5E, every, Source.SCHEDULE))
    assert len(set(found)) == len(found) == (4 + 2 * 4) + (5 + 3 * 4)
    assert all(entry.pages * entry.shape.page_size >= 256 and entry.pages > 0 for entry in found)


@pytest.mark.parametrize("phase", Phase)
def test_the_call_timed_on_a_device_computes_attention(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """The arrays are a step for which the kernel and the reference agree."""
    monkeypatch.setattr(tuning, "_COLUMNS_OF_TOKENS", 128)
    decode = Step("decode", (1,) * 64, (5, 16, 17, 128) * 16)
    monkeypatch.setattr(tuning, "DECODE_STEP", decode)
    monkeypatch.setattr(tuning, "PREFILL_STEPS", (Step("prefill", (20, 12), (20, 70)),))
    shape = Shape.of(Chip.INTERPRETER, 2, 1, 128, 16, "float32")
    call = KernelCall(Entry(shape, phase, 16, 8, Source.DEVICE))
    (step,) = call.steps
    queries, pages, table, kv_lens, query_starts, num_decode = arrays = call.arrays(step)
    output, _ = Interpreted(call.run).run(CopyMode.EAGER, *arrays)
    if phase is Phase.PREFILL:
        queries, output = queries.swapaxes(0, 1), jnp.swapaxes(output, 0, 1)
    unused = jnp.zeros(len(queries), jnp.int32)
    batch = ForwardBatch(unused, unused, unused, table[:, :8], kv_lens, query_starts, num_decode[0])
    expected = reference_attention(queries, pages, batch, scale=128**-0.5, options=AttentionOptions())
    np.testing.assert_allclose(output, expected, atol=2e-5, rtol=0)


def loop(depth: int, bundles: int, *inner: Loop, products: int = 0) -> Loop:
    texts = ["%1 = vmatmul.f32"] * products + ["nothing"] * (bundles - products)
    return Loop(depth, texts, list(inner))


def copies(depth: int) -> Loop:
    """Starts four copies in 24 bundles."""
    return Loop(depth, ["%2 = dma.hbm_to_vmem"] * 4 + ["nothing"] * 20)


def in_regions(depth: int, regions: list[tuple[int, bool]], *inner: Loop) -> Loop:
    """Regions with these numbers of bundles, marked if they multiply."""
    found = Loop(depth, [], list(inner))
    for bundles, multiplies in regions:
        found.starts.append(len(found.bundles))
        found.bundles += ["%1 = vmatmul.f32"] * multiplies + ["nothing"] * (bundles - multiplies)
    return found


ALONE = Sizes((8, 4, 2), Groups(1, 2), 8, 8)
PAIRS = Sizes((8, 4), Groups(2, 4), 8, 8)


def test_cycles_of_decode() -> None:
    """Blocks of 512 keys, of which a half and a quarter may be computed. 7 bundles per program of two rows, 10 per
    row, 60 per block, 100, 50 and 25 for the computed part, 5 before each smaller part; 6 to clear a page without
    keys; 24 for four copies, of which a last one takes a fourth."""
    regions = [(60, False), (100, True), (5, False), (50, True), (5, False), (25, True)]
    schedule = loop(0, 9, loop(1, 7, loop(2, 10, in_regions(3, regions, copies(4), loop(4, 6)))))
    cost = decode_cost(schedule, Step("rows", (1,) * 4, (512, 1100, 200, 1100)), 8, ALONE, 2, 64)
    whole, half, quarter = 60 + 100 + 48, 60 + 55 + 24, 60 + 30 + 2 * 6
    assert (cost.loop, cost.keys_read, cost.spills) == (whole, 2912, 0)
    assert cost.cycles == 2 * 7 + 4 * 10 + 5 * whole + half + 2 * quarter
    assert cost.per_key_head == pytest.approx(1000 * whole / (512 * 8))
    assert [(each.count, each.keys) for each in cost.blocks] == [(5, 512), (2, 76), (1, 200)]
    # three of the half's four pages have keys, and one is cleared
    cost = decode_cost(schedule, Step("a row", (1,), (130,)), 8, ALONE, 2, 64)
    assert cost.cycles == 7 + 10 + 60 + 55 + 3 * 6 + 6


def test_cycles_of_groups() -> None:
    """200 of a group's 300 bundles compute. A row's block skips the start of a group's copies, a branch of 40 that
    waits for page numbers and starts other copies."""
    regions = [(60, False), (40, False), (100, True), (5, False), (50, True)]
    block_loop = in_regions(4, regions, copies(5), loop(5, 9, copies(6)))
    block_loop.bundles[60:62] = ["%1 = dma.done.wait", "%2 = dma.vmem_to_smem"]
    groups = in_regions(2, [(90, False), (200, True), (10, False)], loop(3, 20, block_loop))
    schedule = loop(0, 9, loop(1, 7, groups))
    step = Step("rows", (1,) * 7, (256, 3, 257, 512, 100, 0, 9))
    cost = decode_cost(schedule, step, 8, PAIRS, 2, 64)
    whole = 60 + 100 + 48
    # five pages of 257 keys are computed with all eight, none of which a loop without copies clears
    assert cost.cycles == 4 * 7 + 3 * 300 + (100 + 2 * 20) + whole + (60 + 100 + 24 + 6)
    assert [(each.count, each.keys, each.bundles) for each in cost.blocks] == [
        (1, 259, 300),
        (1, 257, 190),
        (1, 512, whole),
        (1, 100, 300),
        (1, 9, 300),
    ]


def test_a_schedule_of_another_kernel_is_refused() -> None:
    schedule = loop(0, 7, loop(1, 10, in_regions(2, [(60, False), (100, True)], copies(3))))
    with pytest.raises(ValueError, match="computes 1 sizes of blocks, it should 3"):
        decode_cost(schedule, Step("a row", (1,), (512,)), 8, ALONE, 2, 64)
    with pytest.raises(ValueError, match="groups"):
        decode_cost(schedule, Step("a row", (1,), (512,)), 8, Sizes((8,), Groups(2, 8), 16, 8), 2, 64)


@pytest.mark.parametrize("products", [0, 12], ids=["plain", "the first product is in the loop over blocks"])
def test_cycles_of_prefill(products: int) -> None:
    """Two blocks of 64 queries that see 64 and 128 keys, in blocks of 128; 8 heads, four per pass of 200 bundles."""
    passes = [loop(4, bundles, products=16) for bundles in (150, 200)]
    blocks = loop(3, 60, copies(4), *passes, products=products)
    schedule = loop(0, 7, loop(1, 30, loop(2, 5), copies(2), loop(2, 20, loop(3, 9), blocks)))
    cost = prefill_cost(schedule, Step("a prompt", (128,), (128,)), 8, 8, 64, 2, 64)
    assert cost.loop == 60 / 2 + 2 * 200 + 2 * 6
    assert cost.keys_read == 64 + 128
    # each of the two spans is in one run of 128 queries
    assert cost.cycles == 2 * (60 / 2 + 2 * 150 + 2 * 6) + 2 * (30 + 8 * 5)


def test_a_span_over_two_runs_of_queries_costs_all_of_their_block() -> None:
    passes = [loop(3, bundles, products=16) for bundles in (150, 80, 80, 200)]
    schedule = loop(0, 7, loop(1, 30, loop(2, 60, copies(3), *passes)))
    # blocks of 256 queries, and of 256 keys: 100 in the first run, 256 over both and the next block's first
    cost = prefill_cost(schedule, Step("two chunks", (100, 256), (100, 300)), 8, 8, 256, 4, 64)
    in_a_run, in_all = 60 / 4 + 2 * 80 + 24, 60 / 4 + 2 * 200 + 24
    assert cost.cycles == (in_a_run + in_all + 2 * in_a_run) + 2 * 30


def test_few_heads_have_no_loop() -> None:
    """Two runs of queries in a block: equally many bundles for all queries unmasked, all masked, and the runs."""
    schedule = loop(0, 7, loop(1, 30, loop(2, 20, loop(3, 600, copies(4), products=48))))
    cost = prefill_cost(schedule, Step("two chunks", (156, 100), (156, 100)), 4, 4, 256, 4, 64)
    assert cost.loop == 600 / 3 + 24
    assert cost.cycles == (200 + 24) + (100 + 24) + 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--by", "schedule"), "--by schedule needs --chip"),
        (("--by", "device", "--chip", "v6e"), "--chip is only for --by schedule"),
        (("--chip", "v9"), "'v9' is not one of"),
        (("--chip", "v6e", "--page-size", "48"), "page_size must be a power of two, got 48"),
        (("--chip", "v6e", "--tp", "3"), "4 heads and 2 kv heads cannot be spread over 3 devices"),
        (("--by", "device"), "--by device needs a TPU, but JAX sees a cpu"),
    ],
)
def test_impossible_options_are_refused(model: Path, arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(tune, ["--model", str(model), *arguments])
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


def test_a_table_that_cannot_be_written_is_refused_before_any_timing(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        tune, ["--model", str(model), "--chip", "v6e", "--output", str(tmp_path / "missing/table.json")]
    )
    assert isinstance(result.exception, ConfigError)
    assert "missing/table.json cannot be written (No such file or directory): name another" in str(result.exception)


def test_more_buffers_hide_the_time_until_a_copy_arrives() -> None:
    """Blocks of 1,024 keys of one head, 512 KiB, on v6e: a row of 4,096 keys has four."""
    cost = Cost(486, 59.3, 0, 2 * (44 + 4 * 486), 8192, (Blocks(8, 1024, 486),))
    transfer, latency = 560.0, 1050.0

    def cycles(depth: int) -> float:
        return decode_with_copies(cost, transfer=transfer / 1024, latency=latency, depth=depth)

    assert cycles(2) == 2 * 44 + 8 * (486 + 1050 + 560) / 2
    assert cycles(4) == cycles(8) == 2 * 44 + 8 * 560

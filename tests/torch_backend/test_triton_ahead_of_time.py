"""Kernels compiled for GPUs that are not present, against the recorded table of their resource use.

After a change of a kernel, `make kernel-table` rewrites the table; commit the difference with the change.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import helpers.triton_interpreter
import pytest
import torch
import triton
from helpers.triton_ahead_of_time import (
    SHARED_MEMORY,
    TABLE,
    Figures,
    Table,
    compile_shipped,
    loops_with_products,
    run_compiling,
    table_rows,
)
from helpers.triton_inventory import REPRESENTATIVE

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import decode_tile

assert helpers.triton_interpreter  # the kernels are imported here for their names

RECORDED = Table.loads(TABLE.read_text())
PREFIXES = table_rows()

# Compiled in the suite: a configuration of each kernel on sm_90, and each kind of attention on a chip with other
# matrix units. `make soak` compiles all rows.
# attention. `make soak` compiles all rows.
COMPILED = [
    *(f"sm_90 {row}" for row in REPRESENTATIVE),
    *(
        f"sm_{chip} {kind}: bfloat16, head_dim 128, group 4, bfloat16 pages of 16: "
        for chip, kind in ((80, "extend_attention"), (100, "extend_attention"), (80, "decode_attention"))
    ),
]


def rows_of(table: Table, prefix: str) -> dict[str, Figures]:
    return {name: figures for name, figures in table.kernels.items() if name.startswith(prefix)}


def test_the_table_has_a_row_per_shipped_kernel_and_chip() -> None:
    assert len(set(PREFIXES)) == len(PREFIXES)
    assert [prefix for prefix in PREFIXES if not rows_of(RECORDED, prefix)] == []
    covered = {name for prefix in PREFIXES for name in rows_of(RECORDED, prefix)}
    assert sorted(set(RECORDED.kernels) - covered) == []


@pytest.mark.parametrize("chip", [80, 90])
def test_no_kernel_spills_registers(chip: int) -> None:
    rows = rows_of(RECORDED, f"sm_{chip} ")
    assert rows
    assert [name for name, figures in rows.items() if figures.stack_bytes] == []


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_kernels_that_round_spill_on_no_chip(chip: int) -> None:
    """float8 from the first chip on that has it."""
    rows = {name: row for name, row in rows_of(RECORDED, f"sm_{chip} ").items() if "round" in name.split(":")[0]}
    assert {"float8_e4m3fn" in name for name in rows} == ({False} if chip == 80 else {False, True})
    assert [name for name, figures in rows.items() if figures.stack_bytes] == []


@pytest.mark.parametrize(("chip", "limit"), SHARED_MEMORY.items())
def test_shared_memory_is_within_the_chip(chip: int, limit: int) -> None:
    rows = rows_of(RECORDED, f"sm_{chip} ")
    assert rows
    assert [name for name, figures in rows.items() if figures.shared_bytes > limit] == []


MATRIX_UNITS = [(80, "mma"), (89, "mma"), (90, "wgmma"), (100, "tcgen05"), (120, "mma")]


@pytest.mark.parametrize(("chip", "instruction"), MATRIX_UNITS)
def test_products_run_on_the_matrix_units_of_the_chip(chip: int, instruction: str) -> None:
    """With values that are prefetched. Blackwell has no int8 products there: they use older instructions. No matrix
    unit multiplies float32 without rounding it first."""
    kernels = (" multiply_tiles", " multiply_groups")
    rows = {name: row for name, row in rows_of(RECORDED, f"sm_{chip} ").items() if name.endswith(kernels)}
    kinds = {"scaled_product:", "integer_product:", "fixed_product:", "group_product:", "expert_product:"}
    assert {name.split()[1] for name in rows} == kinds
    for name, row in rows.items():
        wanted = "mma" if chip == 100 and "integer_product" in name else instruction
        units = {*row.instructions} & {used for _, used in MATRIX_UNITS}
        assert "cp.async" in row.instructions, name
        assert units == set() if " float32, " in name else wanted in units, name


@pytest.mark.parametrize(("chip", "instruction"), MATRIX_UNITS)
def test_extend_attention_runs_on_the_matrix_units_of_the_chip(chip: int, instruction: str) -> None:
    rows = rows_of(RECORDED, f"sm_{chip} extend_attention")
    extending = (" extend_blocks", " extend_splits")
    rows = {name: row for name, row in rows.items() if name.endswith(extending) and "float32" not in name}
    assert rows
    assert [name for name, figures in rows.items() if instruction not in figures.instructions] == []


def test_chunks_of_recurrent_layers_run_on_matrix_units() -> None:
    rows = {name: row for name, row in RECORDED.kernels.items() if name.endswith((": relate_tokens", ": scan_blocks"))}
    assert rows
    assert [name for name, row in rows.items() if not {"mma", "wgmma", "tcgen05"}.intersection(row.instructions)] == []


def test_programs_of_decode_attention_share_a_multiprocessor() -> None:
    """Programs beyond a multiprocessor's capacity would wait until the first have finished all their splits."""
    rows = {name: row for name, row in RECORDED.kernels.items() if name.endswith(" decode_splits")}
    assert rows
    for name, row in rows.items():
        found = re.match(r"sm_(\d+) .* head_dim (\d+), [^,]*, (?:(\w+) and )?(\w+) pages of", name)
        assert found is not None, name
        chip, values = Chip(int(found[1]), processors=132), getattr(torch, found[4])
        keys = getattr(torch, found[3]) if found[3] else values
        programs = decode_tile(int(found[2]), keys, chip, values).programs
        # a program may use all of the shared memory except 1 KiB, which the chip reserves per program
        assert 1 <= programs <= (SHARED_MEMORY[chip.capability] + 1024) // (row.shared_bytes + 1024), name


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_kernels_of_plain_experts_spill_on_no_chip(chip: int) -> None:
    rows = {name: row for name, row in rows_of(RECORDED, f"sm_{chip} ").items() if "multiply_experts" in name}
    assert rows
    assert [name for name, figures in rows.items() if figures.stack_bytes] == []
    # Weights and inputs are copied ahead of the products that need them, where rows can be copied in 16 bytes.
    aligned = {name: row for name, row in rows.items() if "361" not in name}
    assert [name for name, figures in aligned.items() if "cp.async" not in figures.instructions] == []


def test_attention_prefetches_keys() -> None:
    rows = {
        name: row
        for name, row in RECORDED.kernels.items()
        if name.endswith((" extend_blocks", " extend_splits", " decode_splits"))
    }
    assert rows
    assert [name for name, figures in rows.items() if "cp.async" not in figures.instructions] == []


def test_small_kernels_start_while_the_one_before_ends_where_the_chip_can() -> None:
    names = (
        "rms_norm_kernel",
        "gated_kernel",
        "rotate_and_write_kernel",
        "decode_splits",
        "multiply_tiles",
        "multiply_groups",
        "multiply_experts",
        "sum_choices",
        "add_splits",
        "plan_tiles",
    )
    rows = {name: row for name, row in RECORDED.kernels.items() if name.endswith(names)}
    assert {name.split()[0] for name in rows} == {f"sm_{chip}" for chip in SHARED_MEMORY}
    for name, row in rows.items():
        can = int(name.split()[0].removeprefix("sm_")) >= 90
        assert ("griddepcontrol" in row.instructions) is can, name


def test_the_table_reads_back_as_it_was_written() -> None:
    assert RECORDED.dumps() == TABLE.read_text()


def assert_as_recorded(compiled: Table, prefixes: list[str]) -> None:
    """The limits hold for any compiler; the figures are of the recorded one."""
    for prefix in prefixes:
        rows = rows_of(compiled, prefix)
        assert rows.keys() == rows_of(RECORDED, prefix).keys() != set()
        for name, figures in rows.items():
            assert figures.stack_bytes == 0 or not name.startswith("sm_90 "), name
            assert figures.shared_bytes <= SHARED_MEMORY[int(name.split()[0].removeprefix("sm_"))], name
            if compiled.triton == RECORDED.triton:
                assert figures == RECORDED.kernels[name], name


def test_representative_kernels_compile_to_what_the_table_says() -> None:
    assert set(COMPILED) <= set(PREFIXES)
    compiled = compile_shipped(list(SHARED_MEMORY), COMPILED)
    assert compiled.triton == triton.__version__
    assert_as_recorded(compiled, COMPILED)
    # per kilobyte of keys and values; beyond about 250 an H100 computes for longer than it reads (an estimate)
    bfloat16, float8 = (
        compiled.kernels[f"sm_90 decode_attention: bfloat16, head_dim 128, group 4, {pages} pages of 16: decode_splits"]
        for pages in ("bfloat16", "float8_e4m3fn")
    )
    sage = compiled.kernels[
        "sm_90 decode_attention: bfloat16, head_dim 128, group 4, int8 and bfloat16 pages of 16: decode_splits"
    ]
    assert sage.loops[0] * sage.warps / 24.25 < 130
    # per kilobyte of values
    product = compiled.kernels["sm_90 scaled_product: bfloat16, int8, 16 rows, 4096 x 4096: multiply_tiles"]
    assert product.loops[0] * product.warps / 8 < 220
    # per kilobyte of levels
    grouped = "sm_90 group_product: bfloat16, int4 in groups of 128, 16 rows, 4096 x 4096: multiply_groups"
    assert compiled.kernels[grouped].loops[0] * compiled.kernels[grouped].warps / 8 < 250
    floats = "group_product: bfloat16, float4_e2m1fn in groups of 32, 16 rows, 4096 x 4096"
    experts = "expert_product: bfloat16, float4_e2m1fn in groups of 32, 64 rows, 32 x 5760 x 2880, bias"
    for each in (floats, experts):
        figures = compiled.kernels[f"sm_90 {each}: multiply_groups"]
        assert figures.loops[0] * figures.warps / 4 < 465
    # per kilobyte of weights with few rows, and per million operations with many
    for each, matrices in (("gate_experts: {}, 128 x 2 x 768 x 2048", 2), ("sum_experts: {}, 128 x 2048 x 768", 1)):
        few, many = (
            compiled.kernels[f"sm_90 {each.format(f'bfloat16, {rows} rows')}: multiply_experts"]
            for rows in (128, 32_768)
        )
        assert few.loops[0] * few.warps / (8 * matrices) < 40
        assert many.loops[0] * many.warps / (2e-6 * matrices * 128 * 128 * 64) < 200
        assert "wgmma" in few.instructions
        assert "wgmma" in many.instructions
    integers = compiled.kernels["sm_90 integer_product: bfloat16, 16 rows, 4096 x 4096: multiply_tiles"]
    assert integers.loops[0] * integers.warps / 8 < 60
    assert bfloat16.loops[0] * bfloat16.warps / 32 < 80
    assert float8.loops[0] * float8.warps / 16 < 220


@pytest.mark.soak
def test_every_kernel_compiles_to_what_the_table_says() -> None:
    assert_as_recorded(compile_shipped(list(SHARED_MEMORY), PREFIXES), PREFIXES)


def test_a_kernel_that_compiles_for_too_long_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)sm_90 sample: vocabulary 128256: .*Timeout"):
        compile_shipped([90], ["sm_90 sample: vocabulary 128256: "], seconds_per_kernel=0.05)


SPILLS = """
import torch
import triton
import triton.language as tl
from helpers.triton_ahead_of_time import compile_launch


@triton.jit
def product(a, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    at = lanes[:, None] * SIZE + lanes[None, :]
    values = tl.load(a + at)
    tl.store(out + at, tl.dot(values, values))


def launch(**options):
    x = torch.empty((128, 128), dtype=torch.bfloat16, device="meta")
    product[(1,)](x, x.float(), SIZE=128, num_warps=4, **options)


for options in ({}, {"maxnreg": 96}):
    (figures,) = compile_launch(lambda: launch(**options), 90).values()
    print(figures.stack_bytes, *figures.instructions)
"""


ASSEMBLY = """
import json
import helpers.triton_ahead_of_time as ahead
from helpers.triton_inventory import shipped_kernels
from torch_backend.kernels.chip import Chip

wanted = ("bfloat16, head_dim 128, group 4, bfloat16 pages of 16", "bfloat16, width 4")
operations = ("decode_attention", "extend_attention", "extend_attention of short chunks", "convolve")
found, figures = {}, ahead._figures


def note(kernel):
    found[kernel.metadata.name] = kernel.asm["ptx"]
    found[kernel.metadata.name + " before"] = kernel.asm["ttgir"]
    found[kernel.metadata.name + " machine code"] = ahead.dump(kernel, "--dump-sass")
    return figures(kernel)


ahead._figures = note
for each in shipped_kernels():
    if each.operation in operations and each.configuration in wanted:
        ahead.compile_launch(lambda: each.launch(Chip(90, 132, True)), 90)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX of kernels by name, of attention for common sizes and of convolutions; names with `before` have the
    intermediate form, in which barriers are only the kernel's own; those with `machine code`, cuobjdump's text."""
    program = tmp_path_factory.mktemp("assembly") / "assembly.py"
    program.write_text(ASSEMBLY)
    found: dict[str, str] = json.loads(run_compiling([sys.executable, str(program)]))
    return found


def test_the_last_split_reads_the_stored_sums_of_others(assembly: dict[str, str]) -> None:
    """All threads have stored their sums before one increments the counter, and none reads before that; sums are
    read from the cache that all multiprocessors share. Nothing is read before the previous kernel has ended."""
    before, counting, after = assembly["decode_splits"].partition("atom.global.gpu.acq_rel.add")
    assert counting
    assert before.rindex("bar.sync") > before.rindex("st.global")
    # the compiler may add one there, but only for the counter's own shared memory
    asked_for, counting, _ = assembly["decode_splits before"].partition("tt.atomic_rmw add, acq_rel")
    assert counting
    assert asked_for.rindex("ttg.barrier") > asked_for.rindex("tt.store")
    assert after.index("bar.sync") < after.index("ld.global")
    loads = re.findall(r"ld\.global[.a-z0-9]*", after[: after.rindex("ld.global.cg")])
    assert loads
    assert all(".cg" in load for load in loads)
    waiting = assembly["decode_splits"].index("griddepcontrol.wait")
    assert waiting < min(assembly["decode_splits"].index("ld.global"), assembly["decode_splits"].index("cp.async"))


def accesses(text: str) -> list[str]:
    """Barriers and accesses of global memory in order; predicated ones as `@ld` and `@st`."""
    found = re.findall(r"^\s*(@!?%p\d+ )?(bar\.sync|ld\.global|st\.global)", text, re.MULTILINE)
    return [("@" if predicate else "") + name[:2].replace("ba", "bar") for predicate, name in found]


def test_sums_of_earlier_splits_are_read_after_a_barrier(assembly: dict[str, str]) -> None:
    """The kernel has its own barrier, whatever others the compiler adds, and another before memory is overwritten."""
    blocks = re.split(r"\bbra(?:\.uni)?\s|^\$L__BB", assembly["extend_blocks"], flags=re.MULTILINE)
    (number,) = (i for i, block in enumerate(blocks) if re.search(r"^\s*ld\.global\.v4\.b32", block, re.MULTILINE))
    reading = accesses(blocks[number])
    assert reading[0] == "bar"
    behind = reading[len(reading) - reading[::-1].index("ld") :] + accesses("".join(blocks[number + 1 :]))
    assert "bar" in behind[: behind.index("st")]


ROUNDING = ("FADD", "FFMA", "FMUL", "MUFU", "F2FP", "HGMMA")


def test_a_query_meets_the_same_operations_in_every_form_of_extend_attention(assembly: dict[str, str]) -> None:
    """Of numbers that are rounded: with a mask and without, in a program for a block and in one for a split. A compiler
    that fused a product and a sum in only one of these loops would give a query other bits in another chunk."""
    loops = [
        Counter(operation for operation in operations if operation.startswith(ROUNDING))
        for kernel in ("extend_blocks", "extend_splits")
        for operations in loops_with_products(assembly[f"{kernel} machine code"])
    ]
    assert len(loops) == 4
    assert loops[0]["FFMA"] > 0
    assert loops[1:] == loops[:1] * 3


@pytest.mark.parametrize(("kernel", "stores"), [("convolve_one_token", 3), ("keep_last_inputs", 3)])
def test_kept_inputs_are_moved_after_barriers(kernel: str, stores: int, assembly: dict[str, str]) -> None:
    """Slots may be read and written in place: no thread overwrites what another has yet to read."""
    found = accesses(assembly[kernel])
    assert found.count("@st") >= stores
    places = [place for place, name in enumerate(found) if name == "@st"][-stores:]
    assert [found[place - 1] for place in places] == ["bar"] * stores


def test_spills_and_matrix_instructions_are_detected(tmp_path: Path) -> None:
    program = tmp_path / "spills.py"
    program.write_text(SPILLS)
    ample, scarce = (line.split() for line in run_compiling([sys.executable, str(program)]).splitlines())
    assert ample == ["0", "wgmma"]
    assert int(scarce[0]) > 0

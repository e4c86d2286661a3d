"""Operations in the text of a compiled program: estimates, loops, branches, collectives, moved weights."""

from __future__ import annotations

from tpu.estimate import Estimate
from tpu.hlo import Collective, collectives_of
from tpu.operations import Module

_COLLECTIVES = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%asked_for (p: bf16[8,16]) -> bf16[32,16] {
  ROOT %all-gather.7 = bf16[32,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=5, dimensions={0}
}

%not_asked_for (p: bf16[8,16]) -> bf16[32,16] {
  ROOT %zeros = bf16[32,16]{1,0} broadcast(%c), dimensions={}
}

%scattering (input: bf16[64,32]) -> bf16[16,32] {
  %all-reduce.3 = bf16[64,32]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=3, to_apply=%add
  ROOT %part = bf16[16,32]{1,0} dynamic-slice(%all-reduce.3, %i, %c), dynamic_slice_sizes={16,32}
}

ENTRY %main (a: bf16[64,32], which: s32[]) -> bf16[16,32] {
  %all-reduce.1 = (s32[64]{0:T(128)}, s32[]{:T(128)}) all-reduce(%b, %c), channel_id=1, to_apply=%add
  %collective-permute-start.5 = (s32[16]{0}, s32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%d)
  %collective-permute-done.5 = s32[16]{0} collective-permute-done(%collective-permute-start.5)
  %maybe = bf16[32,16]{1,0} conditional(%which, %e, %e), branch_computations={%asked_for, %not_asked_for}
  ROOT %fusion = bf16[16,32]{1,0} fusion(%a), kind=kCustom, calls=%scattering, metadata={op_name="jit(step)/jit(_run_layer)/dot_general"}
}
"""  # noqa: E501

_STEP = """
HloModule jit_step

FileNames
1 "/somewhere/sglang_jax/layers/parameter.py"

FunctionNames
1 "matmul"

FileLocations
1 {file_name_id=1 function_name_id=1 line=52 end_line=52 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%moving (p: bf16[4,6,8]) -> bf16[4,48] {
  %p = bf16[4,6,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %turned = bf16[4,6,8]{0,2,1:T(8,128)(2,1)} copy(%p)
  ROOT %flat = bf16[4,48]{1,0:T(8,128)(2,1)} reshape(%turned)
}

%windowed_dot_general_body_ag (carried: (bf16[8,4], bf16[4,16], u32[])) -> (bf16[8,4], bf16[4,16], u32[]) {
  %carried = (bf16[8,4]{1,0}, bf16[4,16]{1,0}, u32[]) parameter(0)
  %weight = bf16[4,16]{1,0} get-tuple-element(%carried), index=1
  %copy.9 = bf16[4,16]{0,1} copy(%weight), metadata={op_name="jit(step)/jit(_run_layer)/dot_general"}, backend_config={"window_config":{"estimated_cycles":"70"}}
  %rows = bf16[8,4]{1,0} get-tuple-element(%carried), index=0
  %sent = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[], u32[]) collective-permute-start(%rows), metadata={op_name="jit(step)/jit(_run_layer)/dot_general"}
  %counter = u32[] get-tuple-element(%carried), index=2
  %two = u32[] constant(2)
  %next = u32[] add(%counter, %two)
  ROOT %all = (bf16[8,4]{1,0}, bf16[4,16]{1,0}, u32[]) tuple(%rows, %weight, %next)
}

%windowed_dot_general_cond_ag (carried.1: (bf16[8,4], bf16[4,16], u32[])) -> pred[] {
  %carried.1 = (bf16[8,4]{1,0}, bf16[4,16]{1,0}, u32[]) parameter(0)
  %counter.1 = u32[] get-tuple-element(%carried.1), index=2
  %eight = u32[] constant(8)
  ROOT %less = pred[] compare(%counter.1, %eight), direction=LT
}

%asked_for (a.1: f32[8]) -> f32[8] {
  ROOT %dear = f32[8]{0} fusion(%a.1), kind=kLoop, calls=%none, backend_config={"window_config":{"estimated_cycles":"90000"}}
}

ENTRY %main (w.0: bf16[4,6,8], w.1: bf16[4,16], x: bf16[8,4], which: pred[]) -> f32[8] {
  %w.0 = bf16[4,6,8]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights[0]"}
  %w.1 = bf16[4,16]{1,0} parameter(1), metadata={op_name="weights[1]"}
  %x = bf16[8,4]{1,0} parameter(2), metadata={op_name="packed"}
  %zero = u32[] constant(0)
  %begun = (bf16[4,6,8]{2,1,0:S(1)}, bf16[4,6,8]{2,1,0}, u32[]) copy-start(%w.0)
  %here = bf16[4,6,8]{2,1,0:S(1)} copy-done(%begun)
  %fusion.1 = bf16[4,48]{1,0:T(8,128)(2,1)} fusion(%here), kind=kLoop, calls=%moving, metadata={op_name="jit(step)/jit(_run_layer)/dot_general" stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %given = (bf16[8,4]{1,0}, bf16[4,16]{1,0}, u32[]) tuple(%x, %w.1, %zero)
  %while.1 = (bf16[8,4]{1,0}, bf16[4,16]{1,0}, u32[]) while(%given), condition=%windowed_dot_general_cond_ag, body=%windowed_dot_general_body_ag
  %maybe = f32[8]{0} conditional(%which, %x, %x), branch_computations={%asked_for, %asked_for}
  ROOT %add.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(step)/add"}, backend_config={"window_config":{"estimated_cycles":"500"}}
}
"""  # noqa: E501


def test_collectives_are_counted_with_bytes_and_separately_in_branches() -> None:
    assert collectives_of(Module(_COLLECTIVES).operations()) == (
        Collective("all-reduce", "bf16", True, False, 1, 64 * 32 * 2, "bf16[64,32]"),
        Collective("all-reduce", "s32", False, False, 1, 64 * 4 + 4, "s32[64]"),
        Collective("collective-permute", "s32", False, False, 1, 64, "s32[16]"),
        Collective("all-gather", "bf16", False, True, 1, 32 * 16 * 2, "bf16[32,16]"),
    )


def test_sent_bytes_are_those_of_rings() -> None:
    sent = {
        kind: Collective(kind, "bf16", True, False, 1, 800, "bf16[4,100]").sent(4)
        for kind in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
    }
    assert sent == {
        "all-reduce": 1200,
        "reduce-scatter": 2400,
        "all-gather": 600,
        "all-to-all": 600,
        "collective-permute": 800,
    }


_SORTS = """HloModule jit_step, is_scheduled=true

%scatter (x: s32[8]) -> s32[8] {
  ROOT %x = s32[8]{0} parameter(0)
}, execution_thread="sparsecore"

%counted (x.1: s32[8]) -> s32[8] {
  %begun = ((s32[8]{0}), s32[8]{0}, u32[]) async-start(%x.1), async_execution_thread="sparsecore", calls=%scatter
  %sort.1 = (s32[8]{0}, s32[8]{0}) sort(%x.1, %x.1), dimensions={0}, to_apply=%less
  ROOT %done = s32[8]{0} async-done(%begun)
}

ENTRY %main (x.2: s32[8], which: s32[]) -> s32[8] {
  %sort.2 = (s32[8]{0}, s32[8]{0}) sort(%x.2, %x.2), dimensions={0}, to_apply=%less
  %copied = (s32[8]{0}, s32[8]{0}, u32[]) copy-start(%x.2)
  ROOT %maybe = s32[8]{0} conditional(%which, %x.2, %x.2), branch_computations={%same, %counted}
}
"""


def test_sorts_and_sparsecore_work_count_where_every_step_runs_them() -> None:
    operations = Module(_SORTS).operations()
    assert [(found.name, found.conditional) for found in operations] == [
        ("sort.2", False),
        ("begun", True),
        ("sort.1", True),
    ]
    estimate = Estimate.of(operations, {})
    assert estimate.sorts == 1
    (warning,) = estimate.warnings("decode 8", 1e9)
    assert warning.startswith("'decode 8' has 1 sorts, or parts left to the SparseCores")


def test_loops_count_per_iteration_and_branches_do_not_count() -> None:
    operations = Module(_STEP).operations()
    estimate = Estimate.of(operations, {"weights[0]": "layers.0.qkv", "weights[1]": "layers.0.gate_up"})
    assert estimate.cycles == 1000 + 4 * 70 + 500
    assert estimate.layer_cycles == 1000 + 4 * 70
    assert [operation.name for operation in estimate.worst[:3]] == ["fusion.1", "add.1", "copy.9"]
    assert estimate.worst[0].source.endswith("parameter.py:52")
    assert [(move.moved, move.times) for move in estimate.moves] == [("layers.0.qkv", 1), ("layers.0.gate_up", 4)]
    assert ([one.name for one in estimate.windowed], [one.name for one in estimate.permutes]) == (["while.1"], ["sent"])
    (permute,) = collectives_of(operations)
    assert (permute.count, permute.bytes, permute.in_layers) == (4, 4 * 8 * 4 * 2, True)
    warnings = estimate.warnings("decode 8", 1e9)
    assert warnings[0] == (
        "'decode 8' converts layers.0.qkv to another layout at every step: bf16[4,48], 1 us "
        "(sglang_jax/layers/parameter.py:52)"
    )
    assert warnings[2:] == [
        "'decode 8' splits a product into pieces that devices exchange one by one, 1x a step: packed "
        "layers.0.gate_up bf16[4,16] (while.1)",
        "'decode 8' permutes an array among devices in the layers, 4x a step: packed bf16[8,4] (sent)",
    ]


def test_a_limit_of_a_loop_may_be_in_its_tuple() -> None:
    """As in loops over tiles (`kernels.row_tiles`)."""
    text = """
%tile (carried: (s32[], s32[])) -> (s32[], s32[]) {
  %carried = (s32[], s32[]) parameter(0)
  %number = s32[] get-tuple-element(%carried), index=0
  %limit = s32[] get-tuple-element(%carried), index=1
  %one = s32[] constant(1)
  %dot = f32[128,8]{1,0} fusion(%number), kind=kOutput, calls=%none, backend_config={"estimated_cycles":"70"}
  %next = s32[] add(%number, %one)
  ROOT %all = (s32[], s32[]) tuple(%next, %limit)
}

%more (carried.1: (s32[], s32[])) -> pred[] {
  %carried.1 = (s32[], s32[]) parameter(0)
  %number.1 = s32[] get-tuple-element(%carried.1), index=0
  %limit.1 = s32[] get-tuple-element(%carried.1), index=1
  ROOT %less = pred[] compare(%number.1, %limit.1), direction=LT
}

ENTRY %main (x: f32[8]) -> (s32[], s32[]) {
  %zero = s32[] constant(0)
  %tiles = s32[] constant(4)
  %given = (s32[], s32[]) tuple(%zero, %tiles)
  ROOT %while.1 = (s32[], s32[]) while(%given), condition=%more, body=%tile
}
"""
    assert [(found.name, found.times) for found in Module(text).operations()] == [("dot", 4)]


def test_a_module_without_operations() -> None:
    text = "ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] negate(%a)\n}\n"
    assert Module(text).operations() == ()
    assert Estimate.of((), {}).warnings("decode 8", 1e9) == []


def test_a_copy_to_vmem_in_the_same_layout_is_not_a_move() -> None:
    """Operands are often prefetched to vmem; only a change of layout is a move."""
    text = """
ENTRY %main (state.seeds: u32[257,2]) -> (u32[257,2], u32[257,2]) {
  %seeds = u32[257,2]{1,0:T(8,128)} parameter(0), metadata={op_name="state.seeds"}
  %near = u32[257,2]{1,0:T(8,128)S(1)} copy(%seeds), backend_config={"estimated_cycles":"2213"}
  %other = u32[257,2]{0,1:T(8,128)S(1)} copy(%seeds), backend_config={"estimated_cycles":"2213"}
  ROOT %both = (u32[257,2]{1,0:T(8,128)S(1)}, u32[257,2]{0,1:T(8,128)S(1)}) tuple(%near, %other)
}
"""
    estimate = Estimate.of(Module(text).operations(), {})
    assert [(move.moved, move.name) for move in estimate.moves] == [("state.seeds", "other")]


def test_an_exchange_run_by_sparsecores_is_not_a_sort() -> None:
    text = """
%sum.1 (x: bf16[64,5376]) -> bf16[64,5376] {
  %x = bf16[64,5376]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[64,5376]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (x.1: bf16[64,5376]) -> bf16[64,5376] {
  %x.1 = bf16[64,5376]{1,0} parameter(0)
  %begun = ((bf16[64,5376]), bf16[64,5376], u32[]) async-start(%x.1), async_execution_thread="sparsecore", calls=%sum.1
  ROOT %done = bf16[64,5376]{1,0} async-done(%begun)
}
"""
    operations = Module(text).operations()
    assert Estimate.of(operations, {}).sorts == 0
    assert [(one.kind, one.count) for one in collectives_of(operations)] == [("all-reduce", 1)]

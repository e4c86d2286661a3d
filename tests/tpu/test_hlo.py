"""Collectives and kernels found in the text of a module."""

from __future__ import annotations

from tpu.hlo import Collective, Kernel, find_collectives, find_kernels

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
  ROOT %fusion = bf16[16,32]{1,0} fusion(%a), kind=kCustom, calls=%scattering
}
"""

_KERNEL = (
    '  %paged_attention.{number} = bf16[64,8,128]{{2,1,0}} custom-call(%q), custom_call_target="tpu_custom_call", '
    'backend_config={{"custom_call_config":{{"body":"TUzvUg=="{cost}}},'
    '"scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"100663296"}}],'
    '"used_scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"{vmem}"}},'
    '{{"memory_space":"4","offset":"0","size":"77"}}]}}'
)
_COST = ',"cost_estimate":{"flops":"1000","transcendentals":"5","bytes_accessed":"2000"}'


def test_collectives_are_counted_with_their_bytes_and_those_of_branches_apart() -> None:
    assert find_collectives(_COLLECTIVES) == (
        Collective("all-reduce", False, 2, 64 * 4 + 4 + 64 * 32 * 2, "bf16[64,32]"),
        Collective("collective-permute", False, 1, 64, "s32[16]"),
        Collective("all-gather", True, 1, 32 * 16 * 2, "bf16[32,16]"),
    )


def test_kernels_are_gathered_by_name() -> None:
    text = "\n".join(
        [
            _KERNEL.format(number=1, vmem=4096, cost=_COST),
            _KERNEL.format(number="4.clone.2", vmem=8192, cost=_COST).replace(".clone", ""),
            _KERNEL.format(number=2, vmem=12, cost="").replace("paged_attention", "kv_write"),
            '  %other = f32[] custom-call(%x), custom_call_target="AllocateBuffer"',
        ]
    )
    assert find_kernels(text) == (
        Kernel("paged_attention", 2, 8192, 1000, 2000),
        Kernel("kv_write", 1, 12, None, None),
    )


def test_a_module_without_either() -> None:
    text = "ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] negate(%a)\n}\n"
    assert find_collectives(text) == ()
    assert find_kernels(text) == ()

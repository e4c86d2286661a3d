"""Kernels found in the text of a module."""

from __future__ import annotations

from tpu.hlo import Kernel, find_kernels

_KERNEL = (
    '  %paged_attention.{number} = bf16[64,8,128]{{2,1,0}} custom-call(%q), custom_call_target="tpu_custom_call", '
    'backend_config={{"custom_call_config":{{"body":"TUzvUg=="{cost}}},'
    '"scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"100663296"}}],'
    '"used_scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"{vmem}"}},'
    '{{"memory_space":"4","offset":"0","size":"77"}}]}}'
)
_COST = ',"cost_estimate":{"flops":"1000","transcendentals":"5","bytes_accessed":"2000"}'


def test_kernels_are_gathered_by_name() -> None:
    text = "\n".join(
        [
            _KERNEL.format(number=1, vmem=4096, cost=_COST),
            _KERNEL.format(number="4.2", vmem=8192, cost=_COST.replace("2000", "500")),
            _KERNEL.format(number=2, vmem=12, cost="").replace("paged_attention", "kv_write"),
            '  %other = f32[] custom-call(%x), custom_call_target="AllocateBuffer"',
        ]
    )
    assert find_kernels(text) == (
        Kernel("paged_attention", 2, 8192, 1000, 2000, all_flops=2000, all_bytes=2500),
        Kernel("kv_write", 1, 12, None, None),
    )


def test_a_module_without_any() -> None:
    text = "ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] negate(%a)\n}\n"
    assert find_kernels(text) == ()

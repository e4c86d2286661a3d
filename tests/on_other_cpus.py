"""Runs the numerical tests as on other CPUs: `make test-cpus`, or with `ARGS="--only haswell tests/models"`.

Rounding of sums depends on the CPU: OpenBLAS, oneDNN, MKL, ATen, XLA, numpy and numba choose their instructions by it,
and add in different orders. Each can be restricted to older instructions, so that one machine emulates older ones. What
tests require of the engine must hold on all.

As on a CPU with only AVX2, like most CPUs outside of servers, all numerical tests run; as on the others, only those
that depend on the order of additions. `--whole` runs all for each CPU, which takes hours.

Arguments other than the options of this script are passed to pytest, and replace the default tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CPU_INFO = Path("/proc/cpuinfo")

COMPUTING = [
    "tests/end_to_end",
    "tests/jax_runner",
    "tests/kernels",
    "tests/models",
    "tests/runner",
    "tests/sampling",
    "tests/server/test_real_model_over_http.py",
    "tests/torch_backend",
    # code for other chips, given to their compilers: it is not run here
    "--ignore=tests/kernels/test_pallas_ahead_of_time.py",
    "--ignore=tests/torch_backend/test_triton_ahead_of_time.py",
    # messages between processes, and failures of these
    "--ignore=tests/jax_runner/test_nodes.py",
    "--ignore=tests/runner/test_backends.py",
    "--ignore=tests/runner/test_group.py",
    "--ignore=tests/runner/test_remote_group.py",
    "--ignore=tests/runner/test_wire.py",
]
"""All tests that sum numbers."""

ROUNDING = [
    "tests/jax_runner/test_logprobs.py",
    "tests/jax_runner/test_runner.py",
    "tests/jax_runner/test_sampler.py",
    "tests/jax_runner/test_tensor_parallel_engine.py",
    "tests/kernels/test_ragged_paged_attention.py",
    "tests/models/test_step_program.py",
    "tests/runner/test_runner_simulation.py",
    "tests/runner/test_runners.py",
    "tests/runner/test_samplers.py",
    "tests/sampling",
    "tests/server/test_real_model_over_http.py",
    "tests/torch_backend/test_bfloat16_matrices.py",
    "tests/torch_backend/test_block_matrices.py",
    "tests/torch_backend/test_cpu_attention.py",
    "tests/torch_backend/test_cpu_latents.py",
    "tests/torch_backend/test_cpu_operations.py",
    "tests/torch_backend/test_graphs.py",
    "tests/torch_backend/test_sample_pruning.py",
    "tests/torch_backend/test_tensor_parallel.py",
    "tests/torch_backend/test_triton_decode.py",
    "tests/torch_backend/test_triton_extend.py",
    "tests/torch_backend/test_triton_interpreter.py",
    "tests/torch_backend/test_triton_operations.py",
]
"""Tests that require the same bits or tokens of two computations: in another batch, in other chunks, on several
devices, by another backend. They depend on a CPU's order of additions; tests with an oracle and a tolerance depend
on the number of additions, which is the same on all CPUs."""

BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Profile:
    """A CPU, as the libraries and the engine see it.

    - `needs`: the flag of `/proc/cpuinfo` without which this machine cannot emulate it.
    - `bfloat16`: it multiplies bfloat16; this decides the engine's default dtype.
    - `openblas`, `numba`: the core whose kernels OpenBLAS uses, and that LLVM compiles for.
    - `features`: instructions that the engine's kernels may ask for, by LLVM's names.
    - `onednn`, `aten`, `mkl`, `xla`: the newest instructions that oneDNN, ATen, MKL (on Intel's CPUs) and XLA may use.
    - `numpy`: groups of instructions that numpy may not use.
    - `tests`: the tests run for it, except with `--whole`.
    """

    name: str
    needs: str
    bfloat16: bool
    openblas: str
    numba: str
    features: str
    onednn: str
    aten: str
    mkl: str
    xla: str
    numpy: str
    tests: list[str]

    def environment(self, cpu_info: Path) -> dict[str, str]:
        """Variables for a process and its children."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "NPY_DISABLE_CPU_FEATURES": self.numpy,
            "NUMBA_CPU_FEATURES": self.features,
            "NUMBA_CPU_NAME": self.numba,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OPENBLAS_CORETYPE": self.openblas,
            "TESTS_CPU_INFO": str(cpu_info),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={self.xla}".strip(),
        }

    def cpu_info(self) -> str:
        """`/proc/cpuinfo` as the engine should read it."""
        text = CPU_INFO.read_text()
        for unit in () if self.bfloat16 else BFLOAT16_UNITS:
            text = text.replace(unit, "")
        return text


PROFILES = [
    Profile(
        name="haswell",  # Intel, 2013: up to AVX2
        needs="avx2",
        bfloat16=False,
        openblas="Haswell",
        numba="haswell",
        features="+avx2,+fma,+f16c",
        onednn="AVX2",
        aten="avx2",
        mkl="AVX2",
        xla="AVX2",
        numpy="X86_V4 AVX512_ICL AVX512_SPR",
        tests=COMPUTING,
    ),
    Profile(
        name="zen",  # AMD, 2022 (Zen 4): AVX-512 and bfloat16, but AVX2 in OpenBLAS and MKL
        needs="avx512_bf16",
        bfloat16=True,
        openblas="Zen",
        numba="znver4",
        features="+avx2,+fma,+f16c,+avx512bw,+avx512vl,+avx512vnni,+avx512bf16",
        onednn="AVX512_CORE_BF16",
        aten="avx512",
        mkl="AVX2",
        xla="AVX512_BF16",
        numpy="AVX512_SPR",
        tests=ROUNDING,
    ),
    Profile(
        name="skylake",  # Intel, 2017: AVX-512 without products of bfloat16 or of bytes
        needs="avx512bw",
        bfloat16=False,
        openblas="SkylakeX",
        numba="skylake-avx512",
        features="+avx2,+fma,+f16c,+avx512bw,+avx512vl",
        onednn="AVX512_CORE",
        aten="avx512",
        mkl="AVX512",
        xla="AVX512",
        numpy="AVX512_ICL AVX512_SPR",
        tests=ROUNDING,
    ),
    Profile(
        name="nehalem",  # Intel, 2008: no AVX, and no fused multiply-add
        needs="sse4_2",
        bfloat16=False,
        openblas="Prescott",
        numba="nehalem",
        features="+sse4.2",
        onednn="SSE41",
        aten="default",
        mkl="SSE4_2",
        xla="SSE4_2",
        numpy="X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        tests=ROUNDING,
    ),
]


def run(profile: Profile, arguments: Sequence[str]) -> str | None:
    """Runs pytest as on that CPU.

    **Returns:** the outcome in words, if not all tests passed.
    """
    with tempfile.TemporaryDirectory(prefix="other-cpu-") as folder:
        cpu_info = Path(folder) / "cpuinfo"
        cpu_info.write_text(profile.cpu_info())
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | profile.environment(cpu_info), check=False)
    return None if done.returncode == 0 else f"pytest ended with status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [profile.name for profile in PROFILES]
    parser.add_argument("--only", action="append", choices=names, help="only as this CPU; may be given several times")
    parser.add_argument("--whole", action="store_true", help="all numerical tests as each CPU")
    options, arguments = parser.parse_known_args()
    features = CPU_INFO.read_text().split()
    reports, failed = [], False
    for profile in PROFILES:
        if options.only and profile.name not in options.only:
            continue
        if profile.needs not in features:
            reports.append(f"{profile.name}: not run, as this CPU has no {profile.needs}")
            continue
        print(f"== as on {profile.name}", flush=True)
        start = time.perf_counter()
        wrong = run(profile, arguments or (COMPUTING if options.whole else profile.tests))
        failed |= wrong is not None
        reports.append(f"{profile.name}: {wrong or 'passed'}, after {time.perf_counter() - start:.0f} s")
    print(*reports, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

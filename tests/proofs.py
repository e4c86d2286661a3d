"""Runs the proofs that `make test` leaves out, and records the green ones in tests/proofs.json.

    python tests/proofs.py run [NAME ...]    # all, or the named ones; a name may be a pattern such as "bench-*"
    python tests/proofs.py stale             # a line for each whose sources have changed; `make check` prints them

A record has the commit that was proved, the date, the processor, and the seconds that the proof took. A red proof is
not recorded, nor one whose sources differ from every commit. An old record is not an error: `stale` exits with 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = "tests/proofs.json"
CPU_INFO = Path("/proc/cpuinfo")
BENCHMARK = "bench-"
FILES_NAMED = 2
"""How many changed files a line names; the rest are counted."""

HOST = tuple(
    f"sglang_jax/{name}"
    for name in (
        *("batch", "checkpoint", "cli", "config", "engine", "grammar", "mem_cache", "queues", "replies", "runner"),
        *("sampling", "scheduler", "server", "spellings.py", "spellings.toml"),
    )
)
"""The packages that do not compute on a device."""

PRODUCT = ("sglang_jax", "torch_backend")


@dataclass(frozen=True)
class Proof:
    """`command`: the command line, run in the root of the repository. `covers`: the files and folders that it
    proves."""

    name: str
    command: tuple[str, ...]
    covers: tuple[str, ...]

    def covered(self, files: Iterable[str]) -> list[str]:
        return sorted(
            file for file in files if any(file == path or file.startswith(f"{path}/") for path in self.covers)
        )


@dataclass(frozen=True)
class Record:
    """`commit`: the full name of the commit that was proved. `seconds`: how long the proof took."""

    commit: str
    date: str
    processor: str
    seconds: int


def target(name: str, *covers: str) -> Proof:
    """A target of the Makefile, without the ARGS that `make proofs` itself may have."""
    return Proof(name, ("make", "--no-print-directory", name, "ARGS="), covers)


def smoke(script: str, arguments: str = "", covers: tuple[str, ...] = PRODUCT) -> Proof:
    """A script of benchmarks/ on a small size. Scripts about TPUs find the compiler that the Makefile installs."""
    path = f"benchmarks/{script}.py"
    command = ("env", f"PYTHONPATH={sys.prefix}/libtpu:.", sys.executable, path, *shlex.split(arguments))
    return Proof(BENCHMARK + script.replace("_", "-"), command, (path, "benchmarks/machine.py", *covers))


TPU = (
    "benchmarks/tpu_kernels",
    "sglang_jax/kernels",
    "sglang_jax/layers",
    "sglang_jax/models",
    "sglang_jax/jax_runner",
    "tpu",
)
TRITON = ("torch_backend/kernels", "tests/helpers/triton_ahead_of_time.py", "tests/helpers/triton_inventory.py")
SOAK_SERVER = ("benchmarks/soak_server.py", "benchmarks/soak_clients.py", "benchmarks/soak_watch.py")
WEB_TESTS = ("tests/web", "tests/helpers/web_page.py", "tests/helpers/echo_server.py")
RAY_TESTS = ("tests/on_ray", "tests/helpers/ray_cluster.py", "tests/helpers/ray_command.py", "examples/ray_serve.py")
INSTALLED = ("pyproject.toml", "requirements", "Dockerfile", "tests/package_trial.py", "tests/helpers/dockerfile.py")

PROOFS = (
    target("ray-test", *HOST, *RAY_TESTS, "pyproject.toml"),
    target("web-test", *HOST, *WEB_TESTS, "pyproject.toml"),
    target("client-test", *HOST, "tests/clients", "pyproject.toml"),
    target("package-test", *PRODUCT, "tpu", *INSTALLED),
    target("docs", "docs", "README.md", "CHANGELOG.md", "mkdocs.yml", "pyproject.toml", *HOST),
    target(
        "batch-kills",
        *(
            "sglang_jax/batch",
            "sglang_jax/server",
            "tests/batch/test_served_kills.py",
            "tests/helpers/batch_command.py",
        ),
    ),
    target("soak-server", *PRODUCT, *SOAK_SERVER),
    target("proxy-test", *HOST, "deploy/proxy", "benchmarks/proxies.py", "benchmarks/abuse.py"),
    target("kernel-table", *TRITON, "tests/helpers/triton_table.json"),
    target("tpu-check", "sglang_jax", "tpu", "tests/tpu", "tests/kernels"),
    target("soak", *PRODUCT, "tests", "docs/tutorial.md", "docs/images/draw_terminal.py"),
    target("test-cpus", *PRODUCT, "tests"),
    smoke("arrivals", "--part 16 --repeats 1", HOST),
    smoke("batch_driver", "--lines 2000 --repeats 1", HOST),
    smoke("fair_prefill", "--seconds 20", HOST),
    smoke("grammar_host", "--rows 8 --steps 20", HOST),
    smoke("host_step", covers=HOST),
    smoke("page_frees", "--turns 5", HOST),
    smoke("prefix_cache", covers=HOST),
    smoke("replicas", "routing sleep", HOST),
    smoke("stream_host", "--seconds 1", HOST),
    smoke("abuse", "--malformed 200", HOST),
    smoke("agent_conversation", "--turns 12"),
    smoke("constrained", "--rows 1 8 --turns 1"),
    smoke("busy_cpu", "--turns 1"),
    smoke("decode_cpu", "--backend torch jax --batch 1 8 --prompts 512 --busy 2 --turns 1"),
    smoke("experts_cpu", "--shape tiny --batch 1 --turns 1"),
    smoke("deterministic", "--backend torch --dtype float32 --batch 1 --repeats 1"),
    smoke("same_results", "--backend torch --dtype float32 --deterministic tp --prompts 2"),
    smoke("fair_prefill_http", "--backend torch --seconds 10 --long 1000"),
    smoke("embeddings", "--no-reference --dtypes float32 --batch 4 --turns 1"),
    smoke("faults", "'engine killed'"),
    smoke("hybrid_second_prompt", "--chunk 512 --repeats 1"),
    smoke("hybrid_shared_prefix", "--shapes short long --scale 0.05 --turns 1"),
    smoke("kv_dtype_agreement", "--backend torch --prompts 2 --tokens 8"),
    smoke("jax_step_cpu", "--rows 2 --prompts 64 --steps 4"),
    smoke("model_step_cpu", "--rows 2 --contexts 96 --prefill 16 --repeats 3"),
    smoke("nll", "--tokens 1000 --chunks 512"),
    smoke("latent_decode_cpu", "--models MiniCPM3 --context 128 --repeat 1"),
    smoke("latent_prefill_cpu", "--queries 64 --contexts 128 --repeat 1"),
    smoke("loading_memory", "--layers 2 --shapes experts --formats bfloat16 Q4_0"),
    smoke("random_gguf", "/tmp/random.gguf --layers 1 --type Q4_0"),
    smoke("quantization_nll", "--tokens 600 --forms int8 Q4_0"),
    smoke("sampler_cpu", "--rows 1 8 --repeat 3"),
    smoke("sessions", "--turns 2"),
    smoke("speculation", "--rows 1 --turns 1 --kinds edit"),
    smoke("start", "--turns 1"),
    smoke("state_dtype_loss", "--tokens 64"),
    smoke("torch_step_cpu", "--rows 1 8 --repeats 3"),
    smoke("traced_cpu", "--batch 1 --repeats 1"),
    smoke("traced_step_cpu", "--layers 2 --rows 1"),
    smoke("gpu_suite", "--device cpu --small", ("torch_backend", "benchmarks/gpu")),
    smoke("gpu_kernel_sass", "--chips 90", TRITON),
    smoke("tpu_expert_estimate", "--layer qwen3-30b-a3b:v6e:4:8 qwen3-30b-a3b:v6e-8:8:8", TPU),
    smoke("tpu_latent_estimate", "--chips v6e --heads 16", TPU),
    smoke("tpu_kernel_estimate", "--chips v6e --models llama-8b --pages 64", TPU),
    smoke("tpu_rounding_estimate", "--chips v6e --rows 64 --matrices 512x1024", TPU),
    smoke("tpu_sampler_estimate", "--chips v6e --lines 16", TPU),
    smoke("tpu_state_estimate", "--chips v6e", TPU),
    smoke("tpu_step_estimate", "--step qwen3-8b:v6e-4:4:64:1536", TPU),
    smoke(
        "tpu_tune",
        "--model qwen3-8b --tp 8 --page-size 128 --by schedule --chip v6e --output /tmp/block_sizes.json",
        TPU,
    ),
)


@dataclass(frozen=True)
class Clone:
    """A repository with a working tree. Its methods raise `subprocess.CalledProcessError` for an unknown commit."""

    root: Path

    def head(self) -> str:
        return self._git("rev-parse", "HEAD")[0]

    def changed_since(self, commit: str) -> set[str]:
        """Files of the working tree that differ from the commit, including new ones."""
        changed = self._git("diff", "--no-renames", "--name-only", commit, "--")
        return {*changed, *self._git("ls-files", "--others", "--exclude-standard")}

    def _git(self, *arguments: str) -> list[str]:
        command = ["git", "-c", "core.quotePath=false", *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def records(self) -> dict[str, Record]:
        file = self.root / RECORDS
        content = json.loads(file.read_text()) if file.exists() else {}
        return {name: Record(**fields) for name, fields in content.items()}

    def write(self, name: str, record: Record) -> None:
        """Adds a record or replaces it."""
        records = {name: asdict(each) for name, each in {**self.records(), name: record}.items()}
        (self.root / RECORDS).write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


def processor() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def chosen(proofs: Sequence[Proof], names: Sequence[str]) -> list[Proof]:
    """The named proofs in the order of the table, or all without names. Raises `SystemExit` for an unknown name."""
    unknown = [name for name in names if not any(fnmatchcase(proof.name, name) for proof in proofs)]
    if unknown:
        known = ", ".join(proof.name for proof in proofs)
        raise SystemExit(f"ONLY must name proofs, got {' '.join(unknown)}: choose from {known}")
    return [proof for proof in proofs if not names or any(fnmatchcase(proof.name, name) for name in names)]


def run_proof(clone: Clone, proof: Proof) -> str:
    """Runs one proof and records it if it is green. Returns an empty text, or the reason why there is no record."""
    commit = clone.head()
    if changed := proof.covered(clone.changed_since(commit)):
        return f"not run, because its sources are not committed: {listed(changed)}"
    print(f"== {proof.name}: {shlex.join(proof.command)}", flush=True)
    start = time.monotonic()
    status = subprocess.run(proof.command, cwd=clone.root, stdin=subprocess.DEVNULL).returncode
    seconds = round(time.monotonic() - start)
    if status:
        return f"red: its command ended with status {status} after {seconds} s"
    if changed := proof.covered(clone.changed_since(commit)):
        return f"not recorded, because its sources changed while it ran: {listed(changed)}"
    clone.write(proof.name, Record(commit, datetime.date.today().isoformat(), processor(), seconds))
    return ""


def run_proofs(clone: Clone, proofs: Sequence[Proof]) -> int:
    """Runs all, also after a red one. Returns the exit status: 1 if one of them was not recorded."""
    missing = {proof.name: why for proof in proofs if (why := run_proof(clone, proof))}
    for name, why in missing.items():
        print(f"{name}: {why}", file=sys.stderr)
    print(f"{len(proofs) - len(missing)} of {len(proofs)} proofs are green and recorded in {RECORDS}")
    return 1 if missing else 0


def stale(clone: Clone, proofs: Sequence[Proof]) -> list[str]:
    """A line for each proof recorded with other sources, and one line for all benchmarks together."""
    records = clone.records()
    changed: dict[str, set[str] | None] = {}
    for commit in {record.commit for record in records.values()}:
        try:
            changed[commit] = clone.changed_since(commit)
        except subprocess.CalledProcessError:
            changed[commit] = None
    lines = {proof.name: stale_line(proof, records.get(proof.name), changed) for proof in proofs}
    benchmarks = [name for name in lines if name.startswith(BENCHMARK)]
    found = [line for name, line in lines.items() if line and name not in benchmarks]
    if old := [name for name in benchmarks if lines[name]]:
        found.append(f"proofs {BENCHMARK}*: {len(old)} of {len(benchmarks)} have no record of these sources")
    return found


def stale_line(proof: Proof, record: Record | None, changed: dict[str, set[str] | None]) -> str:
    """Empty if the record is of the current sources."""
    if record is None:
        return f"proof {proof.name}: no record"
    since = changed[record.commit]
    if since is None:
        return f"proof {proof.name}: its commit {record.commit[:8]} is not in this clone"
    files = proof.covered(since)
    return f"proof {proof.name}: changed since {record.date} ({record.commit[:8]}): {listed(files)}" if files else ""


def listed(files: Sequence[str]) -> str:
    more = len(files) - FILES_NAMED
    return ", ".join(files[:FILES_NAMED]) + (f" and {more} more" if more > 0 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run proofs one by one, and record the green ones")
    running.add_argument("names", nargs="*", metavar="NAME", help=", ".join(proof.name for proof in PROOFS))
    commands.add_parser("stale", help="print a line for each proof whose sources changed since its record")
    options = parser.parse_args(arguments)
    clone = Clone(ROOT)
    if options.command == "run":
        return run_proofs(clone, chosen(PROOFS, options.names))
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        print("proofs: no git or no clone here, so that changed sources are not known")
        return 0
    if lines := stale(clone, PROOFS):
        print("\n".join([*lines, "a proof is renewed by: make proofs ONLY=NAME"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

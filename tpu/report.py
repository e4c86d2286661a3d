"""The report of `tpu.check`: the deployment, figures of each program, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import Dtype
from tpu.choices import bytes_per_weight
from tpu.figures import Deployment, ProgramFailure, ProgramFigures
from tpu.operations import short_source
from tpu.roofline import Device, Roofline, Work, roofline
from tpu.tables import in_bytes, in_seconds, in_units, table
from tpu.topologies import Topology


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of a step's time. The compiler's own estimate excludes attention and collectives, and products in
    kernels. `estimated`; `layers`: the layers' share of it; `products`: those in kernels, at peak; `least`: the minimum
    time of both at peak; `attention`, `exchange`: the minimum time of the rest."""

    estimated: float
    layers: float
    least: float
    attention: float
    exchange: float
    products: float = 0.0

    @property
    def of(self) -> float:
        """The minimum time over the estimate; 1 is as fast as the chip."""
        whole = self.estimated + self.products
        return self.least / whole if whole else 0.0

    @property
    def step(self) -> float:
        """Time of a whole step if attention and exchange run at peak, with no waits in between."""
        return self.estimated + self.products + self.attention + self.exchange


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    topology: Topology
    tp: int
    deployment: Deployment
    programs: Sequence[ProgramFigures]
    failures: Sequence[ProgramFailure]
    notices: Sequence[str] = ()
    row_context: int | None = None
    remedy: str | None = None

    @property
    def resident_code(self) -> int:
        """Bytes of the instructions of all compiled programs; each stays in HBM once it is loaded."""
        return sum(program.code for program in self.programs)

    @property
    def needed(self) -> int:
        """Maximum HBM that a device needs at any time."""
        return self.resident_code + max((program.running for program in self.programs), default=0)

    @property
    def headroom(self) -> int:
        return self.deployment.hbm - self.needed

    @property
    def problem(self) -> str | None:
        """The reason why this cannot be served, in one line, with a remedy; None if it can."""
        would_fit = "" if self.remedy is None else f". Would fit: {self.remedy}"
        if self.failures:
            failure = self.failures[0]
            return f"{failure.name!r} does not compile: {failure.reason.splitlines()[0].rstrip(':.')}{would_fit}"
        if self.headroom < 0:
            largest = max(self.programs, key=lambda program: program.running)
            return (
                f"{largest.name!r} needs {in_bytes(self.needed)} of HBM, but a device has only "
                f"{in_bytes(self.deployment.hbm)}: lower --mem-fraction-static, --max-total-tokens or "
                f"--max-running-requests{would_fit}"
            )
        return None

    @property
    def context(self) -> int:
        """Tokens of each row: as asked for, or each row's equal share of the pages."""
        if self.row_context is not None:
            return min(self.row_context, self.deployment.max_context)
        tokens = self.deployment.kv_tokens
        if tokens is None:  # a row takes the same memory at any length
            return self.deployment.max_context
        return max(min(self.deployment.max_context, tokens // self.deployment.max_rows), 1)

    def work(self, program: ProgramFigures) -> Work | None:
        """The work of a full step of the program; None if it computes no tokens."""
        if not program.tokens:
            return None
        if program.tokens == program.rows:
            return Work.decode(program.rows, self.context)
        return Work.prefill(program.tokens, self.deployment.ranks)

    def bounds(self, program: ProgramFigures, work: Work, *, states: bool = True) -> Roofline:
        """The minimum time of a step. `states`: include the traffic of recurrent states."""
        deployment, collectives = self.deployment, program.collectives
        sent = None
        if collectives is not None:
            sent = sum(collective.sent(self.tp) for collective in collectives if not collective.conditional)
        return roofline(
            deployment.config,
            work,
            self._device(),
            tp=self.tp,
            ranks=deployment.ranks,
            weight_bytes=deployment.weights,
            kv_bytes_per_token=deployment.page // deployment.page_size,
            state_bytes_per_row=deployment.slot if states else 0,
            exchanged=sent,
            width=bytes_per_weight(Dtype(deployment.dtype)),
        )

    def share(self, program: ProgramFigures) -> StepTime | None:
        """The compiler's estimate and the minimum time of the same work; None if there is no estimate."""
        work = self.work(program)
        if work is None or program.estimate is None:
            return None
        without = self.bounds(program, Work(work.tokens, work.rows, 0, 0), states=False)
        whole, device = self.bounds(program, work), self._device()
        products = [
            max(kernel.all_flops / device.flops, kernel.all_bytes / device.hbm_bandwidth)
            for kernel in program.kernels or ()
        ]
        return StepTime(
            estimated=program.estimate.cycles / self.topology.chip.clock,
            layers=program.estimate.layer_cycles / self.topology.chip.clock,
            least=max(without.compute, without.memory),
            attention=max(whole.compute, whole.memory) - max(without.compute, without.memory),
            exchange=whole.exchange,
            products=sum(products),
        )

    @property
    def warnings(self) -> list[str]:
        """Costs of every step that could be avoided, and warnings of the programs' own code."""
        clock = self.topology.chip.clock
        found = [
            text
            for program in self.programs
            if program.estimate is not None
            for text in program.estimate.warnings(program.name, clock)
        ]
        longest = self.deployment.max_context
        if self.row_context is not None and self.row_context > longest:
            found.append(f"--roofline-context {self.row_context} is beyond the maximum context: {longest} is used")
        return [*found, *self.notices]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; bytes, seconds and FLOPs, of one device."""
        programs = []
        for program in self.programs:
            work = self.work(program)
            bounds = None if work is None else self.bounds(program, work)
            share = self.share(program)
            programs.append(
                asdict(program)
                | {"running": program.running, "share": None if share is None else asdict(share) | {"of": share.of}}
                | {"roofline": None if bounds is None else asdict(bounds) | {"bound": bounds.bound.value}}
            )
        return {
            "model": self.model,
            "topology": str(self.topology),
            "tp": self.tp,
            "deployment": asdict(self.deployment) | {"kv_tokens": self.deployment.kv_tokens},
            "programs": programs,
            "failures": [asdict(failure) for failure in self.failures],
            "needed": self.needed,
            "headroom": self.headroom,
            "problem": self.problem,
            "warnings": self.warnings,
        }

    @property
    def exchange_bandwidth(self) -> float:
        """Bytes per second that a device sends within its group."""
        return self.topology.exchange_bandwidth(self.deployment.box)

    def _device(self) -> Device:
        chip = self.topology.chip
        share = self.topology.chips / self.deployment.devices
        peak = chip.bf16_flops if self.deployment.dtype == "bfloat16" else chip.bf16_flops / 6
        return Device(peak * share, chip.hbm_bandwidth * share, self.exchange_bandwidth)


def heading(model: str, topology: Topology, tp: int, deployment: Deployment, compiler: str) -> list[str]:
    config = deployment.config
    nodes = "1 node" if topology.nodes == 1 else f"{topology.nodes} nodes"
    return [
        f"Model    {model}: {config.num_layers} layers, hidden {config.hidden_size}, {_heads(config)}, vocabulary "
        f"{config.vocab_size:,}",
        f"Slice    {topology}: {topology.chips} chips, {deployment.devices} devices ({deployment.device_kind}) with "
        f"{in_bytes(deployment.hbm)} of HBM each, {nodes}",
        f"Options  tp {tp}, {deployment.dtype}, KV {deployment.kv_dtype}, attention {deployment.attention}, "
        f"page size {deployment.page_size}, {deployment.max_rows} rows, {deployment.token_budget} tokens a step, "
        f"context {deployment.max_context:,}",
        f"Memory   on each device weights {in_bytes(deployment.weights)}, {_cache(deployment)}",
        f"Compiler {compiler}, ahead of time: nothing is run",
    ]


def _cache(deployment: Deployment) -> str:
    tokens, kv = deployment.kv_tokens, in_bytes(deployment.kv)
    if tokens is None:
        return f"recurrent states {kv}: {deployment.num_pages - 1:,} of {in_bytes(deployment.slot)}"
    states = " and recurrent states" if deployment.slot else ""
    pools = f" ({deployment.pools})" if deployment.slot or "window" in deployment.pools else ""
    pages = f"{deployment.num_pages - 1:,} pages of {deployment.page_size}, {tokens // deployment.ranks:,} tokens"
    return f"KV pages{states} {kv}: {pages}{pools}"


def _heads(config: ModelConfig) -> str:
    found = dict.fromkeys(
        f"{mixer.num_heads} heads and {mixer.num_kv_heads} kv heads of {mixer.head_dim}"
        if isinstance(mixer, AttentionConfig)
        else f"{mixer.num_heads} heads and latent vectors of {mixer.latent} + {mixer.rotary_dim}"
        for mixer in config.attention
    )
    return " or ".join(found) or "no attention"


def render(report: Report) -> list[str]:
    """Tables, and the verdict as the last line."""
    lines = ["", f"HBM on each device ({in_bytes(report.deployment.hbm)})", *_memory(report)]
    if any(program.tokens for program in report.programs):
        lines += ["", *_rooflines(report), *_estimates(report)]
    lines += _collectives(report) + _kernels(report)
    for failure in report.failures:
        lines += ["", f"{failure.name} does not compile ({failure.seconds:.1f} s): {failure.reason}"]
    lines += [*([""] if report.warnings else []), *(f"WARNING  {text}" for text in report.warnings)]
    return [*lines, "", _verdict(report)]


def _memory(report: Report) -> list[str]:
    header = ("program", "compiled in", "arguments", "temporaries", "outputs", "aliased", "in use", "code")
    rows = [
        (
            program.name,
            f"{program.seconds:.1f} s",
            *map(
                in_bytes,
                (
                    program.arguments,
                    program.temporaries,
                    program.outputs,
                    program.aliased,
                    program.running,
                    program.code,
                ),
            ),
        )
        for program in report.programs
    ]
    return table(header, rows)


def _rooflines(report: Report) -> list[str]:
    header = ("full step", "FLOPs", "(XLA)", "HBM", "(XLA)", "compute", "memory", "exchange", "least time", "tokens/s")
    rows = []
    for program in report.programs:
        work = report.work(program)
        if work is None:
            continue
        bounds = report.bounds(program, work)
        rows.append(
            (
                program.name,
                in_units(bounds.flops, "FLOP"),
                in_units(program.flops, "FLOP"),
                in_bytes(bounds.hbm_bytes),
                in_bytes(program.accessed),
                in_seconds(bounds.compute),
                in_seconds(bounds.memory),
                in_seconds(bounds.exchange),
                f"{in_seconds(bounds.seconds)} ({bounds.bound})",
                f"{work.tokens / bounds.seconds:,.0f}",
            )
        )
    chip = report.topology.chip
    return [
        f"Minimum time of a step, from the model's shapes and the peaks of a {chip.generation} chip "
        f"({in_units(chip.bf16_flops, 'FLOP/s')}, HBM {in_units(chip.hbm_bandwidth, 'B/s')}, "
        f"{_links(report)})",
        f"Decode rows hold {report.context:,} tokens each; a mixed step is {_prompts(report)}. (XLA): the compiler's "
        "count, each loop counted once",
        *table(header, rows),
    ]


def _prompts(report: Report) -> str:
    ranks = report.deployment.ranks
    return "one prompt's first tokens" if ranks == 1 else f"the first tokens of a prompt on each of {ranks} devices"


def _links(report: Report) -> str:
    box, speed = report.deployment.box, in_units(report.exchange_bandwidth, "B/s")
    if math.prod(box) == 1 < report.tp:
        return f"{speed} between the devices of a chip"
    whole = report.tp == report.deployment.devices
    grid = "x".join(map(str, box))
    return f"ICI {speed} over the links of {report.topology if whole else f'{grid} chips of {report.topology}'}"


def _estimates(report: Report) -> list[str]:
    """The compiler's estimates with the minimum times, and the operations with the most cycles."""
    shares = [(program, share) for program in report.programs if (share := report.share(program)) is not None]
    if not shares:
        return []
    clock = report.topology.chip.clock
    further = ("attention, least", "exchange, least", "at best")
    header = ("step", "estimate", "of it layers", "products in kernels, least", "least", "share", *further)
    rows = [
        (
            program.name,
            in_seconds(share.estimated),
            in_seconds(share.layers),
            in_seconds(share.products),
            in_seconds(share.least),
            f"{share.of:.0%}",
            in_seconds(share.attention),
            in_seconds(share.exchange),
            in_seconds(share.step),
        )
        for program, share in shares
    ]
    worst = [
        (
            f"{program.name}: {operation.name}",
            operation.array,
            f"{operation.times} x {in_seconds(operation.cycles / clock)}",
            short_source(operation.source) or operation.origin,
        )
        for program, _ in shares
        if program.estimate is not None
        for operation in program.estimate.worst
    ]
    return [
        "",
        f"The compiler's estimate without kernels and collectives, at {clock / 1e9:g} GHz, and its minimum time",
        *table(header, rows),
        "",
        *table(("longest operations", "result", "time", "from"), worst),
    ]


def _collectives(report: Report) -> list[str]:
    if report.tp == 1:
        return []
    rows = []
    for program in report.programs:
        if program.collectives is None:
            rows.append((program.name, "the compiler returned no text", "", "", "", "", ""))
        for found in program.collectives or ():
            when = "if asked for" if found.conditional else "every step"
            where = "layers" if found.in_layers else "around them"
            rows.append((program.name, found.kind, where, when, str(found.count), in_bytes(found.bytes), found.largest))
    header = ("collectives", "kind", "where", "when", "count", "bytes on a device", "largest")
    return ["", *table(header, rows)] if rows else []


def _kernels(report: Report) -> list[str]:
    rows = []
    for program in report.programs:
        for kernel in program.kernels or ():
            rows.append(
                (
                    program.name,
                    kernel.name,
                    str(kernel.count),
                    f"{in_bytes(kernel.vmem)} of {in_bytes(report.topology.chip.vmem)}",
                    "-" if kernel.flops is None else in_units(kernel.flops, "FLOP"),
                    "-" if kernel.bytes is None else in_bytes(kernel.bytes),
                )
            )
    header = ("Pallas kernels", "kernel", "calls", "VMEM", "FLOPs of a call", "bytes of a call")
    return ["", *table(header, rows)] if rows else []


def _verdict(report: Report) -> str:
    if report.problem is not None:
        return f"DOES NOT FIT: {report.problem}" if not report.failures else f"DOES NOT COMPILE: {report.problem}"
    deployment = report.deployment
    free = max(report.headroom, 0)
    if deployment.page:
        more = f"{free // deployment.page:,} more pages, {free // deployment.page * deployment.page_size:,} tokens"
    else:
        more = f"{free // deployment.slot:,} more recurrent states"
    compiled = f"{len(report.programs)} of {deployment.all_programs} programs compiled"
    return (
        f"FITS: {compiled}; at most {in_bytes(report.needed)} of {in_bytes(deployment.hbm)} in use, "
        f"{in_bytes(report.headroom)} left (room for {more})"
    )

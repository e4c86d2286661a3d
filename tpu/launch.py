"""`python -m tpu.launch`: the server on a TPU VM with options to suit; the same command on every host of a slice."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import click

from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.cli.main import run
from sglang_jax.cli.serve import serve
from sglang_jax.config import LoadFormat, TpuEnvironment
from tpu.choices import MEETING_PORT, Choices, choose
from tpu.machine import Machine, detect_machine

_SERVER = "sglang_jax.launch_server"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--model-path", default="demo", show_default=True, help="a folder, a .gguf file, a hub id, or demo")
@click.option("--tp-size", type=click.IntRange(min=1), help="devices of a replica; default: as many as there are")
@click.option("--dry-run", is_flag=True, help="print the server's command and end")
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
def launch(*, model_path: str, tp_size: int | None, dry_run: bool, server_options: Sequence[str]) -> int:
    """Start the server with options for this TPU. Other options of the server may follow, and win."""
    machine = detect_machine(TpuEnvironment())
    config = open_checkpoint(model_path, LoadFormat.DUMMY).config
    choices = choose(machine, config, tp=tp_size)
    arguments = [*server_arguments(machine, choices, model_path), *server_options]
    where = f", host {machine.worker} of {len(machine.hosts)}" if machine.hosts else ""
    click.echo(
        f"{machine.topology} ({machine.topology.chips} chips, {machine.topology.devices} devices){where}", err=True
    )
    for reason in choices.reasons:
        click.echo(f"  {reason}", err=True)
    command = shlex.join(["python", "-m", _SERVER, *arguments])
    if dry_run:
        click.echo(command)
        return 0
    click.echo(command, err=True)
    return run(serve, "python -m tpu.launch", arguments)


def server_arguments(machine: Machine, choices: Choices, model_path: str) -> list[str]:
    """Flags of the server for one host of a slice."""
    arguments = ["--model-path", model_path, "--backend", "jax", "--device", "tpu"]
    arguments += ["--tp-size", str(choices.tp), "--page-size", str(choices.page_size)]
    arguments += ["--mem-fraction-static", f"{choices.mem_fraction_static:g}"]
    return arguments + host_arguments(machine)


def host_arguments(machine: Machine) -> list[str]:
    """How a host of several finds the others; none for a host alone."""
    if len(machine.hosts) < 2:
        return []
    return [
        *("--nnodes", str(len(machine.hosts))),
        *("--node-rank", str(machine.worker)),
        *("--dist-init-addr", f"{machine.hosts[0]}:{MEETING_PORT}"),
    ]


if __name__ == "__main__":
    sys.exit(run(launch, "python -m tpu.launch"))

"""`python -m tpu.launch`: the server on a TPU VM with options to suit; the same command on every node of a slice."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import click

from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.cli.main import run
from sglang_jax.cli.serve import serve
from sglang_jax.config import LoadFormat, TpuEnvironment
from sglang_jax.engine.placement import Placement, alone_in_a_slice
from sglang_jax.errors import ConfigError
from sglang_jax.server.local_hosts import is_loopback
from tpu.choices import MEETING_PORT, Choices, choose
from tpu.machine import Machine, detect_machine

_SERVER = "sglang_jax.launch_server"
_PORT = 30000
"""The server's own default."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--model-path", default="demo", show_default=True, help="a folder, a .gguf file, a hub id, or demo")
@click.option("--tp-size", type=click.IntRange(min=1), help="devices per replica; default: all")
@click.option(
    "--dp-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="number of replicas on the slice; with several nodes, a multiple of their number",
)
@click.option(
    "--host",
    help="address to listen on; default: the server's default, or a node's own address with replicas on several nodes",
)
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="port to listen on; default: 30000")
@click.option("--dry-run", is_flag=True, help="print the server's command and exit")
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
def launch(
    *,
    model_path: str,
    tp_size: int | None,
    dp_size: int,
    host: str | None,
    port: int | None,
    dry_run: bool,
    server_options: Sequence[str],
) -> int:
    """Start the server with options that suit this TPU. Server options that follow take precedence."""
    machine = detect_machine(TpuEnvironment())
    config = open_checkpoint(model_path, LoadFormat.DUMMY).config
    choices = choose(machine, config, tp=tp_size, replicas=dp_size)
    listening = listening_arguments(machine, choices, host, port)
    arguments = [*server_arguments(machine, choices, model_path), *listening, *server_options]
    where = f", node {machine.worker} of {len(machine.nodes)}" if machine.nodes else ""
    click.echo(
        f"{machine.topology} ({machine.topology.chips} chips, {machine.topology.devices} devices){where}", err=True
    )
    for reason in choices.reasons:
        click.echo(f"  {reason}", err=True)
    placement = own_placement(machine, choices)
    environment = () if placement is None else placement.environment
    command = shlex.join([*map("=".join, environment), "python", "-m", _SERVER, *arguments])
    if dry_run:
        click.echo(command)
        return 0
    click.echo(command, err=True)
    if placement is not None:
        placement.apply()
    return run(serve, "python -m tpu.launch", arguments)


def server_arguments(machine: Machine, choices: Choices, model_path: str) -> list[str]:
    """Flags of the server for one node of a slice, but for where it listens."""
    arguments = ["--model-path", model_path, "--backend", "jax", "--device", "tpu"]
    arguments += ["--tp-size", str(choices.tp), "--page-size", str(choices.page_size)]
    arguments += ["--mem-fraction-static", f"{choices.mem_fraction_static:g}"]
    on_each = choices.replicas // max(len(machine.nodes), 1)
    if on_each > 1:
        arguments += ["--dp-size", str(on_each)]
    return arguments + (node_arguments(machine) if choices.replicas == 1 else [])


def node_arguments(machine: Machine) -> list[str]:
    """How a node of several finds the others of one replica; none for a node alone."""
    if len(machine.nodes) < 2:
        return []
    return [
        *("--nnodes", str(len(machine.nodes))),
        *("--node-rank", str(machine.worker)),
        *("--dist-init-addr", f"{machine.nodes[0]}:{MEETING_PORT}"),
    ]


def listening_arguments(machine: Machine, choices: Choices, host: str | None, port: int | None) -> list[str]:
    """Where a node listens, as `--host` and `--port` say. With replicas on several nodes each has a server of its own,
    and that of node 0 gives requests to its own replicas and to the others' servers.

    **Raises:** `ConfigError` for an address or a port by which node 0 could not find the others.
    """
    if choices.replicas == 1 or len(machine.nodes) < 2:
        return [*([] if host is None else ["--host", host]), *([] if port is None else ["--port", str(port)])]
    number = _PORT if port is None else port
    if number == 0:
        raise ConfigError("--port 0 chooses a different port on each node, but node 0 must know it: give a port")
    if machine.worker == 0:
        others = ",".join(f"{address}:{number}" for address in machine.nodes[1:])
        return [*([] if host is None else ["--host", host]), "--port", str(number), "--connect", f"local,{others}"]
    own = host or machine.nodes[machine.worker]
    if own != machine.nodes[machine.worker] and is_loopback(own):
        raise ConfigError(f"--host {own}: node 0 must reach this one; choose 0.0.0.0, or leave it out")
    return ["--host", own, "--port", str(number)]


def own_placement(machine: Machine, choices: Choices) -> Placement | None:
    """What shows a node of several its own chips alone, where one replica has them all; several see to that themselves,
    and for others there is nothing to say."""
    nodes = len(machine.nodes)
    return alone_in_a_slice(machine.topology.chips // nodes) if nodes > 1 and choices.replicas == nodes else None


if __name__ == "__main__":
    sys.exit(run(launch, "python -m tpu.launch"))

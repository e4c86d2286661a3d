"""`python -m tpu.launch`: starts the server on a TPU VM with suitable options; the same on every node of a slice."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import click

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.checkpoint import ParameterReader
from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.quantization import Encodings
from sglang_jax.cli.main import run
from sglang_jax.cli.options import flag_name, one_model, option_by_all_names, read_config_file, with_dashes
from sglang_jax.cli.serve import ServeCommand, serve
from sglang_jax.config import Dtype, LoadFormat, ServerConfig, Task, TpuEnvironment, WeightQuantization
from sglang_jax.engine.placement import Placement, separate_slice
from sglang_jax.errors import ConfigError
from sglang_jax.runner.quantization import quantization_for
from sglang_jax.server.local_hosts import is_loopback
from sglang_jax.spellings import ALIASES, value_named
from tpu.choices import MEETING_PORT, WHOLE_EXPERTS, Choices, choose
from tpu.machine import Machine, detect_machine, is_ipv6

_SERVER = "sglang_jax.launch_server"
_PORT = 30000
"""The server's own default."""


def _take_defaults(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Uses a `--config` file's values of the options below as their defaults."""
    if file is not None:
        field_of = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
        context.default_map = read_config_file(file, list(ServerConfig.model_fields), field_of)
    return file


@click.command(context_settings={"ignore_unknown_options": True})
@option_by_all_names(
    "model_path", help="a folder, a .gguf file, a hub id, or demo; also without a flag  [default: demo]"
)
@option_by_all_names("tp_size", type=click.IntRange(min=1), help="devices per replica; default: all")
@option_by_all_names(
    "ep_size",
    type=click.IntRange(min=1),
    help="into how many parts the experts are divided; default: as few as keep weights small, mostly 1",
)
@option_by_all_names("enable_expert_parallel", is_flag=True, help="as --ep-size with all devices of a replica")
@option_by_all_names(
    "dp_size",
    type=click.IntRange(min=1),
    help="number of replicas on the slice; with several nodes, a multiple of their number  [default: 1]",
)
@click.option(
    "--host",
    help="address to listen on; default: the server's default, or a node's own address with replicas on several nodes",
)
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="port to listen on; default: 30000")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    callback=_take_defaults,
    metavar="FILE",
    help="YAML or JSON file of server options; flags win over it",
)
@click.option("--dry-run", is_flag=True, help="print the server's command and exit")
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    context: click.Context,
    *,
    model_path: str | None,
    tp_size: int | None,
    ep_size: int | None,
    enable_expert_parallel: bool,
    dp_size: int | None,
    host: str | None,
    port: int | None,
    config: Path | None,
    dry_run: bool,
    server_options: Sequence[str],
) -> int:
    """Start the server for MODEL with options that suit this TPU. Server options that follow take precedence."""
    server_options = _with_one_name_per_flag(server_options)
    by_flag = click.core.ParameterSource.COMMANDLINE
    named = model_path if context.get_parameter_source("model_path") is by_flag else None
    model = one_model(model_among(server_options), named) or model_path or "demo"
    machine = detect_machine(TpuEnvironment())
    from_file = context.default_map or {}
    dtype = dtype_among(server_options, from_file)
    quantization = quantization_among(server_options, from_file)
    if enable_expert_parallel and ep_size not in (None, tp_size):
        raise click.UsageError(
            f"--enable-expert-parallel divides experts among all devices of a replica, and --ep-size is {ep_size}: "
            "remove one of the two"
        )
    checkpoint = open_checkpoint(model, LoadFormat.DUMMY, task=Task.GENERATE)
    choices = choose(
        machine,
        checkpoint.config,
        tp=tp_size,
        ep=WHOLE_EXPERTS if enable_expert_parallel else ep_size,
        replicas=dp_size or 1,
        dtype=dtype,
        quantization=quantization,
        encodings=_encodings_of(checkpoint, quantization),
    )
    arguments = [] if config is None else ["--config", str(config)]
    flags = [name for name in context.params if context.get_parameter_source(name) is by_flag]
    kept = set(from_file) - set(flags)
    arguments += server_arguments(machine, choices, model, from_file=kept, flags=flags)
    arguments += [*listening_arguments(machine, choices, host, port), *server_options]
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


def _encodings_of(checkpoint: Checkpoint, quantization: WeightQuantization) -> Encodings | None:
    """The encodings of a checkpoint's matrices as the server loads them; None for one of Orbax."""
    if checkpoint.reader is None:
        return None
    wanted = quantization_for(checkpoint, quantization)
    encoding = ParameterReader(checkpoint.reader, checkpoint.config, wanted).encoding
    return {name: encoding(name) for name in manifest_of(checkpoint.config).specs}.get


def model_among(server_options: Sequence[str]) -> str | None:
    """The model given without a flag among options of the server; only the server's parser distinguishes it from their
    values. Raises `click.UsageError` for an option that the server does not have."""
    model = _values_of(server_options)["model"]
    return model if isinstance(model, str) else None


def dtype_among(server_options: Sequence[str], from_file: Mapping[str, object]) -> Dtype:
    """The dtype of weights in the server's options, or else in its `--config` file."""
    named = _values_of(server_options).get("dtype") or from_file.get("dtype")
    known = {kind.value: kind for kind in Dtype}
    return known.get(str(named), Dtype.AUTO)  # the server refuses others


def quantization_among(server_options: Sequence[str], from_file: Mapping[str, object]) -> WeightQuantization:
    """The dtype to which weights are quantised in the server's options, or else in its `--config` file."""
    named = _values_of(server_options).get("quantization") or from_file.get("quantization")
    known = {kind.value: kind for kind in WeightQuantization}
    return known.get(value_named("WeightQuantization", str(named)), WeightQuantization.AUTO)


def _with_one_name_per_flag(server_options: Sequence[str]) -> list[str]:
    assert isinstance(serve, ServeCommand)
    return serve.with_one_name_per_flag(_context_of_server(), server_options)


def _context_of_server() -> click.Context:
    return click.Context(serve, token_normalize_func=with_dashes)


def _values_of(server_options: Sequence[str]) -> dict[str, object]:
    context = _context_of_server()
    values, _, _ = serve.make_parser(context).parse_args(args=list(server_options))
    return dict(values)


def server_arguments(
    machine: Machine, choices: Choices, model: str, *, from_file: Container[str] = (), flags: Container[str] = ()
) -> list[str]:
    """Flags of the server for one node of a slice, without its address. Values of a `--config` file (`from_file`) stay
    as they are there, except those that divide the slice."""
    arguments = ["--model-path", model]
    chosen = {
        "backend": "jax",
        "device": "tpu",
        "tp_size": str(choices.tp),
        **({"ep_size": str(choices.ep)} if choices.ep > 1 or "ep_size" in flags else {}),
        "page_size": str(choices.page_size),
        "mem_fraction_static": f"{choices.mem_fraction_static:g}",
    }
    for field, value in chosen.items():
        if field not in from_file:
            arguments += [flag_name(field), value]
    if choices.replicas > 1:
        arguments += ["--dp-size", str(choices.replicas // max(len(machine.nodes), 1))]
    return arguments + (node_arguments(machine) if choices.replicas == 1 else [])


def node_arguments(machine: Machine) -> list[str]:
    """Flags by which one of several nodes finds the others of one replica; none for a single node."""
    if len(machine.nodes) < 2:
        return []
    return [
        *("--nnodes", str(len(machine.nodes))),
        *("--node-rank", str(machine.worker)),
        *("--dist-init-addr", _with_port(machine.nodes[0], MEETING_PORT)),
    ]


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def listening_arguments(machine: Machine, choices: Choices, host: str | None, port: int | None) -> list[str]:
    """Flags for the address of a node, by `--host` and `--port`. With replicas on several nodes, each node has its own
    server; that of node 0 distributes requests to its own replicas and to the other servers. Raises `ConfigError` for
    an address or a port by which node 0 could not find the others."""
    if choices.replicas == 1 or len(machine.nodes) < 2:
        return [*([] if host is None else ["--host", host]), *([] if port is None else ["--port", str(port)])]
    number = _PORT if port is None else port
    if number == 0:
        raise ConfigError("--port 0 chooses a different port on each node, but node 0 must know it: give a port")
    if machine.worker == 0:
        others = ",".join(_with_port(address, number) for address in machine.nodes[1:])
        return [*([] if host is None else ["--host", host]), "--port", str(number), "--connect", f"local,{others}"]
    own = host or machine.nodes[machine.worker]
    if own != machine.nodes[machine.worker] and is_loopback(own):
        raise ConfigError(f"--host {own}: node 0 must reach this one; choose 0.0.0.0, or leave it out")
    return ["--host", own, "--port", str(number)]


def own_placement(machine: Machine, choices: Choices) -> Placement | None:
    """The environment that shows each of several nodes only its own chips, if there is one replica per node; several
    replicas per node do this themselves, and others do not need it."""
    nodes = len(machine.nodes)
    return separate_slice(machine.topology.chips // nodes) if nodes > 1 and choices.replicas == nodes else None


if __name__ == "__main__":
    sys.exit(run(launch, "python -m tpu.launch"))

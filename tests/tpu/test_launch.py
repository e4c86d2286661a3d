"""What `tpu.launch` detects and chooses, on simulated machines made of folders and tables."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
from click.testing import CliRunner
from helpers.echo_server import wait_for
from helpers.small_configs import small_config

import sglang_jax.server.serve
import tpu.launch
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint import ParameterReader
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.cli.main import run
from sglang_jax.cli.serve import serve
from sglang_jax.config import Dtype, LoadFormat, ServerConfig, Task, TpuEnvironment
from sglang_jax.errors import ConfigError
from sglang_jax.server.remote_replicas import read_addresses
from tpu.choices import WHOLE_EXPERTS, Choices, choose, weight_bytes
from tpu.launch import dtype_among, launch, listening_arguments, node_arguments, server_arguments
from tpu.machine import Machine, _nodes, detect_machine
from tpu.shapes import load_shape, stored_quantization
from tpu.topologies import parse_topology

V6E, V5E, TPU7X = "0x006f", "0x0063", "0x0076"


def pci_bus(folder: Path, device: str, count: int) -> Path:
    """A bus with `count` TPU chips, a Google network card and a disk."""
    others = [("0x1ae0", "0x0042"), ("0x8086", device)]
    for number, (vendor, kind) in enumerate([("0x1ae0", device)] * count + others):
        place = folder / f"0000:00:{number:02x}.0"
        place.mkdir()
        (place / "vendor").write_text(vendor + "\n")
        (place / "device").write_text(kind + "\n")
    return folder


def nothing(attribute: str) -> None:
    return None


NO_ENVIRONMENT = TpuEnvironment.model_construct(accelerator_type=None, topology=None, worker_id=0, worker_hostnames="")


@pytest.mark.parametrize(
    ("device", "count", "topology"),
    [(V6E, 1, "v6e:1x1"), (V6E, 4, "v6e:2x2"), (V6E, 8, "v6e:2x4"), (V5E, 4, "v5e:2x2"), (TPU7X, 4, "tpu7x:2x2x1")],
)
def test_a_single_node_has_the_chips_of_its_bus(tmp_path: Path, device: str, count: int, topology: str) -> None:
    machine = detect_machine(NO_ENVIRONMENT, nothing, pci_bus(tmp_path, device, count))
    assert machine == Machine(parse_topology(topology), 0, ())


def test_without_a_chip_no_machine_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no TPU chip on its PCI bus"):
        detect_machine(NO_ENVIRONMENT, nothing, pci_bus(tmp_path, V6E, 0))


def test_metadata_describes_a_node_of_several(tmp_path: Path) -> None:
    attributes = {
        "accelerator-type": "v6e-16",
        "agent-worker-number": "2",
        "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4",
    }
    machine = detect_machine(NO_ENVIRONMENT, attributes.get, pci_bus(tmp_path, V6E, 4))
    assert machine == Machine(parse_topology("v6e:4x4"), 2, ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"))


def test_the_environment_of_gke_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0.service,pod-1.service")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_TOPOLOGY", "2x4")
    machine = detect_machine(TpuEnvironment(), {"agent-worker-number": "7"}.get, pci_bus(tmp_path, V5E, 4))
    assert machine == Machine(parse_topology("v5e:2x4"), 1, ("pod-0.service", "pod-1.service"))


def test_a_slice_that_does_not_match_its_nodes_is_refused(tmp_path: Path) -> None:
    attributes = {"accelerator-type": "v6e-16", "worker-network-endpoints": "10.0.0.1,10.0.0.2"}
    with pytest.raises(ConfigError, match=r"v6e-16, with 16 v6e chips, but its nodes have 8 v6e chips"):
        detect_machine(NO_ENVIRONMENT, attributes.get, pci_bus(tmp_path, V6E, 4))


def machine_of(topology: str, nodes: int = 0, worker: int = 0) -> Machine:
    return Machine(parse_topology(topology), worker, tuple(f"10.0.0.{number}" for number in range(nodes)))


@pytest.mark.parametrize(
    ("topology", "heads", "tp"), [("v6e:2x2", 4, 4), ("v6e:2x4", 4, 4), ("tpu7x:2x2x1", 8, 8), ("v6e:2x4", 6, 2)]
)
def test_the_model_is_sharded_as_far_as_it_divides(topology: str, heads: int, tp: int) -> None:
    model = small_config(num_heads=heads, num_kv_heads=1, intermediate_size=96, vocab_size=96)
    assert choose(machine_of(topology), model).tp == tp


def test_requested_sizes_are_used() -> None:
    assert choose(machine_of("v6e:2x2"), small_config(), tp=2).tp == 2


def test_experts_are_divided_by_their_columns_as_far_as_these_divide() -> None:
    def mixture(columns: int, count: int) -> ModelConfig:
        experts = ExpertsConfig(num_experts=count, chosen=2, size=columns)
        model = replace(small_config(), architecture="qwen3_moe")
        return model.with_layers(lambda layer: replace(layer, feed_forward=experts))

    machine = machine_of("v6e:2x2")
    assert (choose(machine, mixture(96, 8)).tp, choose(machine, mixture(96, 8)).ep) == (4, 1)
    assert choose(machine, mixture(96, 8), ep=2).ep == 2
    assert choose(machine, mixture(96, 8), ep=WHOLE_EXPERTS).ep == 4
    whole = choose(machine, mixture(98, 8))  # columns for two devices
    assert (whole.tp, whole.ep) == (4, 2)
    assert "ep 2: the fewest parts of experts with which weights are small" in whole.reasons
    flags = server_arguments(machine, whole, "some/model")
    assert flags[flags.index("--ep-size") + 1] == "2"
    assert "--ep-size" not in server_arguments(machine, choose(machine, small_config()), "some/model")
    with pytest.raises(ConfigError, match="6 experts cannot be spread over 4 devices: choose an ep_size that divides"):
        choose(machine, mixture(96, 6), ep=4)
    with pytest.raises(ConfigError, match="--ep-size must divide the 4 devices of a replica, got 3"):
        choose(machine, mixture(96, 8), ep=3)
    with pytest.raises(ConfigError, match=r"--ep-size 2 needs a model with experts, got one of .* without any"):
        choose(machine, small_config(), ep=2)


def test_weights_are_counted_as_the_checkpoint_stores_them() -> None:
    """gpt-oss-120b in MXFP4: with parts of experts that cut groups, its weights would be widened."""
    config = load_shape("gpt-oss-120b")
    reader = ParameterReader(DummyReader(config, 0, stored_quantization("gpt-oss-120b")), config, None)
    encodings = {name: reader.encoding(name) for name in manifest_of(config).specs}.get
    found = choose(machine_of("v6e:2x2"), config, encodings=encodings)
    assert (found.tp, found.ep) == (4, 2)
    # In bfloat16, weights would fit here, with hardly any room for keys and values.
    assert choose(machine_of("v6e:2x4"), config, encodings=encodings).ep == 4
    with pytest.raises(ConfigError, match=r"54\.4 GiB of weights on each of 4 devices do not fit"):
        choose(machine_of("v6e:2x2"), config)


def test_weights_beyond_the_memory_are_refused() -> None:
    assert weight_bytes(load_shape("qwen3-32b")) == pytest.approx(65.5e9, rel=0.01)  # 32.8 billion parameters
    with pytest.raises(ConfigError, match=r"61\.0 GiB of weights on each of 1 devices do not fit in 28\.1 GiB"):
        choose(machine_of("v6e:1x1"), load_shape("qwen3-32b"))
    assert choose(machine_of("v6e:2x2"), load_shape("qwen3-32b")).tp == 4
    with pytest.raises(ConfigError, match=r"30\.5 GiB of weights on each of 4 devices do not fit in 28\.1 GiB"):
        choose(machine_of("v6e:2x2"), load_shape("qwen3-32b"), dtype=Dtype.FLOAT32)


@pytest.mark.parametrize(
    ("options", "file", "dtype"),
    [
        (["one", "--dtype", "float32"], {}, Dtype.FLOAT32),
        (["--dtype=bfloat16"], {"dtype": "float32"}, Dtype.BFLOAT16),
        ([], {"dtype": "float32"}, Dtype.FLOAT32),
        (["--page-size", "64"], {}, Dtype.AUTO),
    ],
)
def test_the_dtype_of_weights_is_the_servers(options: list[str], file: dict[str, object], dtype: Dtype) -> None:
    assert dtype_among(options, file) is dtype


def test_idle_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model can use 4"):
        choose(machine_of("v6e:4x4", nodes=4), small_config(vocab_size=96))


def test_every_node_gets_its_rank_and_the_coordinator() -> None:
    assert node_arguments(machine_of("v6e:2x2")) == []
    assert node_arguments(machine_of("v6e:4x4", nodes=4, worker=3)) == [
        *("--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "10.0.0.0:8482")
    ]


def test_the_server_takes_these_flags() -> None:
    arguments = server_arguments(machine_of("v6e:4x4", nodes=4, worker=3), Choices(16, 1, 64, 0.9, ()), "some/model")
    known = {name for parameter in serve.params for name in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_a_dry_run_prints_the_command_with_the_users_options_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu.launch, "detect_machine", lambda environment: machine_of("v6e:1x1"))
    result = CliRunner().invoke(launch, ["--dry-run", "--port", "31000", "--page-size", "128"], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert result.stdout.strip() == (
        "python -m sglang_jax.launch_server --model-path demo --backend jax --device tpu --tp-size 1 --page-size 64 "
        "--mem-fraction-static 0.9 --port 31000 --page-size 128"
    )
    assert "v6e:1x1 (1 chips, 1 devices)" in result.stderr


V6E_16 = machine_of("v6e:4x4", nodes=4)


@pytest.mark.parametrize(
    ("machine", "replicas", "tp"),
    [(V6E_16, 4, 4), (V6E_16, 8, 2), (machine_of("v6e:2x4"), 2, 4), (machine_of("tpu7x:2x2x1"), 4, 2)],
)
def test_replicas_divide_the_slice(machine: Machine, replicas: int, tp: int) -> None:
    assert choose(machine, small_config(), replicas=replicas) == Choices(
        tp, replicas, 64, 0.9, choose(machine, small_config(), replicas=replicas).reasons
    )


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        (V6E_16, {"replicas": 2}, "has 4 nodes, and each replica runs on one .* a multiple of 4, got 2"),
        (V6E_16, {"replicas": 12}, "16 devices of v6e:4x4 cannot be divided among 12 replicas"),
        (machine_of("v6e:2x2"), {"replicas": 3}, "4 devices of v6e:2x2 cannot be divided among 3 replicas"),
        (V6E_16, {"replicas": 4, "tp": 8}, "--tp-size 8 is more than the 4 devices of each of 4 replicas"),
        (
            machine_of("tpu7x:2x2x1"),
            {"replicas": 8},
            "each of 8 replicas on tpu7x:2x2x1 would have 1 of the 2 devices of a chip, .* at most 4, got 8",
        ),
        (V6E_16, {"tp": 4}, "choose a smaller slice, or --dp-size 4, one replica per node"),
    ],
)
def test_slices_that_replicas_do_not_divide_are_refused(machine: Machine, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(machine, small_config(), **options)


def test_weights_that_fit_no_replica_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"30\.5 GiB of weights on each of 2 devices .* fewer replicas with --dp-size"
    ):
        choose(V6E_16, load_shape("qwen3-32b"), replicas=8)


def dry_run(monkeypatch: pytest.MonkeyPatch, machine: Machine, *options: str) -> list[str]:
    """The command's words for one node."""
    monkeypatch.setattr(tpu.launch, "detect_machine", lambda environment: machine)
    result = CliRunner().invoke(launch, ["--dry-run", *options], standalone_mode=False, catch_exceptions=False)
    assert result.return_value == 0, result.output
    return shlex.split(result.stdout)


@pytest.mark.parametrize("worker", range(4))
def test_the_same_command_starts_a_replica_on_each_node_and_node_0_finds_them(
    monkeypatch: pytest.MonkeyPatch, worker: int
) -> None:
    command = dry_run(monkeypatch, replace(V6E_16, worker=worker), "--dp-size", "4", "--tp-size", "1")
    begin = command.index("python")
    visible = dict(word.split("=") for word in command[:begin])
    assert (visible["TPU_VISIBLE_CHIPS"], visible["TPU_PROCESS_BOUNDS"]) == ("0,1,2,3", "1,1,1")
    assert (visible["TPU_WORKER_ID"], visible["TPU_WORKER_HOSTNAMES"]) == ("0", "localhost")
    config = config_of(monkeypatch, command[begin + 3 :])
    assert (config.nnodes, config.dp_size, config.port) == (1, 1, 30000)
    if worker:
        assert (config.host, config.connect) == (f"10.0.0.{worker}", None)
    else:
        assert config.connect is not None
        assert read_addresses(config.connect) == (["10.0.0.1:30000", "10.0.0.2:30000", "10.0.0.3:30000"], True)
        assert config.host == "127.0.0.1"


def model_tp_and_replicas(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[str, int | None, int]:
    """The tensor-parallel size and number of replicas of the plan."""
    opened: list[str] = []
    asked: list[dict[str, int]] = []

    def open_one(model: str, load_format: LoadFormat, task: Task) -> OpenedConfig:
        opened.append(model)
        return OpenedConfig(small_config())

    def choose_for(machine: Machine, model: ModelConfig, **wanted: int) -> Choices:
        asked.append(wanted)
        return choose(machine, model, **wanted)

    monkeypatch.setattr(tpu.launch, "open_checkpoint", open_one)
    monkeypatch.setattr(tpu.launch, "choose", choose_for)
    config = config_of(monkeypatch, dry_run(monkeypatch, machine_of("v6e:2x2"), *options)[3:])
    assert config.model_path == opened[0]
    assert config.tp_size * config.dp_size <= 4
    return opened[0], asked[0]["tp"], asked[0]["replicas"]


@dataclass(frozen=True)
class OpenedConfig:
    config: ModelConfig
    reader: None = None


@pytest.mark.parametrize(
    "words",
    [
        ["--model-path", "some/model"],
        ["--model", "some/model"],
        ["--model=some/model"],
        ["some/model"],
        ["some/model", "--page-size", "128"],
        ["--page-size", "128", "--served-model-name", "x", "some/model", "--port", "1"],
        ["some/model", "--served-model-name", "x", "y", "--port", "1"],
        ["some/model", "--model-path", "some/model"],
    ],
)
def test_the_slice_is_divided_for_the_model_that_is_served(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert model_tp_and_replicas(monkeypatch, *words)[0] == "some/model"


@pytest.mark.parametrize("flag", ["--tp-size", "--tp", "-tp", "--tensor-parallel-size"])
def test_a_tp_size_by_any_name_is_planned_for(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    assert model_tp_and_replicas(monkeypatch, flag, "1") == ("demo", 1, 1)


@pytest.mark.parametrize("flag", ["--dp-size", "--dp", "-dp", "--data-parallel-size"])
def test_replicas_by_any_name_are_planned_for(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    assert model_tp_and_replicas(monkeypatch, flag, "2", "--tp-size", "1") == ("demo", 1, 2)


def test_a_file_of_options_is_planned_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: some/model\ntp: 1\ndata-parallel-size: 4\npage-size: 128\nport: 31000\n")
    given = ["--config", str(file)]
    assert model_tp_and_replicas(monkeypatch, *given) == ("some/model", 1, 4)
    assert model_tp_and_replicas(monkeypatch, *given, "other/model", "--dp", "2") == ("other/model", 1, 2)
    monkeypatch.setattr(tpu.launch, "open_checkpoint", lambda model, load_format, task: OpenedConfig(small_config()))
    command = dry_run(monkeypatch, V6E_16, *given)
    config = config_of(monkeypatch, command[command.index("python") + 3 :])
    assert (config.page_size, config.port, config.dp_size, config.mem_fraction_static) == (128, 31000, 1, 0.9)


def test_two_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError, match="two models are given: one and --model-path two"):
        dry_run(monkeypatch, machine_of("v6e:1x1"), "one", "--model", "two")


def test_an_unknown_option_is_refused_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu.launch, "open_checkpoint", None)
    assert run(launch, "launch", ["--page-sze", "128"]) == 2
    assert capsys.readouterr().err == "Error: No such option '--page-sze'. Did you mean '--page-size'?\n"


def config_of(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> ServerConfig:
    """The config as the server would read it."""
    seen: list[ServerConfig] = []
    monkeypatch.setattr(sglang_jax.server.serve, "run", lambda config, **_: seen.append(config) or 0)
    serve.main(arguments, standalone_mode=False)
    return seen[0]


def test_several_replicas_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's server gives each replica its chips."""
    command = dry_run(
        monkeypatch, V6E_16, "--dp-size", "8", "--port", "31000", "--host", "0.0.0.0", "--log-level", "debug"
    )
    assert command[0] == "python"
    config = config_of(monkeypatch, command[3:])
    assert (config.dp_size, config.tp_size, config.host) == (2, 1, "0.0.0.0")
    assert config.connect == "local,10.0.0.1:31000,10.0.0.2:31000,10.0.0.3:31000"
    assert config.log_level.value == "debug"


@pytest.mark.parametrize(
    ("worker", "options", "words"),
    [(1, ["--host", "localhost"], "node 0 must reach this one; choose 0.0.0.0"), (0, ["--port", "0"], "give a port")],
)
def test_nodes_without_addresses_for_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, worker: int, options: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        dry_run(monkeypatch, replace(V6E_16, worker=worker), "--dp-size", "4", "--tp-size", "1", *options)


def test_the_server_is_started_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(tpu.launch, "detect_machine", lambda environment: machine_of("v6e:1x1"))
    monkeypatch.setattr(tpu.launch, "run", lambda command, program, arguments: started.append(arguments) or 7)
    result = CliRunner().invoke(launch, ["--port", "31000"], standalone_mode=False)
    assert result.return_value == 7
    assert started[0][-2:] == ["--port", "31000"]


HOST = """
import sys
sys.path.insert(0, {root!r})
import tpu.launch
from sglang_jax.cli.main import run
from tpu.machine import Machine
from tpu.topologies import parse_topology

if __name__ == "__main__":
    machine = Machine(parse_topology("v6e:2x4"), int(sys.argv[1]), ("127.0.0.1", "127.0.0.2"))
    tpu.launch.detect_machine = lambda environment: machine
    sys.exit(run(tpu.launch.launch, "tpu.launch", sys.argv[2:]))
"""
"""A node of a slice of two, which are addresses of this machine."""

OPTIONS = [
    *("--dp-size", "2", "--tp-size", "1", "--device", "cpu", "--skip-warmup", "--load-balance-method", "round_robin"),
    *("--max-running-requests", "1", "--context-length", "256", "--max-total-tokens", "512", "--page-size", "16"),
]


@pytest.mark.soak
def test_two_nodes_share_requests_until_one_is_killed(tmp_path: Path) -> None:
    """The same command on both, on the CPU."""
    program = tmp_path / "node.py"
    program.write_text(HOST.format(root=str(Path(__file__).parents[2])))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    commands = [[sys.executable, str(program), str(worker), "--port", port, *OPTIONS] for worker in range(2)]
    nodes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:

            def loads() -> list[dict[str, Any]]:
                try:
                    return http.get("/v1/loads").json()["loads"]
                except httpx2.TransportError:
                    return []

            def ask() -> str:
                body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
                return http.post("/generate", json=body).json()["text"]

            wait_for(lambda: [load["state"] for load in loads()] == ["serving"] * 2, 300)
            assert len({ask() for _ in range(4)}) == 1
            assert [load["num_used_tokens"] > 0 or load["gen_throughput"] > 0 for load in loads()] == [True, True]
            nodes[1].kill()
            wait_for(lambda: loads()[1]["state"] != "serving", 30)
            assert {ask() for _ in range(2)} == {ask()}
            nodes[0].terminate()
            assert nodes[0].wait(60) == 0
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.parametrize(
    ("listed", "nodes"),
    [
        ("a:0:10.0.0.1, b:1:10.0.0.2", ("10.0.0.1", "10.0.0.2")),
        ("t1k-0.group,t1k-1.group", ("t1k-0.group", "t1k-1.group")),
        ("fd00::1:2, [fd00::1:3]", ("fd00::1:2", "fd00::1:3")),
        ("unknown:8470:fd00::1:2,unknown:8470:fd00::1:3", ("fd00::1:2", "fd00::1:3")),
    ],
)
def test_nodes_are_names_or_addresses(listed: str, nodes: tuple[str, ...]) -> None:
    assert _nodes(listed) == nodes


def test_an_ipv6_address_is_in_brackets_before_a_port() -> None:
    machine = Machine(parse_topology("v6e:4x2"), 0, ("fd00::1", "fd00::2"))
    assert node_arguments(machine)[-1] == "[fd00::1]:8482"
    choices = Choices(4, 2, 64, 0.9, ())
    assert listening_arguments(machine, choices, None, 30000)[-1] == "local,[fd00::2]:30000"

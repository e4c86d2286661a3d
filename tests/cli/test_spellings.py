"""Options of other engines: other names of ours are accepted, the rest is explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from migration_tables import PAGE, TABLES, written

import sglang_jax
import tpu.check
from sglang_jax import Engine, SamplingParams, about
from sglang_jax.cli.bench.commands import LoadConfig
from sglang_jax.cli.bench.workloads import WorkloadConfig
from sglang_jax.cli.main import cli, run, with_dashes
from sglang_jax.cli.options import flag_name, options_of
from sglang_jax.cli.serve import serve
from sglang_jax.config import (
    AttentionBackend,
    Choice,
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LogLevel,
    ServerConfig,
)
from sglang_jax.engine.items import complete_sampling
from sglang_jax.errors import ConfigError, ParameterError
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.spellings import (
    ALIASES,
    BENCHMARK_REFUSED,
    NEEDLESS,
    NEEDLESS_VARIABLES,
    REFUSED,
    REFUSED_FAMILIES,
    REFUSED_VALUES,
    SAMPLING_ELSEWHERE,
    SAMPLING_FIELDS,
    SHORT_FLAGS,
    VALUES,
    VARIABLES,
)
from sglang_jax.spellings import refusal as reason
from tpu.figures import Request

OTHER_NAMES = [(alias, field) for field, aliases in ALIASES.items() for alias in aliases]
VALUE_OF = {
    "model_path": "some/model",
    "tokenizer_path": "some/tokenizer",
    "schedule_policy": "priority",
    "tp_size": 4,
    "ep_size": 2,
    "enable_expert_parallel": True,
    "enable_dp_attention": True,
    "dp_size": 2,
    "context_length": 777,
    "max_running_requests": 9,
    "chunked_prefill_size": 64,
    "page_size": 32,
    "random_seed": 42,
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "skip_warmup": True,
    "mamba_ssm_dtype": "bfloat16",
    "speculative_num_draft_tokens": 3,
    "otlp_traces_endpoint": "http://localhost:4318",
}


def parse(*arguments: str) -> ServerConfig:
    built: list[ServerConfig] = []

    @click.command()
    @options_of(config=ServerConfig)
    def command(config: ServerConfig) -> None:
        built.append(config)

    command.main(list(arguments), standalone_mode=False, token_normalize_func=with_dashes)
    return built[0]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(serve, "serve", arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("alias", "field"), OTHER_NAMES)
def test_another_name_sets_the_field(alias: str, field: str, tmp_path: Path) -> None:
    value = VALUE_OF[field]
    further = {"tp_size": 2} if field == "ep_size" else {}
    expected = ServerConfig(**{field: value, **further})
    for flag in (flag_name(alias), "--" + alias):
        flags = [flag] if value is True else [flag, str(value)]
        assert parse(*flags, *(["--tp-size", "2"] if further else [])) == expected
    file = tmp_path / "options.json"
    file.write_text(json.dumps({alias: value, **further}))
    assert parse("--config", str(file)) == expected


@pytest.mark.parametrize(
    ("field", "flag"), [each for each in SHORT_FLAGS.items() if each[0] in ServerConfig.model_fields]
)
def test_short_flags_set_their_fields(field: str, flag: str) -> None:
    word = "int8" if field == "quantization" else "2"
    assert parse(flag, word) == ServerConfig(**{field: word})


def test_no_name_has_two_meanings() -> None:
    names = [
        *ServerConfig.model_fields,
        *(alias for alias, _ in OTHER_NAMES),
        *NEEDLESS,
        *REFUSED,
    ]
    assert len(names) == len(set(names))
    assert not [(start, name) for start in REFUSED_FAMILIES for name in names if name.startswith(start)]
    assert set(ALIASES) <= set(ServerConfig.model_fields)
    assert set(SAMPLING_FIELDS.values()) <= set(SamplingParams.__dataclass_fields__)
    assert not set(SAMPLING_FIELDS) & set(SamplingParams.__dataclass_fields__)


def test_every_published_option_is_accepted_or_explained() -> None:
    """`published_options.txt`: options in published commands and printed configurations of other engines."""
    flags = Path(__file__).with_name("published_options.txt").read_text().split()
    names = {flag.strip("-").replace("-", "_") for flag in flags}
    assert not {name for name in names - NEEDLESS.keys() - ServerConfig.model_fields.keys() if reason(name) is None}


def test_a_family_is_refused_by_flag_file_and_keyword(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = f"is {REFUSED_FAMILIES['kt_'].note}"
    assert refusal(capsys, "model", "--kt_method", "x", "--tp", "2") == f"Error: --kt-method {told}\n"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"kt-method": "x"}))
    assert refusal(capsys, "--config", str(file)) == f"Error: --config {file}: kt_method {told}\n"
    with pytest.raises(ConfigError, match=f"^kt_method {told}$"):
        Engine(kt_method="x")
    assert run(cli, "x", ["bench", "serving", "--kt-method", "x"]) == 2
    assert capsys.readouterr().err == "Error: No such option '--kt-method'.\n"


@pytest.mark.parametrize(
    ("variables", "fields", "noted"),
    [
        ({"SGLANG_DEBUG_MEMORY_POOL": "1"}, {"debug_memory": True}, 1),
        ({"SGLANG_DEBUG_MEMORY_POOL": "1", "SGLANG_JAX_DEBUG_MEMORY": "0"}, {"debug_memory": False}, 1),
        ({"SGLANG_TEST_RETRACT": "true"}, {"test_retract": 3}, 1),
        ({"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}, {"test_retract": 7}, 2),
        ({"SGLANG_TEST_RETRACT": "0", "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "4"}, {"test_retract": None}, 1),
    ],
)
def test_variables_of_other_engines_are_read_or_noted(
    variables: dict[str, str],
    fields: dict[str, object],
    noted: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_JAX_DEBUG_MEMORY")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = parse().model_dump()
    assert {field: found[field] for field in fields} == fields
    assert parse("--test-retract", "9").test_retract == 9
    lines = capsys.readouterr().err.splitlines()[:noted]
    known = [f"{name} is the same as {what}" for name, what in VARIABLES.items()]
    known += [f"{name} has no effect: {note}" for name, note in NEEDLESS_VARIABLES.items()]
    assert len(lines) == noted
    assert set(lines) <= set(known)
    with pytest.warns(UserWarning, match=r"^SGLANG_") as warned, pytest.raises(ConfigError):
        Engine(zzz=1)
    assert [str(warning.message) for warning in warned] == lines
    assert {warning.filename for warning in warned} == {__file__}
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "0")
    assert "SGLANG_TEST_RETRACT_INTERVAL: Input should be greater than or equal to 1, got '0'" in refusal(capsys)


def test_every_flag_that_an_explanation_names_exists() -> None:
    values = [note for refused in REFUSED_VALUES.values() for note in refused.values()]
    for note in (
        *(other.note for other in (*NEEDLESS.values(), *REFUSED.values(), *REFUSED_FAMILIES.values())),
        *values,
    ):
        for flag in re.findall(r"--([a-z-]+)", note):
            assert flag.replace("-", "_") in ServerConfig.model_fields, note


@pytest.mark.parametrize("name", REFUSED)
def test_unimplemented_options_say_so_by_flag_file_and_keyword(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    value = ["x"] if REFUSED[name].takes_value else []
    message = refusal(capsys, flag_name(name), *value)
    assert message == f"Error: {flag_name(name)} is {REFUSED[name].note}\n"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({name: "x"}))
    assert REFUSED[name].note in refusal(capsys, "--config", str(file))
    with pytest.raises(ConfigError, match=f"{name} is "):
        Engine(**{name: "x"})


@pytest.mark.parametrize("name", NEEDLESS)
def test_options_for_the_fixed_behaviour_are_accepted_with_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    value = ["auto"] if NEEDLESS[name].takes_value else []
    assert parse(flag_name(name), *value) == ServerConfig()
    assert capsys.readouterr().err == f"{flag_name(name)} has no effect: {NEEDLESS[name].note}\n"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({name: "auto"}))
    assert parse("--config", str(file)) == ServerConfig()
    assert capsys.readouterr().err == f"--config {file}: {name} has no effect: {NEEDLESS[name].note}\n"


@pytest.mark.parametrize(
    ("enum", "spelling", "value"),
    [
        (Dtype, "half", Dtype.FLOAT16),
        (Dtype, "BF16", Dtype.BFLOAT16),
        (KVCacheDtype, "fp8", KVCacheDtype.FLOAT8_E4M3),
        (Device, "gpu", Device.CUDA),
        (LogLevel, "INFO", LogLevel.INFO),
        (AttentionBackend, "torch-native", AttentionBackend.NATIVE),
        (AttentionBackend, "sage_attn", AttentionBackend.SAGE),
    ],
)
def test_values_may_have_other_spellings(enum: type[Choice], spelling: str, value: Choice) -> None:
    assert enum(spelling) is value
    fields = {name for name, field in ServerConfig.model_fields.items() if field.annotation is enum}
    for field in fields:
        assert parse(flag_name(field), spelling) == ServerConfig(**{field: spelling}) == ServerConfig(**{field: value})


def test_every_other_spelling_means_an_existing_value() -> None:
    enums = {enum.__name__: enum for enum in Choice.__subclasses__()}
    for enum, spellings in VALUES.items():
        for spelling, value in spellings.items():
            assert enums[enum](spelling).value.replace("-", "_") == value


def test_a_model_may_be_given_without_a_flag_but_not_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("sglang_jax.server.serve.run", lambda config, **_: served.append(config) or 0)
    assert run(serve, "serve", ["some/model", "--port", "1"]) == 0
    assert run(serve, "serve", ["same", "--model", "same"]) == 0
    assert served == [ServerConfig(model_path="some/model", port=1), ServerConfig(model_path="same")]
    message = refusal(capsys, "one", "--model", "two")
    assert message == "Error: two models are given: one and --model-path two\n"


def test_a_misspelt_flag_does_not_suggest_an_unimplemented_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--tp-sze", "2") == "Error: No such option '--tp-sze'. Did you mean '--tp-size'?\n"
    assert "Invalid value for '--tp-size'" in refusal(capsys, "--tensor_parallel_size", "two")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--enable-prefix-cachin", "--enable-prefix-caching"),
        ("--enable_metric", "--enable-metrics"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--max-lora", "--max-loras"),
        ("--dist-backends", "--dist-backend"),
    ],
)
def test_a_misspelt_flag_of_another_engine_gets_its_explanation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, nearest: str
) -> None:
    name = nearest.strip("-").replace("-", "_")
    became = f"has no effect: {NEEDLESS[name].note}" if name in NEEDLESS else f"is {REFUSED[name].note}"
    message = refusal(capsys, flag, "2")
    assert message == f"Error: No such option '{flag.replace('_', '-')}'. Did you mean '{nearest}'? That {became}\n"
    field = flag.strip("-").replace("-", "_")
    with pytest.raises(ConfigError) as caught:
        Engine(**{field: 2})
    assert str(caught.value) == f"there is no option {field!r}; did you mean {name}? That {became}"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({field: 2}))
    assert refusal(capsys, "--config", str(file)).endswith(
        f"has an unknown option {field!r}; did you mean {name}? That {became}\n"
    )


@pytest.mark.parametrize("flag", ["--enable-radix-cache", "--radix-cache", "--no-disable-radix-cache", "--cuda-graph"])
def test_the_opposite_is_never_suggested(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "disable" not in refusal(capsys, flag).partition("Did you mean")[2]
    with pytest.raises(ConfigError) as caught:
        Engine(**{flag.strip("-").replace("-", "_"): True})
    assert "disable" not in str(caught.value).partition("did you mean")[2]


def test_a_command_without_an_engine_does_not_explain_engine_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "x", ["bench", "serving", "--enable-metric"]) == 2
    assert capsys.readouterr().err == "Error: No such option '--enable-metric'.\n"


REFUSED_OF_SERVERS = [
    (field, value, note)
    for field, info in ServerConfig.model_fields.items()
    if isinstance(info.annotation, type)
    for value, note in REFUSED_VALUES.get(info.annotation.__name__, {}).items()
]


@pytest.mark.parametrize(("field", "value", "note"), REFUSED_OF_SERVERS)
def test_an_unimplemented_value_says_so_before_the_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str, value: str, note: str
) -> None:
    kind = ServerConfig.model_fields[field].annotation
    assert kind is not None
    spelling = value.upper().replace("_", "-")
    known = [member.value for member in kind]
    message = refusal(capsys, flag_name(field), spelling)
    assert message == f"Error: {flag_name(field)} {spelling} is {note}; choose from {', '.join(known)}\n"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({field: spelling}))
    assert f"{field} in {file}: {spelling} is {note}; must be '{known[0]}'" in refusal(capsys, "--config", str(file))
    if field in EngineConfig.model_fields:
        with pytest.raises(ConfigError) as caught:
            Engine(**{field: spelling})
        assert str(caught.value).startswith(f"{field} {spelling} is {note}; input should be '{known[0]}'")


def test_values_with_an_explanation_are_not_accepted_values() -> None:
    enums = {enum.__name__: enum for enum in Choice.__subclasses__()}
    for name, refused in REFUSED_VALUES.items():
        for value in refused:
            with pytest.raises(ValueError, match="is not a valid"):
                enums[name](value)


def test_a_benchmark_explains_values_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "x", ["bench", "serving", "--backend", "tgi"]) == 2
    note = REFUSED_VALUES["Api"]["tgi"]
    assert capsys.readouterr().err == f"Error: --backend tgi is {note}; choose from sglang, openai, openai-chat\n"


def test_vaguely_similar_names_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--gc-threshold", "--show-cost", "--numa"):
        assert refusal(capsys, flag, "2") == f"Error: No such option '{flag}'.\n"
    for flag, near in (("--prot", "--port"), ("--log-lvl", "--log-level"), ("--context-len", "--context-length")):
        assert f"Did you mean '{near}'?" in refusal(capsys, flag, "2")


@pytest.mark.parametrize("flag", ["--max-tokens", "--max_new_tokens", "--temperature", "--top-p"])
def test_a_sampling_field_does_not_suggest_a_similar_flag(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    message = refusal(capsys, flag, "5")
    assert message.endswith(" is a sampling parameter: set it in requests, or pass it to generate or chat\n")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("tp_size 3 needs 3 devices; found 1 (cpu)", "--tp-size 3 needs 3 devices; found 1 (cpu)"),
        ("choose a tp_size that divides the heads", "choose a --tp-size that divides the heads"),
        ("give group_secret_file, or api_key.", "give --group-secret-file, or --api-key."),
        ("/x/tp_size/api_key is not a file; device memory", "/x/tp_size/api_key is not a file; device memory"),
        ("Engine(model_path='demo')", "Engine(model_path='demo')"),
        ("--tp-size; SGLANG_JAX_api_key; my_tp_size", "--tp-size; SGLANG_JAX_api_key; my_tp_size"),
    ],
)
def test_errors_name_flags_if_flags_were_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, message: str, told: str
) -> None:
    def refuse(config: ServerConfig, **_: object) -> int:
        raise ConfigError(message)

    monkeypatch.setattr("sglang_jax.server.serve.run", refuse)
    assert refusal(capsys) == f"Error: {told}\n"


def test_commands_accept_options_of_other_engines(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        assert run(cli, "x", [command, "--max-tokens", "-1", *(["hi"] if command == "generate" else [])]) == 2
        assert "max_new_tokens must be an integer" in capsys.readouterr().err
    arguments = ["--dataset-name", "random", "--backend", "vllm", "--base-url", "http://127.0.0.1:9"]
    assert run(cli, "x", ["bench", "serving", *arguments]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_check_is_the_check_for_tpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "x", ["check", "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Usage: sglang-jax check [OPTIONS]")
    assert "--topology" in told
    for model in (["--model", "demo"], ["--model-path", "demo"], ["demo"]):
        assert run(cli, "x", ["check", *model]) == 2
        assert capsys.readouterr().err == "Error: Missing option '--topology'.\n"
    assert run(cli, "x", ["check", "--topology", "v6e-1"]) == 2
    assert "Error: no model is given: name one" in capsys.readouterr().err
    assert run(cli, "x", ["check", "--topology", "v6e-1", "one", "--model", "two"]) == 2
    assert capsys.readouterr().err == "Error: two models are given: one and --model-path two\n"


def test_a_check_that_is_not_installed_is_an_error_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an environment that was installed before the command was an entry point."""
    monkeypatch.setattr(about, "COMMANDS", "sglang_jax.none")
    assert run(cli, "x", ["check", "demo"]) == 2
    told = "the command check is not installed: run `pip install -e .` in the clone again"
    assert capsys.readouterr().err == f"Error: {told}\n"


@pytest.mark.parametrize(
    "flags",
    [["--tp", "2"], ["-tp", "2"], ["--tensor-parallel-size", "2"], ["--max-model-len", "64"], ["--block-size", "8"]],
)
def test_check_knows_other_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def refuse(request: Request) -> list[object]:
        asked.append(request.options)
        return []

    asked: list[EngineConfig] = []
    monkeypatch.setattr(tpu.check, "require_compiler", lambda: None)
    monkeypatch.setattr(tpu.check, "compile_in_child", refuse)
    assert run(cli, "x", ["check", "qwen3-8b", "--topology", "v6e-4", *flags]) == 2
    assert capsys.readouterr().err == "Error: the compiling process ended without a result\n"
    fields = {**dict(OTHER_NAMES), "tp_size": "tp_size"}
    field = fields[flags[0].strip("-").replace("-", "_")]
    assert (asked[0].model_path, getattr(asked[0], field)) == ("qwen3-8b", int(flags[1]))


@pytest.mark.parametrize(
    ("command", "needed", "called"),
    [
        (["batch"], ["--input", "i", "--output", "o"], "sglang_jax.batch.run.run_batch"),
        (["bench", "offline"], [], "sglang_jax.cli.bench.commands.start_engine"),
        (["bench", "accuracy"], ["--task", "t"], "sglang_jax.cli.bench.accuracy.start_engine"),
    ],
)
def test_commands_take_a_model_without_a_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    needed: list[str],
    called: str,
) -> None:
    def start(*configs: EngineConfig) -> int:
        raise ConfigError(f"started {configs[-1].model_path}")

    monkeypatch.setattr(called, start)
    monkeypatch.setattr("sglang_jax.cli.bench.accuracy.read_task", lambda path: [])
    for model in (["some/model"], ["--model", "some/model"], ["some/model", "--model-path", "some/model"]):
        assert run(cli, "x", [*command, *needed, *model]) == 2
        assert capsys.readouterr().err == "Error: started some/model\n"
    assert run(cli, "x", [*command, *needed, "one", "--model", "two"]) == 2
    assert capsys.readouterr().err == "Error: two models are given: one and --model-path two\n"


def test_bench_serving_accepts_options_of_other_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def measure(load: LoadConfig, workload: WorkloadConfig, pairs: object) -> None:
        raise ConfigError(f"{load.backend} {load.output_file} {workload.random_input_len} {workload.random_output_len}")

    monkeypatch.setattr("sglang_jax.cli.bench.commands._measure", measure)
    for endpoint, api in (
        ("/v1/completions", "openai"),
        ("/v1/chat/completions", "openai-chat"),
        ("/generate", "sglang"),
    ):
        for lengths in (["--input-len", "3", "--output-len", "4"], ["--random-input", "3", "--random-output", "4"]):
            words = ["--endpoint", endpoint, "--result-filename", "f", *lengths]
            assert run(cli, "x", ["bench", "serving", *words]) == 2
            assert capsys.readouterr().err == f"Error: {api} f 3 4\n"
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"endpoint": "/v1/completions", "input_len": 3}))
    assert run(cli, "x", ["bench", "serving", "--config", str(file)]) == 2
    assert capsys.readouterr().err == "Error: openai None 3 64\n"


@pytest.mark.parametrize("name", BENCHMARK_REFUSED)
def test_options_of_other_benchmarks_are_explained(capsys: pytest.CaptureFixture[str], name: str) -> None:
    value = ["x"] if BENCHMARK_REFUSED[name].takes_value else []
    assert run(cli, "x", ["bench", "serving", flag_name(name), *value]) == 2
    assert capsys.readouterr().err == f"Error: {flag_name(name)} is {BENCHMARK_REFUSED[name].note}\n"
    for flag in re.findall(r"--([a-z-]+)", BENCHMARK_REFUSED[name].note):
        assert flag.replace("-", "_") in LoadConfig.model_fields
    assert run(cli, "x", ["--help"]) == 0
    assert "check " in capsys.readouterr().out


def test_engine_keywords_have_other_names_too() -> None:
    async def no_launch(config: EngineConfig) -> object:
        raise ConfigError(f"{config.model_path} {config.tp_size}")

    with pytest.raises(ConfigError, match=r"^some/model 4$"):
        Engine(model="some/model", tensor_parallel_size=4, launch=no_launch)
    with pytest.raises(ConfigError, match="tp_size is given twice, once as tp"):
        Engine(tp_size=1, tp=2)
    with pytest.raises(ConfigError, match="there is no option 'page_sise'; did you mean page_size"):
        Engine(page_sise=1)
    with (
        pytest.warns(UserWarning, match="^enable_metrics has no effect: /metrics is always on$") as warned,
        pytest.raises(ConfigError, match=r"^some/model 1$"),
    ):
        Engine(model="some/model", enable_metrics=True, launch=no_launch)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(("name", "ours"), SAMPLING_FIELDS.items())
def test_sampling_fields_of_other_engines_name_ours(name: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams has no field '{name}': it is called {ours} here"):
        SamplingParams(**{name: 1})
    with pytest.raises(ParameterError, match=f"sampling_params has no field '{name}': it is called {ours} here"):
        complete_sampling({name: 1}, GenerationDefaults())


@pytest.mark.parametrize(("name", "instead"), SAMPLING_ELSEWHERE.items())
def test_fields_that_belong_elsewhere_name_the_place(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams has no field '{name}': it is ") as caught:
        SamplingParams(**{name: 1})
    assert instead in str(caught.value)
    if made := re.search(r"\w+_grammar", instead):
        assert made[0] in sglang_jax.__all__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3}, r"^max_tokens is a sampling parameter, .*SamplingParams\(max_new_tokens=\.\.\.\)\)$"),
        ({"temperature": 3}, r"^temperature is a sampling parameter"),
        ({"port": 3}, "^port is a server option, and Engine starts no server$"),
        ({"page_size": 12}, "^page_size must be a power of two, got 12$"),
        ({"tp_size": 4, "ep_size": 3}, "^ep_size must divide tp_size, 4, got 3$"),
        (
            {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
            "^with enable_dp_attention, dp_size must be 1 or tp_size, 4, got 2: each device of tp_size is one rank$",
        ),
        (
            {"tp_size": 4, "ep_size": 2, "enable_expert_parallel": True},
            "^enable_expert_parallel sets ep_size to tp_size, 4, and ep_size is 2: remove one of the two$",
        ),
        (
            {"tp_size": 2, "enable_ep_moe": True, "deterministic": "tp"},
            "^ep_size 2 changes the order of sums over experts, which deterministic tp excludes: ",
        ),
        ({"tp_size": "two"}, "^tp_size: input should be a valid integer, .*, got 'two'$"),
        ({"zzz": 1}, "^there is no option 'zzz'$"),
    ],
)
def test_wrong_keywords_of_an_engine_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(**options)


def test_the_model_may_be_positional() -> None:
    with pytest.raises(ConfigError, match=r"^pass the model by keyword: Engine\(model_path='demo'\)$"):
        Engine("demo")  # type: ignore[arg-type]


def test_an_unknown_sampling_field_lists_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no field 'temprature'; there are .*temperature"):
        SamplingParams(temprature=1)


def test_the_migration_page_has_these_tables() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "run python tests/migration_tables.py"
    rows = [row for rows in TABLES.values() for row in rows()]
    listed = " ".join(cell for row in rows for cell in row)
    names = [*NEEDLESS, *REFUSED, *BENCHMARK_REFUSED, *(alias for alias, _ in OTHER_NAMES)]
    names += [f"{start}*" for start in REFUSED_FAMILIES]
    assert all(f"`{flag_name(name)}`" in listed for name in names)
    values = [value for table in (VALUES, REFUSED_VALUES) for enum in table.values() for value in enum]
    assert all(f"`{value}`" in listed for value in (*values, *SAMPLING_FIELDS, *SAMPLING_ELSEWHERE))


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["complete"], ["generate"]),
        (["launch_server"], ["serve"]),
        (["run-batch"], ["batch"]),
        (["bench", "serve"], ["bench", "serving"]),
        (["bench", "throughput"], ["bench", "offline"]),
    ],
)
def test_commands_have_other_names(capsys: pytest.CaptureFixture[str], words: list[str], command: list[str]) -> None:
    assert run(cli, "sglang-jax", [*words, "--help"]) == 0
    told = capsys.readouterr().out.partition("\n")[2]
    assert run(cli, "sglang-jax", [*command, "--help"]) == 0
    assert told == capsys.readouterr().out.partition("\n")[2]


def test_bench_serve_does_not_start_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "sglang-jax", ["serving", "--help"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "name"), [(["-O3"], "--compilation-config"), (["-pp", "2"], "--pp")])
def test_short_flags_of_other_engines_are_explained(
    capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    assert refusal(capsys, *words) == f"Error: {name} is {REFUSED[name.strip('-').replace('-', '_')].note}\n"


def test_a_limit_says_the_required_range(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--chunked-prefill-size", "-1")
    assert message == "Error: --chunked-prefill-size must be greater than or equal to 1, got -1\n"


@pytest.mark.parametrize("command", [[], *([name] for name in cli.commands), ["bench", "offline"]])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: list[str], flag: str) -> None:
    assert run(cli, "sglang-jax", [*command, flag]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['sglang-jax', *command])} ")


@pytest.mark.parametrize("command", cli.commands.values(), ids=list(cli.commands))
def test_h_is_help_however_a_command_is_called(command: click.Command) -> None:
    assert CliRunner().invoke(command, ["-h"]).exit_code == 0


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "sglang-jax", ["-h"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_a_misspelt_config_key_is_corrected_in_its_own_style(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, right in (("modle-path", "model-path"), ("modle_path", "model_path")):
        (tmp_path / "config.yaml").write_text(f"{wrong}: demo\n")
        message = refusal(capsys, "--config", str(tmp_path / "config.yaml"))
        assert message.endswith(f"has an unknown option {wrong!r}; did you mean {right}?\n")

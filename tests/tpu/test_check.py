"""`tpu.check` as a command, with libtpu's compiler: what fits, what does not, and the report on both."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.hand_count import Hand
from helpers.published_checkpoints import REPOSITORIES

ROOT = Path(__file__).parents[2]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = ("--max-running-requests", "2", "--chunked-prefill-size", "16")
WEIGHTS = 2 * (2 * 1024 * 256 + 2 * (256 * (2 * 1024 + 2 * 512) + 3 * 256 * 512 + 2 * 256) + 256)
"""Bytes: the embedding and head tables, each layer's projections, feed-forward matrices and two norms, and the last
norm."""

# Several checks in one process that also compiles: imports and the compiler's start are paid for once. On a v4, the
# decode kernel gets key blocks too large for the chip.
_SEVERAL = """
import io, json, sys, tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import tpu.check
from tpu.worker import prepare_compiler

dumps = prepare_compiler(Path(tempfile.mkdtemp()))
from sglang_jax.kernels.ragged_paged_attention import pallas
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks
from tpu.compiling import compile_all

own_blocks = pallas.decode_blocks

def compile_here(request):
    messages = []
    large = str(request.topology).startswith("v4")
    pallas.decode_blocks = (lambda *_: DecodeBlocks(rows=8, pages=64)) if large else own_blocks
    compile_all(request, dumps, messages.append)
    return messages

tpu.check.compile_in_child = compile_here
answers = []
for arguments in json.loads(sys.argv[1]):
    text, error = io.StringIO(), io.StringIO()
    with redirect_stdout(text), redirect_stderr(error):
        status = tpu.check.run(tpu.check.check, "check", arguments)
    answers.append((status, text.getvalue(), error.getvalue()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    error: str
    figures: dict[str, Any]

    @property
    def verdict(self) -> str:
        return self.text.rstrip().splitlines()[-1]


def check(*arguments: str, figures: Path | None = None, program: str | None = None) -> Answer:
    """The command's answer; `program`: Python code that runs instead of it."""
    start = ["-c", program] if program else ["-m", "tpu.check"]
    written = ["--json", str(figures)] if figures else []
    # `make test` keeps libtpu in a separate folder: wherever JAX can import it, it looks for a TPU
    paths = [str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [sys.executable, *start, *arguments, *written],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    read = json.loads(figures.read_text()) if figures else {}
    return Answer(finished.returncode, finished.stdout, finished.stderr, read)


Commands = Mapping[str, Sequence[str]]


def check_several(commands: Commands, folder: Path) -> dict[str, Answer]:
    """The command's answer to each list of arguments, with the compiling process being this one too. `folder`: of
    figures."""
    files = {name: folder / f"{number}.json" for number, name in enumerate(commands)}
    written = [(*arguments, "--json", str(files[name])) for name, arguments in commands.items()]
    finished = check(json.dumps(written), program=_SEVERAL)
    assert finished.status == 0, finished.error
    figures = {name: json.loads(file.read_text()) if file.exists() else {} for name, file in files.items()}
    found = zip(commands, json.loads(finished.text), strict=True)
    return {name: Answer(status, text, error, figures[name]) for name, (status, text, error) in found}


def check_exchanges(program: dict[str, Any], *, layers: int, sorts: int = 0) -> None:
    """The exchanges of each step are those of the sharding, and weights have the layout that the products need."""
    found = [collective for collective in program["collectives"] if not collective["conditional"]]
    of_layers = [(one["kind"], one["type"], one["count"]) for one in found if one["in_layers"]]
    assert of_layers == [("all-reduce", "bf16", 2 * layers)]
    around = {(one["kind"], one["type"]): one["count"] for one in found if not one["in_layers"]}
    # the embeddings of tokens, and three numbers of each row of logits
    assert around == {("all-reduce", "bf16"): 1, ("all-gather", "s32"): 1}
    estimate = program["estimate"]
    assert (estimate["moves"], estimate["windowed"], estimate["permutes"]) == ([], [], [])
    # counts of tokens, which are scattered to a table of all rows, and filters are in branches
    assert estimate["sorts"] == sorts


@pytest.fixture(scope="module")
def compiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Checks of which each compiles programs, in one process."""
    folder = tmp_path_factory.mktemp("compiled")
    models = {"states": HYBRID, "one layer": CONFIG | {"num_hidden_layers": 1}}
    of = {"model": ("--model", str(model), *SMALL)}
    for name, config in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        of[name] = ("--model", str(folder / name), "--quick", *SMALL)
    slice_ = ("--topology", "v6e:2x2", "--tp", "4")
    drafts = ("--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "1")
    commands: Commands = {
        "one chip": (*of["model"], "--topology", "v6e-1"),
        "states": (*of["states"], *slice_, *drafts),
        "copies": (*of["one layer"], *slice_, "--attention-backend", "xla"),
        "wide": (*of["one layer"], "--topology", "v4-8"),
    }
    return check_several(commands, folder)


@pytest.mark.slow
def test_a_model_on_one_chip(compiled: dict[str, Answer]) -> None:
    answer = compiled["one chip"]
    assert answer.status == 0, answer.text + answer.error
    assert answer.verdict.startswith("FITS: 8 of 8 programs compiled")
    deployment, programs = answer.figures["deployment"], answer.figures["programs"]
    assert [program["name"] for program in programs] == list(deployment["programs"])
    assert {"decode 2", "mixed 16 tokens, 2 rows", "sample 2 rows"} < set(deployment["programs"])
    assert deployment["weights"] == WEIGHTS
    assert deployment["page"] == 64 * 2 * 2 * 4 * 128 * 2
    for program in programs:
        assert program["collectives"] == []
        if program["tokens"]:
            # every byte of weights and pages is an argument, and pages are written in place
            pages = deployment["page"] * deployment["num_pages"]
            assert pages + WEIGHTS < program["arguments"] < pages + WEIGHTS + 2**20
            assert pages < program["aliased"] < pages + 2**20
            assert program["temporaries"] < 2**24
            kernels = {kernel["name"]: kernel["count"] for kernel in program["kernels"]}
            assert kernels.pop("kv_write_runs") == 1
            assert kernels.pop("kv_write") == 2
            assert kernels.pop("paged_attention_decode") == 2
            assert kernels.pop("kept_distance") == 1
            assert kernels == ({} if program["tokens"] == program["rows"] else {"paged_attention_prefill": 2})
    assert deployment["hbm"] - answer.figures["needed"] == answer.figures["headroom"] > 0


@pytest.mark.slow
def test_a_model_on_four_chips_with_an_int8_cache(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    slice_ = ("--topology", "v6e:2x2", "--tp", "4")
    int8, rows = ("--kv-cache-dtype", "int8"), ("--roofline-context", "1000")
    kept = ("--write-cache", str(tmp_path / "kept"))
    answer = check("--model", str(model), *slice_, *int8, *rows, *kept, *SMALL, figures=figures)
    assert answer.status == 0, answer.text + answer.error
    programs = {program["name"]: program for program in answer.figures["programs"]}
    # a kept program has more than its text
    files = [file for file in (tmp_path / "kept").glob("jit_*-cache") if file.stat().st_size > 10_000]
    assert len(files) >= 3
    tokens = (answer.figures["deployment"]["num_pages"] - 1) * 64
    assert f"compiled programs are in {tmp_path}/kept" in answer.error
    assert f"--compilation-cache-dir {tmp_path}/kept --page-size 64 --max-total-tokens {tokens}" in answer.error
    assert "Decode rows hold 1,000 tokens each" in answer.text
    deployment = answer.figures["deployment"]
    norms = 2 * 5 * 256
    scales = 2 * 4 * 2 * 4
    weights = deployment["weights"]
    assert weights == (WEIGHTS + scales - norms) // 4 + norms
    assert deployment["page"] == 64 * 2 * 2 * 1 * 128
    decode = programs["decode 2"]
    for program in (decode, programs["mixed 16 tokens, 2 rows"]):
        check_exchanges(program, layers=2)
    gathered = next(found for found in decode["collectives"] if found["kind"] == "all-gather")
    assert gathered["largest"] == "s32[4,3,2]"  # for each device and row the largest logit, the smallest, and its place
    assert decode["roofline"]["exchange"] > 0
    assert 0 < decode["share"]["least"] < decode["share"]["estimated"] < 1e-3
    assert all("No tuned blocks" in warning for warning in answer.figures["warnings"])
    assert "WARNING  No tuned blocks of decode on v6e for 2 heads" in answer.text
    calibration = programs["calibrate scales"]
    # Its pages have the model's own type, as many as 512 tokens take. The head is not needed, nor what the last
    # layer computes from the pages it wrote.
    assert weights / 2 < calibration["arguments"] - 9 * 64 * 2 * 2 * 128 * 2 < weights
    kernels = {kernel["name"]: kernel["count"] for kernel in calibration["kernels"]}
    assert kernels == {"kv_write_runs": 1, "kv_write": 2, "paged_attention_decode": 1, "paged_attention_prefill": 1}


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 2),
    **{"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 1024},
    **{"layer_types": ["linear_attention", "full_attention"], "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
RECURRENT = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 2),
    **{"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 64, "expand": 2},
    **{"state_size": 128, "n_groups": 1, "conv_kernel": 4, "tie_word_embeddings": False, "hidden_act": "silu"},
    **{"layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "rms_norm": True},
}


@pytest.mark.slow
def test_a_model_with_recurrent_states(compiled: dict[str, Answer]) -> None:
    """One layer of a gated delta net and one of attention, over four chips: slots of states next to pages. The state
    kernels run for rows and again for drafts, without copies of their pools."""
    answer = compiled["states"]
    assert answer.status == 0, answer.text + answer.error
    assert "KV pages and recurrent states" in answer.text
    deployment = answer.figures["deployment"]
    assert deployment["page"] == 64 * 2 * 1 * 128 * 2
    heads = 2 * 128 * 128 * 4
    assert heads < deployment["slot"] < heads * 1.1  # and the convolution's last inputs
    for program in answer.figures["programs"]:
        check_exchanges(program, layers=2, sorts=2)  # sampled tokens are scattered to the texts of rows
        assert deployment["kv"] < program["aliased"] < deployment["kv"] + 2**20
        assert program["temporaries"] < 2**24 < deployment["kv"] / 100
        kernels = {kernel["name"]: kernel["count"] for kernel in program["kernels"]}
        assert {"paged_attention_decode", "kv_write"} <= set(kernels)
        calls = 2 if program["name"] == "decode 2" else 1
        assert kernels["state_rows"] == kernels["convolution_rows"] == calls
        assert program["share"]["attention"] > 0
    decode = answer.figures["programs"][0]
    states, pages = 2 * 2 * deployment["slot"], deployment["page"] // 64 * 2 * 1024
    assert states + pages < decode["roofline"]["hbm_bytes"] < states + 1.1 * pages + deployment["weights"]


@pytest.mark.soak
def test_a_model_of_only_recurrent_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT))
    answer = check("--model", str(tmp_path), "--topology", "v6e-1", "--quick", *SMALL)
    assert answer.status == 0, answer.text + answer.error
    assert re.search(r"weights [0-9.]+ MiB, recurrent states [0-9.]+ GiB: [0-9,]+ of [0-9.]+ KiB", answer.text)
    assert answer.verdict.endswith("more recurrent states)")


@pytest.mark.slow
def test_compile_errors_are_reported(compiled: dict[str, Answer]) -> None:
    """XLA's attention transposes the pages of a single kv head and then does not fit; a kernel is too large for
    vector memory. One layer shows each."""
    copies, wide = compiled["copies"], compiled["wide"]
    for answer, reason in ((copies, "RESOURCE_EXHAUSTED"), (wide, "")):
        assert answer.status == 1, answer.text + answer.error
        assert answer.verdict.startswith(f"DOES NOT COMPILE: 'decode 2' does not compile: {reason}")
    assert "HBM" in copies.verdict
    assert "vmem" in wide.verdict


FIXED = ("--enable-deterministic-inference",)
REFUSED = {
    ("--topology", "h100:8"): "unknown topology 'h100:8'",
    ("--topology", "v6e-1", "--page-size", "48"): "--page-size must be a power of two",
    ("--topology", "v6e-1", "--all", "--quick"): "give only one of --all and --quick",
    ("--topology", "v6e-1", "--mem-fraction-static", "1.5"): "--mem-fraction-static: Input should be less than 1",
    # errors that only the compiling process can find
    ("--topology", "v6e-1", "--tp", "2"): "--tp-size 2 needs 2 devices; v6e:1x1 has 1",
    ("--topology", "v6e:2x2", "--tp", "3"): "cannot be spread over 3 devices",
    ("--topology", "v6e:2x2", "--tp", "3", "--deterministic", "tp"): "in 8 shards, got --tp-size 3: choose one of 1, 2",
    ("--topology", "v6e-1", "--attention-backend", "reference", *FIXED): (
        "--attention-backend reference may depend on the batch"
    ),
    ("--topology", "v6e:3x3"): "libtpu has no topology v6e:3x3",
    ("--topology", "v6e-1", "--context-length", "2048"): (
        "--context-length 2048 exceeds the model's maximum of 1024 positions"
    ),
}
NOT_IN_8_BITS = ("--topology", "v6e-1", "--kv-cache-dtype", "int8")
DEEPSEEK, QWEN = (
    next(each for each in REPOSITORIES if each.name == name)
    for name in ("deepseek-ai/DeepSeek-V3", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4")
)


@pytest.fixture(scope="module")
def refused(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Checks that end before they compile, in one process."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "states").mkdir()
    (folder / "states" / "config.json").write_text(json.dumps(RECURRENT))
    for repository in (DEEPSEEK, QWEN):
        repository.write_config(folder / repository.name)
    blocks, groups = (("--model", str(folder / each.name), "--quick") for each in (DEEPSEEK, QWEN))
    commands: Commands = {
        **{" ".join(arguments): ("--model", str(model), *arguments) for arguments in REFUSED},
        "states in 8 bits": ("--model", str(folder / "states"), *NOT_IN_8_BITS),
        "latent vectors in 8 bits": ("--model", "deepseek-v2-lite", *NOT_IN_8_BITS),
        "blocks": (*blocks, "--topology", "v5e:4x8", "--tp", "32"),
        "groups": (*groups, "--topology", "v4-8", "--mem-fraction-static", "0.1"),
    }
    return check_several(commands, folder)


@pytest.mark.parametrize(
    ("name", "topology", "available", "weights", "remedy"),
    [
        ("qwen3-32b", "v5e-1", "16,128", "62,489", "--tp 8 --topology v5e:2x4 (7.6 GiB of weights on each device)"),
        ("gemma-3-27b", "v6e-1", "31,990", "51,519", "--tp 2 --topology v6e:2x2 (25.2 GiB of weights on each device)"),
    ],
)
def test_a_model_too_large_for_the_memory_is_refused(
    name: str, topology: str, available: str, weights: str, remedy: str
) -> None:
    answer = check("--model", name, "--topology", topology, "--quick")
    assert answer.status == 1
    assert answer.verdict.startswith(f"DOES NOT FIT: {available} MiB of memory are available")
    assert f"{weights} MiB of weights" in answer.verdict
    assert answer.verdict.endswith(f"Would fit: {remedy}")


def test_weights_in_groups_are_counted_as_they_are_kept(refused: dict[str, Answer]) -> None:
    """DeepSeek-V3 as it is published, in blocks of float8, of whose experts each device has 64 columns. And a model in
    groups of 4 bits on a chip whose vector memory has no room for the inputs of a down matrix, which is widened."""
    blocks = Hand(DEEPSEEK.fields, 32, blocks=True).weights()
    assert f"after {blocks / 2**20:,.0f} MiB of weights" in refused["blocks"].error
    model = QWEN.unquantised()
    bits = sum((16 if "down" in name else 4 + 16 / 128) * math.prod(shape) for name, shape in model.linear.items())
    plain = sum(16 * math.prod(shape) for shape in model.plain.values())
    assert f"after {(bits + plain) / 8 / 2**20:,.0f} MiB of weights" in refused["groups"].error


def test_impossible_options_are_refused(refused: dict[str, Answer]) -> None:
    messages = {
        **{" ".join(arguments): message for arguments, message in REFUSED.items()},
        "states in 8 bits": "--kv-cache-dtype int8: the model has only recurrent states, no keys and values",
        "latent vectors in 8 bits": (
            "--kv-cache-dtype int8: latent attention caches one short vector of a token, which is not stored in 8 bits"
            " yet"
        ),
    }
    for name, message in messages.items():
        answer = refused[name]
        assert message in answer.error
        assert answer.status == 2
        assert not answer.text


def test_errors_of_the_compiling_process_are_reported(model: Path) -> None:
    answer = check("--model", str(model), "--topology", "v6e:3x3")
    assert (answer.status, answer.text) == (2, "")
    assert "libtpu has no topology v6e:3x3" in answer.error


def test_without_libtpu_the_error_has_a_remedy(model: Path) -> None:
    program = """
import sys, tpu.check, tpu.worker
find = tpu.worker.find_spec
tpu.worker.find_spec = lambda name: None if name == "libtpu" else find(name)
sys.exit(tpu.check.run(tpu.check.check, "check"))
"""
    answer = check("--model", str(model), "--topology", "v6e-1", program=program)
    assert answer.status == 2
    assert "needs libtpu, not installed here: pip install" in answer.error


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["v6e", "tpu7x"])
@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "gemma-3-27b"])
def test_steps_of_two_layers_of_well_known_models(name: str, tp: int, topology: str, tmp_path: Path) -> None:
    """With the shapes that are served, not only small ones, which the compiler lays out differently. For Gemma 3 one
    layer with a window and one without."""
    cut = {"num_hidden_layers": 2, "sliding_window_pattern": 2} if name == "gemma-3-27b" else {"num_hidden_layers": 2}
    config = json.loads((ROOT / "tpu" / "shapes" / f"{name}.json").read_text()) | cut
    (tmp_path / "config.json").write_text(json.dumps(config))
    slices = {("v6e", 1): "v6e:1x1", ("v6e", 4): "v6e:2x2", ("v6e", 8): "v6e:2x4"}
    slice_ = slices.get((topology, tp), "tpu7x:2x2x1")
    rows = ("--max-running-requests", "256" if tp == 1 else "64", "--context-length", "8192")
    answer = check(
        *("--model", str(tmp_path), "--topology", slice_, "--tp", str(tp), "--quick", *rows),
        figures=tmp_path / "figures.json",
    )
    assert answer.status == 0, answer.text + answer.error
    for program in answer.figures["programs"]:
        if tp > 1:
            check_exchanges(program, layers=2)
        assert program["estimate"]["moves"] == [], program["name"]
    print(answer.text)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "layers", "options"),
    [
        ("deepseek-v2-lite", 3, ("--topology", "v6e-4", "--tp", "4")),
        ("deepseek-v3", 5, ("--topology", "v6e-64", "--tp", "64", "--quantization", "fp8")),
        ("deepseek-v3", 5, ("--topology", "tpu7x:2x2x2", "--tp", "16", "--quantization", "fp8")),
    ],
)
def test_latent_attention_and_experts(name: str, layers: int, options: tuple[str, ...], tmp_path: Path) -> None:
    """Dense layers and two with experts: neither experts nor pages are copied, and two sums per layer are exchanged."""
    config = json.loads((ROOT / "tpu" / "shapes" / f"{name}.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = ("--max-running-requests", "64", "--context-length", "8192")
    answer = check("--model", str(tmp_path), *options, "--quick", *rows, figures=tmp_path / "figures.json")
    assert answer.status == 0, answer.text + answer.error
    deployment = answer.figures["deployment"]
    assert deployment["page"] == 64 * layers * 640 * 2
    experts = config["n_routed_experts"] * config["moe_intermediate_size"] * config["hidden_size"]
    for program in answer.figures["programs"]:
        found = [one for one in program["collectives"] if one["in_layers"] and not one["conditional"]]
        assert [(one["kind"], one["type"], one["count"]) for one in found] == [("all-reduce", "bf16", 2 * layers)]
        assert 0 < program["arguments"] - deployment["weights"] - deployment["kv"] < 40 * 2**20
        rest = 4 * program["tokens"] * config["num_experts_per_tok"] * config["hidden_size"]
        assert program["temporaries"] < experts // deployment["devices"] + 3 * rest
        assert not [move for move in program["estimate"]["moves"] if "scales" not in str(move)]


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b"])
def test_well_known_models(name: str, tp: int, topology: str) -> None:
    """Decode and prefill of the largest buckets. What cannot fit is refused before compilation."""
    slice_ = {"tpu7x": "tpu7x:2x2x1"}.get(topology, f"{topology}:2x4")
    rows = ("--max-running-requests", "64")
    answer = check("--model", name, "--topology", slice_, "--tp", str(tp), "--quick", *rows)
    too_large = {("llama-3.1-8b", 1, "v5e"), ("qwen3-32b", 1, "v5e"), ("qwen3-32b", 4, "v5e"), ("qwen3-32b", 1, "v6e")}
    assert answer.verdict.startswith("DOES NOT FIT" if (name, tp, topology) in too_large else "FITS"), answer.text
    print(answer.text)


@pytest.mark.soak
@pytest.mark.parametrize("tp", [4, 8])
def test_a_well_known_model_with_windows(tp: int) -> None:
    answer = check("--model", "gemma-3-27b", "--topology", "v6e:2x4", "--tp", str(tp), "--quick")
    assert answer.verdict.startswith("FITS"), answer.text + answer.error
    assert re.search(r"\(\d+ KV tokens in [\d,]+ MiB, \d+ KV tokens with a window of 1024 in [\d,]+ MiB\)", answer.text)
    print(answer.text)

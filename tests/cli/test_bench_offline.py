"""The offline benchmark: its requests to the engine, and its totals."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.engine_fakes import CONTEXT_LENGTH

from sglang_jax.cli.bench.commands import bench_offline, run_workload
from sglang_jax.cli.bench.workloads import Conversation, Turn
from sglang_jax.cli.main import run
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.sampling import SamplingParams


class Recorder:
    """Answers every prompt with its length, repeated."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.sampling: list[SamplingParams] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[GenerateOutput]:
        self.batches.append([list(prompt) for prompt in prompts])
        self.sampling += sampling
        return [self._answer(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> GenerateOutput:
        ids = [len(prompt)] * (params.max_new_tokens or 0)
        return GenerateOutput(
            request_id="",
            index=0,
            text="",
            delta_text="",
            output_ids=ids,
            delta_ids=ids,
            prompt_tokens=len(prompt),
            completion_tokens=len(ids),
            cached_tokens=1,
        )


def test_turns_run_in_rounds_and_carry_the_conversation() -> None:
    recorder = Recorder()
    long = Conversation((Turn((1, 2), 1), Turn((3,), 2)))
    short = Conversation((Turn((7, 8, 9), 1),))
    totals = run_workload(recorder.generate, [long, short])
    assert recorder.batches == [[[1, 2], [7, 8, 9]], [[1, 2, 2, 3]]]
    assert (totals.requests, totals.input_tokens, totals.output_tokens, totals.cached_tokens) == (3, 9, 4, 3)
    assert all(params.ignore_eos and params.temperature == 0.0 for params in recorder.sampling)


@pytest.mark.usefixtures("echo_engine")
@pytest.mark.parametrize(
    ("dataset", "requests", "input_tokens", "output_tokens"),
    [
        ("random-ids --num-prompts 3 --random-input-len 9 --random-output-len 5", 3, 27, 15),
        (
            "multi-turn --num-prompts 2 --multi-turn-num-turns 2 --random-input-len 4 --random-output-len 3",
            4,
            2 * (4 + 11),
            12,
        ),
        (
            "generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 2 "
            "--gsp-system-prompt-len 6 --gsp-question-len 2 --gsp-output-len 4",
            4,
            32,
            16,
        ),
    ],
)
def test_lengths_are_exact(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dataset: str,
    requests: int,
    input_tokens: int,
    output_tokens: int,
) -> None:
    file = tmp_path / "result.jsonl"
    arguments = [
        "--model-path",
        "echo",
        "--seed",
        "5",
        "--dataset-name",
        *dataset.split(),
        "--result-filename",
        str(file),
    ]
    assert run(bench_offline, "bench", arguments) == 0
    line = json.loads(file.read_text())
    assert line["successful_requests"] == requests
    assert line["total_input_tokens"] == input_tokens
    assert line["total_output_tokens"] == output_tokens
    assert line["output_throughput"] == pytest.approx(output_tokens / line["total_latency"])
    assert line["compiles_after_warm_up"] == 0
    printed = capsys.readouterr().out
    for label, figure in (
        ("Successful requests:", "successful_requests"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Last generation throughput (tok/s):", "last_gen_throughput"),
        ("Total token throughput (tok/s):", "total_throughput"),
    ):
        (value,) = re.findall(rf"^{re.escape(label)} +([\d.]+)$", printed, re.MULTILINE)
        assert float(value) == pytest.approx(line[figure], abs=0.005), label


@pytest.mark.usefixtures("echo_engine")
def test_a_workload_beyond_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-path", "echo", "--random-input-len", str(CONTEXT_LENGTH)]
    assert run(bench_offline, "bench", arguments) == 2
    message = capsys.readouterr().err
    assert str(CONTEXT_LENGTH) in message
    assert str(CONTEXT_LENGTH + 64) in message

"""Models with experts through the scheduler, cache and runner, a server and a batch: greedy outputs are
transformers', and drafts, sampling, stop strings and grammars work as on any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.batch_command import run_with
from helpers.echo_server import EchoServer, serve_echo
from helpers.family_cases import FAMILIES, LATENT
from helpers.guessed_outputs import check_same_outputs
from helpers.scheduling import RecordingChannel
from helpers.schemas import conforms
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model
from transformers import PreTrainedModel

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.cli.bench.commands import bench_serving
from sglang_jax.cli.main import run
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.model_core import ModelCore, load_grammars, load_text_tokenizer
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.defaults import GenerationDefaults
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

Served = tuple[PreTrainedModel, EngineConfig, Runner]

PERSON = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module",
    params=[("qwen2_moe", "torch"), ("gpt_oss", "jax"), ("deepseek_v3", "torch"), ("deepseek_v2", "jax")],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The first two have layers with a window, the others latent attention; all but one also have layers without
    experts."""
    name, backend = request.param
    case, folder = (FAMILIES | LATENT)[name], Path(tmp_path_factory.mktemp(name))
    make_tiny_checkpoint(folder, case.architecture, **case.changes)
    config = EngineConfig(
        model_path=str(folder),
        backend=Backend(backend),
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=600,
        context_length=160,
        speculative_algorithm=SpeculativeAlgorithm.NGRAM,
        speculative_num_draft_tokens=3,
        skip_warmup=True,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    yield make_tiny_model(case.architecture, **case.changes), config, runner
    runner.close()


def most_likely(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token by transformers after the prompt and after each output token except the last."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


class LentCore(ModelCore):
    """`close` leaves its runner open for other cores."""

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()


def lent(config: EngineConfig, runner: Runner) -> CoreLoader:
    """Makes cores of an existing runner."""

    def load(_: EngineConfig, channel: CoreChannel) -> ModelCore:
        checkpoint = open_checkpoint(config.model_path)
        grammars = load_grammars(config, checkpoint)
        return LentCore(config, checkpoint, GenerationDefaults(), runner, channel, grammars)

    return load


def test_greedy_outputs_are_those_of_transformers(served: Served) -> None:
    """Prompts that share a prefix, computed in chunks in the same steps; some requests are retracted and restart."""
    model, config, runner = served
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    rng = np.random.default_rng(3)
    shared = rng.integers(3, TINY_VOCAB_SIZE, 30).tolist()
    prompts = [shared + rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (1, 9, 40, 22, 5)]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(NewRequest(id=number, token_ids=np.array(prompt, np.int32).tobytes(), sampling=sampling))
    for step in range(10_000):
        if scheduler.idle:
            break
        scheduler.step()
        check_everything(scheduler.cache)
        if step % 9 == 8 and scheduler.num_running > 1:
            scheduler.retract_newest()
    for number, prompt in enumerate(prompts):
        output = channel.output(number)
        assert output == most_likely(model, prompt, output)
    assert scheduler.log.counts.retractions > 0


def test_drafts_change_no_output(served: Served) -> None:
    _, config, runner = served
    right = check_same_outputs(config, runner, count=9, at_once=3, reuse=True, words=3)
    assert right > 10, "hardly any draft was accepted"


@pytest.mark.parametrize("num_lines", [150, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_batch_of_many_lines(served: Served, num_lines: int, tmp_path: Path) -> None:
    """Prompts that share a prefix, many of them equal: each line has one answer, transformers'."""
    model, config, runner = served
    rng = np.random.default_rng(8)
    begins = [rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (5, 13, 30)]
    prompts = [begins[number % 3] + rng.integers(3, TINY_VOCAB_SIZE, 1 + number % 4).tolist() for number in range(60)]
    sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "url": "/generate", "body": {"input_ids": prompt, "sampling_params": sampling}}
        for number, prompt in enumerate(prompts[index] for index in rng.integers(0, len(prompts), num_lines))
    ]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["batch", "--model-path", config.model_path, "--input", str(asked), "--output", str(answered)]
    assert run_with(lent(config, runner), command, load_tokenizer=load_text_tokenizer) == 0
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    outputs = {int(one["custom_id"]): one["response"]["body"]["output_ids"] for one in answers}
    assert len(answers) == len(outputs) == num_lines
    expected: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        prompt = line["body"]["input_ids"]
        first = expected.setdefault(str(prompt), outputs[number])
        assert outputs[number] == first
        if outputs[number] is first:
            assert first == most_likely(model, prompt, first)
    cached = [one["response"]["body"]["meta_info"]["cached_tokens"] for one in answers]
    assert np.mean([count > 0 for count in cached]) > 0.9


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[EchoServer]:
    _, config, runner = served
    options = config.model_dump(exclude_unset=True)
    with serve_echo(lent(config, runner), load_text_tokenizer, **options) as running:
        running.http.timeout = 120
        yield running


def test_session_turns_equal_transformers(served: Served, server: EchoServer) -> None:
    model, config, _ = served
    rng = np.random.default_rng(5)
    sessions = [
        server.http.post("/open_session", json={"capacity_of_str_len": 1000, "streaming": True}).json()
        for _ in range(2)
    ]
    history: dict[str, list[int]] = {session: [] for session in sessions}
    for number in range(8):
        session, new = sessions[number % 2], rng.integers(3, TINY_VOCAB_SIZE, 4 + number).tolist()
        body = {
            "input_ids": new,
            "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": session, "rid": None},
        }
        answer = server.http.post("/generate", json=body).json()
        before, output = history[session], answer["output_ids"]
        assert output == most_likely(model, [*before, *new], output)
        # Whole pages of all tokens except the last, whose keys and values were not computed.
        assert answer["meta_info"]["cached_tokens"] == max(len(before) - 1, 0) // config.page_size * config.page_size
        history[session] = [*before, *new, *output]
    for session in sessions:
        assert server.http.post("/close_session", json={"session_id": session}).status_code == 200


def test_answers_follow_a_schema(server: EchoServer) -> None:
    """In a batch with requests without a schema."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = server.http.post("/v1/chat/completions", json=body).json()
        return answer

    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    # a model of random weights might write spaces to the end
    compact = {"response_format": form, "guided_whitespace_pattern": ""}
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 110}
    plain |= {"temperature": 5, "seed": 5, "n": 3}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, (plain | compact, plain)))
    choices, others = (answer["choices"] for answer in answers)
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    assert all(conforms(json.loads(choice["message"]["content"]), PERSON) for choice in choices)
    assert len({choice["message"]["content"] for choice in choices}) > 1
    assert not any(choice["message"]["content"].startswith("{") for choice in others)


def test_many_concurrent_clients(server: EchoServer, tmp_path: Path) -> None:
    """Every requested token arrives, some prompts hit the cache, and no state is left."""
    command = "--port {} --disable-tqdm --num-prompts 24 --random-input-len 40 --random-output-len 10 --output-file {}"
    arguments = command.format(server.port, tmp_path / "out.jsonl").split()
    assert run(bench_serving, "bench_serving", arguments) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["completed"], line["total_input_tokens"], line["total_output_tokens"]) == (24, 24 * 40, 24 * 10)
    assert server.http.post("/flush_cache").status_code == 200

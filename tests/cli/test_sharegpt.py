"""`bench --dataset-name sharegpt`: which prompts of a file are sent, with which output lengths, and in which form.
The tokenizer is one of bytes, so that lengths can be counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_fakes import ByteTokenizer
from helpers.streaming_server import FakeServer, serve_in_thread

from sglang_jax.cli.bench.commands import bench_offline, bench_serving
from sglang_jax.cli.bench.sharegpt import Pair, read_pairs, sample_pairs
from sglang_jax.cli.bench.workloads import Dataset, WorkloadConfig
from sglang_jax.cli.main import run
from sglang_jax.errors import ConfigError


def write(folder: Path, content: object) -> Path:
    file = folder / "sharegpt.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def conversation(*texts: str, key: str = "conversations") -> dict[str, Any]:
    people = ("human", "gpt")
    return {"id": "x", key: [{"from": people[i % 2], "value": text} for i, text in enumerate(texts)]}


def config(**options: Any) -> WorkloadConfig:
    return WorkloadConfig(dataset_name=Dataset.SHAREGPT, dataset_path="file.json", **options)


def sampled(pairs: Sequence[Pair], **options: Any) -> list[tuple[str | None, int]]:
    """The prompts and their output lengths."""
    conversations, _ = sample_pairs(config(**options), pairs, ByteTokenizer())
    return [(each.turns[0].text, each.turns[0].output_len) for each in conversations]


def test_the_first_two_turns_are_used(tmp_path: Path) -> None:
    content = [
        conversation("question", "answer", "thanks", "welcome"),
        conversation("only one turn"),
        conversation(),
        conversation("older", "form", key="conversation"),
    ]
    assert read_pairs(write(tmp_path, content)) == [Pair("question", "answer"), Pair("older", "form")]


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    file = write(tmp_path, r'[{"conversations": [{"value": "a\ud83d b"}, {"value": "\ud83d\ude00"}]}]')
    assert read_pairs(file) == [Pair("a? b", "😀")]


@pytest.mark.parametrize(
    ("prompt", "answer", "options", "output_len"),
    [
        (3, 9, {}, None),
        (4, 9, {}, 9),
        (9, 3, {}, None),
        (9, 4, {}, 4),
        (9, 1, {"sharegpt_output_len": 30}, 30),
        (3, 1, {"sharegpt_output_len": 30}, None),
        (1024, 1024, {}, 1024),
        (1025, 9, {}, None),
        (1024, 1025, {}, None),
        (1024, 1025, {"sharegpt_output_len": 1024}, 1024),
        (1025, 9, {"sharegpt_context_len": 1034}, 9),
        (1025, 9, {"sharegpt_context_len": 1033}, None),
        (1025, 9, {"sharegpt_context_len": 1034, "sharegpt_output_len": 10}, None),
    ],
)
def test_conversations_too_short_or_too_long_are_left_out(
    prompt: int, answer: int, options: dict[str, int], output_len: int | None
) -> None:
    fits = Pair("fits", "well")
    asked = sampled([Pair("p" * prompt, "a" * answer), fits], **options)
    expected = {("fits", options.get("sharegpt_output_len", 4))}
    if output_len is not None:
        expected.add(("p" * prompt, output_len))
    assert set(asked) == expected


def test_the_seed_decides_the_order() -> None:
    pairs = [Pair(f"prompt {i}", "answer") for i in range(50)]
    asked = sampled(pairs, num_prompts=50)
    assert asked == sampled(pairs, num_prompts=50)
    assert sampled(pairs, num_prompts=20) == asked[:20]
    assert sorted(asked) == sorted(sampled(pairs, num_prompts=50, seed=2))
    assert asked != sampled(pairs, num_prompts=50, seed=2)
    assert asked != [(pair.prompt, 6) for pair in pairs]


def test_too_few_prompts_are_reported() -> None:
    pairs = [Pair("prompt", "answer"), Pair("p", "answer"), Pair("p" * 3000, "answer")]
    conversations, note = sample_pairs(config(num_prompts=5), pairs, ByteTokenizer())
    assert len(conversations) == 1
    assert note == "1 prompts instead of 5: of 3 conversations 1 are too short and 1 too long"
    assert sample_pairs(config(num_prompts=1), pairs[:1], ByteTokenizer())[1] == ""
    with pytest.raises(ConfigError, match="no usable conversation: 1 are too short and 1 too long"):
        sample_pairs(config(), pairs[1:], ByteTokenizer())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", "is not in ShareGPT's format: .*char 2.* download ShareGPT_V3"),
        ({"conversations": []}, "is not in ShareGPT's format: Expected `array`, got `object`"),
        ([conversation("a", "b"), {"conversations": [{"from": "human"}]}], r"missing .*`value` - at `\$\[1\]"),
        ("[" * 100_000, "is not in ShareGPT's format"),
        ([conversation("alone")], "has no conversation with two turns"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_pairs(write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (bench_serving, bench_offline):
        assert run(command, "bench", ["--dataset-name", "sharegpt"]) == 2
        assert "--dataset-name sharegpt needs --dataset-path FILE" in capsys.readouterr().err
        arguments = ["--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "nope.json")]
        assert run(command, "bench", arguments) == 2
        told = capsys.readouterr().err
        assert (
            f"data set not found: {tmp_path}/nope.json; nothing is downloaded automatically: download ShareGPT_V3"
            in told
        )
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_pairs(tmp_path)


TEXTS = [("What is a page?", "A block of tokens."), ("And a row?", "A sequence that runs.")]


def measure(folder: Path, *arguments: str, status: int = 0) -> FakeServer:
    """The requests that a server received for the prompts of `TEXTS`."""
    file = write(folder, [conversation(*texts) for texts in TEXTS])
    sharegpt = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "2", "--disable-tqdm"]
    with serve_in_thread(FakeServer()) as fake:
        assert run(bench_serving, "bench", ["--port", str(fake.port), *sharegpt, *arguments]) == status
    return fake


def test_a_server_gets_the_prompts_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sglang_jax.checkpoint import resolve_tokenizer
    from sglang_jax.checkpoint.tokenizer import load_tokenizer

    demo = load_tokenizer(resolve_tokenizer("demo"))
    warm, *bodies = measure(tmp_path, "--tokenizer", "demo").bodies
    outputs = ["a" * body["sampling_params"]["max_new_tokens"] for body in bodies]
    count = sum(len(demo.encode(output, add_special_tokens=False)) for output in outputs)
    assert f"Total generated tokens (retokenized):    {count}\n" in capsys.readouterr().out
    asked = {demo.decode(body["input_ids"]): body["sampling_params"]["max_new_tokens"] for body in bodies}
    assert asked == {prompt: len(demo.encode(answer)) for prompt, answer in TEXTS}
    assert demo.decode(warm["input_ids"]) not in asked

    _, *bodies = measure(tmp_path, "--tokenizer", "demo", "--backend", "vllm-chat", "--sharegpt-output-len", "5").bodies
    assert {(body["messages"][0]["content"], body["max_tokens"]) for body in bodies} == {(text, 5) for text, _ in TEXTS}


def test_a_server_with_an_unknown_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, status=2)
    assert "does not name a tokenizer: give --tokenizer" in capsys.readouterr().err
    measure(tmp_path, "--tokenizer", str(tmp_path / "none"), status=2)
    assert f"{tmp_path}/none does not exist" in capsys.readouterr().err


@pytest.mark.usefixtures("echo_engine")
def test_the_offline_benchmark_uses_them_too(tmp_path: Path) -> None:
    file = write(tmp_path, [conversation(*texts) for texts in TEXTS])
    result = tmp_path / "result.jsonl"
    arguments = ["--model-path", "echo", "--dataset-name", "sharegpt", "--dataset-path", str(file)]
    assert run(bench_offline, "bench", [*arguments, "--result-filename", str(result)]) == 0
    line = json.loads(result.read_text())
    assert line["successful_requests"] == 2
    assert line["total_input_tokens"] == sum(len(prompt) for prompt, _ in TEXTS)
    assert line["total_output_tokens"] == sum(len(answer) for _, answer in TEXTS)
    assert line["dataset_path"] == str(file)

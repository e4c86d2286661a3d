"""`batch` from the command line to its files, over engines that echo or hash."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.batch_command import run_with
from helpers.engine_fakes import load_echo, load_fake_model

from sglang_jax.engine.core import CoreLoader

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `batch` in `tmp_path` with further arguments."""

    def run(*arguments: str, load: CoreLoader = load_echo, in_process: bool = True, **named: str) -> int:
        options = {"model-path": "echo", "input": "in.jsonl", "output": "out.jsonl", **named}
        for name in ("input", "output", "error-file"):
            if name in options:
                options[name] = str(tmp_path / options[name])
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
        return run_with(load, ["batch", *flags, *arguments], in_process=in_process)

    return run


def write(path: Path, *lines: object) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_a_batch_ignores_api_keys_of_servers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_JAX_API_KEY", "for clients")
    monkeypatch.setenv("SGLANG_JAX_ADMIN_API_KEY", "")
    write(tmp_path / "in.jsonl", {"prompt": "plain"})
    assert run() == 0
    assert [text_of(answer) for answer in read(tmp_path / "out.jsonl")] == ["plain"]


def test_the_engine_is_required_and_another_engines_runner_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "plain"})
    assert run("--runner", "pooling", "--engine", "local") == 2
    assert "Error: --runner is not available" in capsys.readouterr().err
    assert run("--engine", "local") == 0
    assert [text_of(answer) for answer in read(tmp_path / "out.jsonl")] == ["plain"]


def test_openai_lines_and_plain_ones_are_answered_as_the_server_does(run: Run, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    write(
        tmp_path / "in.jsonl",
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "echo", **chat}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 2}},
        {"custom_id": "c", "url": "/generate", "body": {"text": "abc", "sampling_params": {"max_new_tokens": 2}}},
        {"custom_id": "d", "url": "/generate", "body": {"text": ["abc", "def"], "sampling_params": {"n": 2}}},
        "",
        {"prompt": "plain", "custom_id": "e"},
        {**chat, "n": 2},
    )
    assert run("--ordered") == 0
    answers = read(tmp_path / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c", "d", "e", "line-7"]
    assert [answer["id"] for answer in answers] == [f"batch_req_{n}" for n in (1, 2, 3, 4, 6, 7)]
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    bodies = [answer["response"]["body"] for answer in answers]
    assert bodies[0]["object"] == "chat.completion"
    assert bodies[0]["model"] == "echo"
    assert answers[0]["response"]["request_id"] == bodies[0]["id"]
    assert text_of(answers[0]) == "user: hi\n"
    assert text_of(answers[1]) == "tw"
    assert bodies[2]["text"] == "ab"
    assert [one["text"] for one in bodies[3]] == ["abc", "abc", "def", "def"]
    assert text_of(answers[4]) == "plain"
    assert [choice["index"] for choice in bodies[5]["choices"]] == [0, 1]
    assert (tmp_path / "out.jsonl.errors.jsonl").read_text() == ""


def test_lines_that_score_a_prompt_and_lines_with_an_unknown_role(run: Run, tmp_path: Path) -> None:
    score = {"prompt": "AB", "max_tokens": 0, "echo": True, "logprobs": 0}
    alien = {"messages": [{"role": "user", "content": "a"}, {"role": "alien", "content": "b"}]}
    write(tmp_path / "in.jsonl", score, alien)
    assert run() == 1
    [answer] = read(tmp_path / "out.jsonl")
    assert text_of(answer) == "AB"
    assert answer["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"] == [-6.5, -6.6]
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 0
    [refused] = read(tmp_path / "out.jsonl.errors.jsonl")
    assert refused["response"]["body"]["error"]["param"] == "messages[1].role"
    assert "supported: system, developer, user" in refused["error"]["message"]


def test_failed_lines_are_in_the_error_file_and_stop_no_other(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "in.jsonl",
        {"prompt": "one"},
        "nonsense",
        {"prompt": "x", "max_tokens": "many"},
        {"prompt": "x", "tools": [1]},
        {"custom_id": "f", "url": "/v1/completions", "body": {"prompt": "x", "model": "another"}},
        {"prompt": "x" * 5000},
        {"prompt": [259]},
        {"prompt": "\ud800"},
        {"custom_id": "g", "url": "/v1/completions", "body": {}},
        {"custom_id": "h", "url": "/v1/moderations", "body": {}},
        {"prompt": "x", "stream": True},
        {"prompt": ""},
        {"prompt": "two"},
    )
    assert run("--ordered", **{"error-file": "bad.jsonl"}) == 1
    assert [text_of(answer) for answer in read(tmp_path / "out.jsonl")] == ["one", "two"]
    errors = {int(error["id"].split("_")[-1]): error for error in read(tmp_path / "bad.jsonl")}
    assert sorted(errors) == list(range(2, 13))
    refused = {
        3: (400, "invalid_value", "max_tokens"),
        4: (400, "unsupported_parameter", "tools"),
        5: (404, "model_not_found", "another"),
        6: (400, "context_length_exceeded", "5000"),
        7: (500, "kv_capacity_exceeded", "pool"),
        9: (400, "missing_field", "prompt"),
        12: (400, "invalid_value", "prompt"),
    }
    for number, (status, code, word) in refused.items():
        error = errors[number]
        assert error["response"]["status_code"] == status
        assert error["error"]["code"] == error["response"]["body"]["error"]["code"] == code
        assert word in error["error"]["message"]
    for number, code in {
        2: "malformed_json",
        8: "malformed_json",
        10: "invalid_value",
        11: "unsupported_parameter",
    }.items():
        assert errors[number]["response"] is None
        assert errors[number]["error"]["code"] == code
    assert (errors[2]["custom_id"], errors[3]["custom_id"], errors[10]["custom_id"]) == (None, "line-3", "h")
    told = capsys.readouterr().err
    assert "13 lines done, 11 in the error file" in told
    assert "11 lines failed" in told
    assert "bad.jsonl" in told


def test_lines_of_a_removed_error_file_are_tried_again(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "one"}, "nonsense", {"prompt": "two"})
    assert run() == 1
    before = (tmp_path / "out.jsonl").read_text()
    capsys.readouterr()
    assert run() == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "3 lines done (3 by earlier runs), 1 in the error file"
    assert told[1].startswith("1 line failed: ")
    (tmp_path / "out.jsonl.errors.jsonl").unlink()
    assert run() == 1
    assert (tmp_path / "out.jsonl").read_text() == before
    assert [error["id"] for error in read(tmp_path / "out.jsonl.errors.jsonl")] == ["batch_req_2"]


def test_lines_with_the_same_custom_id_are_each_answered(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *[{"prompt": f"p{number}", "custom_id": "same"} for number in range(40)])
    assert run() == 0
    answers = read(tmp_path / "out.jsonl")
    assert {answer["id"]: text_of(answer) for answer in answers} == {f"batch_req_{n + 1}": f"p{n}" for n in range(40)}
    assert {answer["custom_id"] for answer in answers} == {"same"}


def test_defaults_are_for_fields_that_lines_leave_out(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "abcdef"}, {"prompt": "abcdef", "max_tokens": 4})
    assert run("--ordered", defaults='{"max_tokens": 2}') == 0
    assert [text_of(answer) for answer in read(tmp_path / "out.jsonl")] == ["ab", "abcd"]


def test_an_empty_input_gives_empty_files(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", "", "  ")
    assert run() == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


def refusal(run: Run, capsys: pytest.CaptureFixture[str], *arguments: str, **options: str) -> str:
    capsys.readouterr()
    assert run(*arguments, **options) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize("change", ["grown", "shrunk", "begin", "middle", "end"])
def test_another_input_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str) -> None:
    path = tmp_path / "in.jsonl"
    write(path, *[{"prompt": f"p{number}", "max_tokens": 1} for number in range(300)])
    assert run() == 0
    content = path.read_text()
    place = {"begin": 13, "middle": content.index("p150"), "end": content.index("p299")}.get(change, 0)
    changed = content[:place] + "q" + content[place + 1 :]
    path.write_text({"grown": content + '{"prompt": "x"}\n', "shrunk": content[:-1]}.get(change, changed))
    told = refusal(run, capsys)
    assert "the input is not the one" in told
    assert "out.jsonl.run" in told
    path.write_text(content)
    assert run() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ordered"], ["--ordered false", "true"]),
        (["--defaults", '{"max_tokens": 1}'], ["--defaults unset", "max_tokens"]),
        (["--random-seed", "3"], ["--random-seed 0", "3"]),
        (["--served-model-name", "x"], ["--served-model-name unset", "'x'"]),
        (["--error-file", "elsewhere"], ["--error-file"]),
    ],
)
def test_a_run_resumes_only_with_the_options_that_it_started_with(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "one"})
    assert run() == 0
    told = refusal(run, capsys, *arguments)
    for word in words:
        assert word in told
    # Options that do not change the answers may change.
    assert run("--no-reorder", "--lookahead", "3", "--max-retries", "1", "--decode-log-interval", "7") == 0


def test_files_of_other_programs_are_not_touched(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "one"})
    write(tmp_path / "out.jsonl", {"mine": 1})
    assert "exists, but no run" in refusal(run, capsys)
    assert read(tmp_path / "out.jsonl") == [{"mine": 1}]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ([], {"input": "nowhere.jsonl"}, ["file not found: ", "nowhere.jsonl"]),
        ([], {"input": "."}, ["is not a regular file"]),
        ([], {"output": "no/folder/out.jsonl"}, ["no/folder", "does not exist"]),
        ([], {"output": "in.jsonl"}, ["three different files"]),
        ([], {"error-file": "out.jsonl"}, ["three different files"]),
        ([], {"error-file": "err.parquet"}, ["err.parquet", "JSON lines"]),
        ([], {"defaults": "[1]"}, ["--defaults '[1]'", "object"]),
        (["--max-queued-requests", "5"], {}, ["--max-queued-requests (5)"]),
        (["--lookahead", "0"], {}, ["--lookahead", "0", "greater than or equal to 1"]),
        (["--max-retries", "-1"], {}, ["--max-retries", "-1"]),
        ([], {"model-path": "missing"}, ["no checkpoint at 'missing'"]),
    ],
)
def test_refusals_name_the_flag_and_the_value(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    options: dict[str, str],
    words: list[str],
) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "one"})
    told = refusal(run, capsys, *arguments, **options)
    assert told.count("\n") <= 3
    for word in words:
        assert word in told


def test_a_missing_input_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(load_echo, ["batch", "--output", "x"]) == 2
    assert "Missing option --input" in capsys.readouterr().err


def poisoned(count: int, poison: dict[int, int]) -> list[object]:
    """Lines of text, and some whose prompt is a token that breaks the engine."""
    return [{"prompt": [poison[n]] if n in poison else f"p{n:03d}", "max_tokens": 8} for n in range(count)]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_only_the_line_that_kills_engines_fails(run: Run, tmp_path: Path, retries: int) -> None:
    """257 ends the core by an error. Without retries, lines that ran at the same time fail as well; with retries only
    this one does."""
    write(tmp_path / "in.jsonl", *poisoned(60, {20: 257, 41: 257}))
    assert run("--max-retries", str(retries), **{"model-path": "echo:0.001"}) == 1
    answered = {answer["id"]: text_of(answer) for answer in read(tmp_path / "out.jsonl")}
    errors = {error["id"]: error["error"] for error in read(tmp_path / "out.jsonl.errors.jsonl")}
    assert len(answered) + len(errors) == 60
    assert {"batch_req_21", "batch_req_42"} <= set(errors)
    assert all(error["code"] == "engine_dead" for error in errors.values())
    if retries:
        assert len(errors) == 2
        assert f"each of the {retries + 1} times" in errors["batch_req_21"]["message"]
    assert all(text == f"p{int(name.split('_')[-1]) - 1:03d}" for name, text in answered.items())


def test_replicas_in_separate_processes_share_the_lines_and_restart(run: Run, tmp_path: Path) -> None:
    """258 ends the core's process at once."""
    write(tmp_path / "in.jsonl", *poisoned(120, {60: 258}))
    options = ("--dp-size", "2", "--device", "cpu", "--max-retries", "1")
    assert run(*options, in_process=False, **{"model-path": "echo:0.001"}) == 1
    assert sorted(text_of(answer) for answer in read(tmp_path / "out.jsonl")) == [
        f"p{n:03d}" for n in range(120) if n != 60
    ]
    [error] = read(tmp_path / "out.jsonl.errors.jsonl")
    assert (error["id"], error["error"]["code"]) == ("batch_req_61", "engine_dead")


def shared_prefixes(groups: int, each: int) -> list[object]:
    """Prompts of 64 tokens that share 48 with their group, in a random order."""
    choice = random.Random(5)
    prompts = []
    for _ in range(groups):
        prefix = [choice.randrange(1, 120) for _ in range(48)]
        prompts += [prefix + [choice.randrange(1, 120) for _ in range(16)] for _ in range(each)]
    choice.shuffle(prompts)
    return [{"prompt": prompt, "max_tokens": 4, "ignore_eos": True} for prompt in prompts]


def hit_rate(path: Path) -> float:
    usages = [answer["response"]["body"]["usage"] for answer in read(path)]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return cached / sum(usage["prompt_tokens"] for usage in usages)


def test_lines_that_share_a_prefix_hit_each_others_cache(run: Run, tmp_path: Path) -> None:
    """50 groups of 10, shuffled, through the real scheduler, whose pool holds a third of the groups' prefixes."""
    write(tmp_path / "in.jsonl", *shared_prefixes(50, 10))
    pool = {"max-total-tokens": "1024", "page-size": "4", "chunked-prefill-size": "64"}
    assert run("--no-reorder", load=load_fake_model, output="as_given.jsonl", **pool) == 0
    assert run(load=load_fake_model, output="grouped.jsonl", **pool) == 0
    assert run("--lookahead", "60", load=load_fake_model, output="narrow.jsonl", **pool) == 0
    as_given, grouped, narrow = (hit_rate(tmp_path / f"{name}.jsonl") for name in ("as_given", "grouped", "narrow"))
    most = 48 / 64 * 9 / 10
    assert grouped > 0.95 * most
    assert grouped > 2 * as_given
    assert as_given < narrow < grouped
    # The answers are the same for any cache content and order, though no line has a seed.
    texts = [
        {answer["id"]: text_of(answer) for answer in read(tmp_path / f"{name}.jsonl")}
        for name in ("as_given", "grouped")
    ]
    assert texts[0] == texts[1]


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)


def test_parquet_in_and_out(run: Run, tmp_path: Path) -> None:
    rows = [{"custom_id": n, "prompt": f"p{n:02d}", "max_tokens": None if n % 2 else 2} for n in range(30)]
    write_parquet(tmp_path / "in.parquet", [*rows, {"custom_id": 30, "prompt": None, "max_tokens": 1}])
    files = {"input": "in.parquet", "output": "out.parquet"}
    assert run("--ordered", **files) == 1
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in table] == [str(n) for n in range(30)]
    assert [row["id"] for row in table] == [f"batch_req_{n + 1}" for n in range(30)]
    assert [row["text"] for row in table] == [f"p{n:02d}"[: None if n % 2 else 2] for n in range(30)]
    assert {row["status_code"] for row in table} == {200}
    assert json.loads(table[3]["body"])["choices"][0]["text"] == "p03"
    assert json.loads(table[3]["body"])["id"] == table[3]["request_id"]
    [error] = read(tmp_path / "out.parquet.errors.jsonl")
    assert (error["id"], error["error"]["code"]) == ("batch_req_31", "missing_field")

    assert run("--ordered", **files) == 1  # nothing to do
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 30
    (tmp_path / "out.parquet.errors.jsonl").unlink()
    assert run("--ordered", **files) == 1
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == table


@pytest.mark.parametrize("cut_short", ["before the output", "before the journal is removed"])
def test_a_parquet_output_that_was_cut_short_is_completed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: str
) -> None:
    write_parquet(tmp_path / "in.parquet", [{"prompt": f"p{n:02d}"} for n in range(30)])
    files = {"input": "in.parquet", "output": "out.parquet"}

    def fail(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    where = "replace" if cut_short == "before the output" else "unlink"
    monkeypatch.setattr(Path, where, fail) if where == "unlink" else monkeypatch.setattr(pq, "ParquetWriter", fail)
    assert run(**files) == 130
    monkeypatch.undo()
    assert run(**files) == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert sorted(table.column("text").to_pylist()) == [f"p{n:02d}" for n in range(30)]
    assert not (tmp_path / "out.parquet.run" / "answers.jsonl").exists()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_gives_a_clear_error_and_the_run_resumes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    """While the folder of the run is written; test_journal.py tests the files themselves."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path / "in.jsonl", {"prompt": "a"})
    with monkeypatch.context() as patch:
        patch.setattr(f"sglang_jax.server.durable.os.{call}", full)
        assert run() == 2
    assert re.search(r"cannot write .*: No space left on device; .* to resume", capsys.readouterr().err)
    assert run() == 0
    assert [text_of(answer) for answer in read(tmp_path / "out.jsonl")] == ["a"]

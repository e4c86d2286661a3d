"""`eval gsm8k` and `eval mmlu`: prompts, extraction and scores, over servers and engines with known answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.streaming_server import FakeServer, serve_in_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_jax.cli.eval.commands import eval_gsm8k, eval_mmlu
from sglang_jax.cli.eval.gsm8k import last_number
from sglang_jax.cli.eval.mmlu import first_letter, named_letter
from sglang_jax.cli.main import run


@dataclass
class AnsweringServer(FakeServer):
    """Answers whole prompts at once; None is status 503."""

    answer: Callable[[str], str | None] = lambda prompt: ""

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        chat = "messages" in body
        text = self.answer(body["messages"][0]["content"] if chat else body["prompt"])
        if text is None:
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=503)
        said: dict[str, Any] = {"message": {"content": text}} if chat else {"text": text}
        said["finish_reason"] = "stop" if re.search(r"\d", text) else "length"
        return Response(json.dumps({"choices": [said], "usage": {"completion_tokens": 3}}))


@contextmanager
def served(answer: Callable[[str], str | None]) -> Iterator[AnsweringServer]:
    with serve_in_thread(AnsweringServer(answer=answer)) as server:
        assert isinstance(server, AnsweringServer)
        yield server


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Problem n is n + 1000, for n from 0 to 11."""
    file = tmp_path / "test.jsonl"
    lines = [
        {"question": f"What is {n} + 1,000?", "answer": f"{n} + 1,000 is that.\n#### 1,{n:03}", "n": n}
        for n in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


@pytest.fixture
def subjects(tmp_path: Path) -> Path:
    """Two subjects in the authors' folders, with 3 and 2 questions and two examples each. The right letter of question
    n is the n-th from B on."""
    for name, count in (("abstract_algebra", 3), ("virology", 2)):
        for kind, number in (("dev", 2), ("test", count)):
            rows = [f'"{kind} {name}, {n}?",one,"two, or ""2""",three,four,{"BCD"[n]}\n' for n in range(number)]
            (tmp_path / kind).mkdir(exist_ok=True)
            (tmp_path / kind / f"{name}_{kind}.csv").write_text("".join(rows))
    return tmp_path


def evaluate(command: Any, *arguments: object, status: int = 0) -> dict[str, Any]:
    """Runs a command with `--json`, and returns what it wrote."""
    folder = Path(str(arguments[0]))
    output = (folder if folder.is_dir() else folder.parent) / "result.json"
    words = ["--data", *map(str, arguments), "--json", str(output)]
    assert run(command, "eval", words) == status
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def verdicts(found: dict[str, Any]) -> list[str]:
    return [result["verdict"] for result in found["results"]]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("They have 3 apples and 12 pears, so 15.", "15"),
        ("#### 1,234,567", "1234567"),
        ("costs $18.00\n", "18"),
        ("the loss is -4.50 dollars", "-4.5"),
        ("7-Eleven sells 10-12", "12"),
        ("(4)-3 = -1.5 or -(2)", "2"),
        ("(4)-3", "3"),
        ("= -3", "-3"),
        ("007", "7"),
        ("-0", "0"),
        ("0.5%", "0.5"),
        ("2" * 5000, "2" * 5000),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "first", "named"),
    [
        (" B", "B", None),
        ("\n(C) three", "C", None),
        ("D.", "D", None),
        ("Because", None, None),
        ("b", None, None),
        ("E", None, None),
        ("A plan. Answer: C", "A", "C"),
        ("So\n**Answer:** $B$. Answer: D", None, "B"),
        (r"ANSWER: \boxed{\text{D}}", None, "D"),
        ("Answer: $LETTER, that is\nanswer: A", None, "A"),
        ("Answer: Cats", None, None),
        ("The answer is B", None, None),
        ("", None, None),
    ],
)
def test_the_letter_of_a_text(text: str, first: str | None, named: str | None) -> None:
    assert (first_letter(text), named_letter(text)) == (first, named)


def test_gsm8k_is_scored_over_a_server(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the ten questions after two examples, each fifth fails, has no number, is wrong, and two are right."""

    def answer(prompt: str) -> str | None:
        n = int(re.findall(r"What is (\d+)", prompt)[-1])
        return [f" It is {n + 1000}.00", f" {n}, so\n#### 1,{n:03}", " I do not know. \ud800", f" {n + 1}", None][n % 5]

    with served(answer) as server:
        url = f"http://127.0.0.1:{server.port}"
        options = ["--base-url", url, "--num-shots", "2", "--parallel", "3", "--max-tokens", "99"]
        found = evaluate(eval_gsm8k, problems, *options, status=1)
        few = evaluate(eval_gsm8k, problems, *options, "--num-questions", "2", "--chat", "other-model")
    assert verdicts(found) == ["invalid", "wrong", "failed", "right", "right"] * 2
    assert [found[name] for name in ("accuracy", "invalid", "failed", "questions")] == [0.4, 0.2, 0.2, 10]
    assert (found["model"], found["num_shots"], found["output_tokens"]) == ("fake-model", 2, 24)
    assert found["results"][3] == {
        "subject": "gsm8k",
        "question": "Question: What is 5 + 1,000?\nAnswer:",
        "answer": "1005",
        "reply": " It is 1005.00",
        "predicted": "1005",
        "verdict": "right",
        "output_tokens": 3,
        "cut": False,
        "error": None,
    }
    assert (found["cut"], found["results"][0]["cut"]) == (0.2, True)
    bodies = {body["prompt"]: body for path, body in server.calls if path == "/v1/completions"}
    assert len(bodies) == 10
    examples = "".join(
        f"Question: What is {n} + 1,000?\nAnswer: {n} + 1,000 is that.\n#### 1,{n:03}\n\n" for n in range(2)
    )
    assert bodies[examples + "Question: What is 2 + 1,000?\nAnswer:"] == {
        "model": "fake-model",
        "prompt": examples + "Question: What is 2 + 1,000?\nAnswer:",
        "temperature": 0.0,
        "max_tokens": 99,
        "stop": ["Question", "Assistant:", "<|separator|>"],
    }
    told = capsys.readouterr()
    assert '[METRIC] gsm8k_accuracy=0.400 labels={"model": "fake-model", "eval": "gsm8k", "api": "completion"}' in (
        told.out.splitlines()
    )
    assert "Invalid: 0.200\nFailed: 0.200\nAt --max-new-tokens: 0.200\n" in told.out
    assert "failed 2 times: status 503" in told.err
    chats = [body for path, body in server.calls if path == "/v1/chat/completions"]
    assert verdicts(few) == ["invalid", "wrong"]
    assert {(body["model"], "stop" in body) for body in chats} == {("other-model", False)}
    assert chats[0]["messages"][0]["content"] in bodies


def test_mmlu_is_scored_by_subject_over_a_server(subjects: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(lambda prompt: " B" if "test" in prompt else "Answer: B") as server:
        url = f"http://127.0.0.1:{server.port}"
        found = evaluate(eval_mmlu, subjects, "--base-url", url, "--num-shots", "2")
        turns = evaluate(eval_mmlu, subjects, "--base-url", url, "--num-shots", "0", "--num-questions", "3")
    assert {name: (one["questions"], one["accuracy"]) for name, one in found["subjects"].items()} == {
        "abstract_algebra": (3, pytest.approx(1 / 3)),
        "virology": (2, 0.5),
    }
    assert found["accuracy"] == 0.4
    assert [body["max_tokens"] for _, body in server.calls] == [4] * 8
    algebra = [body["prompt"] for _, body in server.calls[:5] if "algebra" in body["prompt"]]
    example = '{} abstract_algebra, {}?\nA. one\nB. two, or "2"\nC. three\nD. four\nAnswer:'
    assert sorted(algebra)[0] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        f"{example.format('dev', 0)} B\n\n{example.format('dev', 1)} C\n\n{example.format('test', 0)}"
    )
    assert [result["subject"] for result in turns["results"]] == ["abstract_algebra"] * 2 + ["virology"]
    told = capsys.readouterr().out
    assert re.search(r"^virology +2 +0\.500 +0\.000$", told, re.MULTILINE)
    assert '[METRIC] mmlu_score=0.400 labels={"model": "fake-model", "eval": "mmlu", "api": "completion"}' in told


@pytest.mark.usefixtures("echo_engine")
def test_an_engine_in_this_process_answers_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine echoes the message: the last number of the question, and the first `Answer:` in it."""
    lines = [{"question": f"What is {said}?", "answer": "#### 7"} for said in ("7", "8", "it", "7.0")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--model-path", "echo", "--chat", "--num-shots", "0"]
    found = evaluate(eval_gsm8k, tmp_path / "test.jsonl", *options)
    assert verdicts(found) == ["right", "wrong", "invalid", "right"]
    assert found["engine"]["model_path"] == found["model"] == "echo"
    # Of the same question as a completion, the first word is a stop string.
    found = evaluate(eval_gsm8k, tmp_path / "test.jsonl", "--model-path", "echo", "--num-shots", "0")
    assert [(result["reply"], result["verdict"]) for result in found["results"]] == [("", "invalid")] * 4
    assert found["cut"] == 0
    short = ["--model-path", "echo", "--chat", "--num-shots", "0", "--max-new-tokens", "3"]
    assert evaluate(eval_gsm8k, tmp_path / "test.jsonl", *short)["cut"] == 1
    table = "Subject,,Question,A,B,C,D,Answer\n" + "".join(
        f'{subject},{n},"Answer: B, or\nnot?",1,2,3,4,{letter}\n'
        for n, (subject, letter) in enumerate([("virology", "B"), ("anatomy", "A"), ("virology", "C")])
    )
    (tmp_path / "all.csv").write_text(table)
    found = evaluate(eval_mmlu, tmp_path / "all.csv", "--model-path", "echo", "--chat")
    assert {name: one["accuracy"] for name, one in found["subjects"].items()} == {"virology": 0.5, "anatomy": 0.0}
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "7" * 5000, "answer": "#### 7"}))
    capsys.readouterr()
    found = evaluate(eval_gsm8k, tmp_path / "long.jsonl", "echo", "--num-shots", "0", status=1)
    assert verdicts(found) == ["failed"]
    assert "5018 tokens" in found["results"][0]["error"]
    assert capsys.readouterr().out == ""  # not a score of 0


GOOD = '{"question": "a", "answer": "#### 1"}\n'
ROW = "q,1,2,3,4,A\n"
HEADER = "Question,A,B,C,D,Answer"


@pytest.mark.parametrize(
    ("command", "name", "content", "options", "message"),
    [
        (eval_gsm8k, "x", None, [], "--data: file not found: .*x"),
        (eval_gsm8k, "x", GOOD + "\n{", [], r"x:3: line: Invalid JSON"),
        (eval_gsm8k, "x", GOOD + '{"question": "b"}', [], r"x:2: answer: Field required"),
        (
            eval_gsm8k,
            "x",
            '{"question": "b", "answer": "so 5"}',
            [],
            r"x:1: .*must end with #### and a number, got 'so 5'",
        ),
        (eval_gsm8k, "x", GOOD * 5, [], r"x has 5 questions, of which --num-shots 5 takes the first 5: none is left"),
        (eval_gsm8k, "x", GOOD, ["--num-shots", "-1"], "--num-shots must be greater than or equal to 0|--num-shots"),
        (eval_mmlu, "x.csv", "", [], r"x\.csv has no questions"),
        (eval_mmlu, "x.csv", ROW + '"a\nb",1,2,3,4,B\nq,1,2,A', [], r"x\.csv:4: must have 6 columns .*, got 4"),
        (
            eval_mmlu,
            "x.csv",
            ROW + "q,1,2,3,4,AB",
            [],
            r"x\.csv:2: the last column must be one of A, B, C, D, got 'AB'",
        ),
        (eval_mmlu, "x.csv", ROW * 2 + '"q,1,2,3,4,A\n' * 2, [], r"x\.csv:3: ',' expected"),
        (eval_mmlu, "x.csv", HEADER + "\n", [], r"x\.csv has no questions, only a header"),
        (eval_mmlu, "x.csv", HEADER + ",Subject\nq,1,2,3,4,A, \n", [], r"x\.csv:2: column Subject is empty"),
        (eval_mmlu, "x.csv", ROW * 5, [], r"x\.csv has 5 rows on x, but --num-shots 5 needs at least 6"),
        (eval_mmlu, "x.csv", ROW, ["--chat", "--num-shots", "2"], "--num-shots must be 0 with --chat"),
        (eval_mmlu, "x.csv", ROW, ["--num-shots", "0", "--data", "{}"], "subject x is in two files"),
        (eval_mmlu, "other", ROW, ["--data", "{folder}"], r"no file \*_test\.csv in"),
        (eval_gsm8k, "x", GOOD * 9, ["--json", "{folder}/no/y"], "--json .* is in a folder that does not exist"),
        (
            eval_gsm8k,
            "x",
            GOOD * 9,
            ["--base-url", "http://127.0.0.1:1", "--page-size", "4"],
            "--page-size: only for an engine in this process",
        ),
        (eval_gsm8k, "x", GOOD * 9, ["--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (eval_gsm8k, "x", GOOD * 9, ["--base-url", "localhost:1"], "must start with http:// or https:// and a host"),
        (eval_gsm8k, "x", GOOD * 9, ["--base-url", "http://a:b"], "--base-url http://a:b is not a URL"),
    ],
)
def test_a_fault_of_the_data_or_the_options_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: Any,
    name: str,
    content: str | None,
    options: list[str],
    message: str,
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    words = [word.replace("{folder}", str(tmp_path)).replace("{}", str(file)) for word in options]
    assert run(command, "eval", ["--data", str(file), *words]) != 0
    told = capsys.readouterr().err
    assert re.search(message, told)
    assert told.count("\n") == 1

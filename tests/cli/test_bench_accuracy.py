"""`bench accuracy`: its requests to the engine, and its scores from the logprobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_jax.cli.bench.accuracy import Question, _values, answer_start, bench_accuracy, read_task, score
from sglang_jax.cli.main import run
from sglang_jax.engine.types import TokenLogprob

ROOT = Path(__file__).parents[2]


def question(*choices: str, answer: int = 0) -> Question:
    return Question(prompt="q", choices=choices, answer=answer)


def test_the_most_likely_answer_counts() -> None:
    questions = [question(" a", " b"), question(" a", " b", answer=1), question(" short", " much longer")]
    found = [[[-1.0], [-2.0]], [[-1.0, -0.5], [-1.6]], [[-3.0], [-1.0, -2.5]]]
    figures = score(questions, found)
    assert figures.questions == 3
    assert figures.accuracy == pytest.approx(2 / 3)
    # By character the long answer is more likely.
    assert figures.per_character == pytest.approx(1 / 3)
    assert figures.nll == pytest.approx((1.0 + 1.6 + 3.0) / 3)


@pytest.mark.parametrize(
    ("prompt", "whole", "start"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], [1, 2, 9, 5], 2),  # the prompt's last token was merged into another one
        ([1, 2, 3], [1, 2, 3], 2),
        ([1], [7, 8], 1),  # a first token has no logprob
    ],
)
def test_the_start_of_an_answer_is_found_in_the_tokens(prompt: list[int], whole: list[int], start: int) -> None:
    assert answer_start(prompt, whole) == start


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line: Invalid JSON"),
        ('{"prompt": "a", "choices": ["b", "c"]}', "answer: Field required"),
        (
            '{"prompt": "a", "choices": ["b", "c"], "answer": 2}',
            "answer must be the index of a choice, from 0 to 1, got 2",
        ),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "a choice is empty"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "choices: .* at least 2"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(f'{{"prompt": "a", "choices": ["b", "c"], "answer": 0}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"task\.jsonl:3: .*{message}"):
        read_task(file)


@pytest.mark.parametrize("logprobs", [None, [], [-1.0, None]])
def test_an_answer_without_logprobs_is_never_the_most_likely(logprobs: list[float | None] | None) -> None:
    tokens = None if logprobs is None else [TokenLogprob(1, logprob, ()) for logprob in logprobs]
    with pytest.raises(RuntimeError, match=r"the engine gave logprobs for \d of \d tokens"):
        _values(tokens)


@pytest.mark.usefixtures("echo_engine")
def test_a_task_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same question twice, each with the other answer marked as right: exactly one is scored right."""
    task, results = tmp_path / "task.jsonl", tmp_path / "results.jsonl"
    lines = [
        {"prompt": "abc", "choices": ["a", "x"], "answer": 0},
        {"prompt": "abc", "choices": ["x", "a"], "answer": 0},
    ]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model-path", "echo", "--task", str(task), "--result-filename", str(results)]
    assert run(bench_accuracy, "bench", arguments) == 0
    assert "2 questions: accuracy 50.0%, " in capsys.readouterr().out
    (line,) = map(json.loads, results.read_text().splitlines())
    assert (line["questions"], line["accuracy"]) == (2, 0.5)
    assert line["nll"] > 0


def test_the_facts_task_has_valid_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from facts_task import questions

    made = questions()
    assert made == questions()
    assert len(made) >= 200
    for one in map(Question.model_validate, made):
        assert len(set(one.choices)) == 4

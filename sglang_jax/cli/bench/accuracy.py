"""`bench accuracy`: multiple-choice questions, scored by the likelihood that the model gives to each answer, without
generating: an answer is appended to its question, and the logprobs of its tokens are summed. The score shows the loss
of an 8-bit cache, another attention or a converted checkpoint, and whether it works at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.json_lines import read_json_lines
from sglang_jax.cli.options import options_of, with_model
from sglang_jax.cli.result_file import append_json_line, check_result_file
from sglang_jax.cli.starting import start_engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.types import TokenLogprob
from sglang_jax.errors import ConfigError


class Question(BaseModel):
    """A line of a task. An answer is appended to its prompt unchanged: a space between them must be part of one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str = Field(min_length=1)
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Question:
        if self.answer >= len(self.choices):
            raise ValueError(
                f"answer must be the index of a choice, from 0 to {len(self.choices) - 1}, got {self.answer}"
            )
        if not all(self.choices):
            raise ValueError("a choice is empty")
        return self


class AccuracyConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Path = Field(description='JSON lines file of questions: {"prompt", "choices", "answer"}')
    result_filename: Path | None = Field(None, description="file to append the results to, as a line of JSON")


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a task. `accuracy`: fraction of questions whose correct answer has the highest logprob;
    `per_character`: with logprobs divided by the answer's characters, which does not favour short answers; `nll`: mean
    negative logprob per token of correct answers."""

    questions: int
    accuracy: float
    per_character: float
    nll: float


def read_task(file: Path) -> list[Question]:
    """Reads the questions of a file. Raises `ConfigError` with the invalid line."""
    questions = read_json_lines(file, "--task", Question)
    if not questions:
        raise ConfigError(f"task {file} has no questions")
    return questions


def answer_start(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """Returns where an answer's tokens start in those of prompt and answer: after their common tokens, because the
    prompt's last token may change when text follows; at least 1, because the first token has no logprob."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(map(len, (prompt, whole)))
    )
    return max(min(shared, len(whole) - 1), 1)


def score(questions: Sequence[Question], found: Sequence[Sequence[Sequence[float]]]) -> Score:
    """Returns the score. `found`: logprobs by question, choice and token."""
    right = per_character = 0
    of_answers: list[float] = []
    for question, choices in zip(questions, found, strict=True):
        sums = [math.fsum(logprobs) for logprobs in choices]
        means = [total / len(choice) for total, choice in zip(sums, question.choices, strict=True)]
        right += sums.index(max(sums)) == question.answer
        per_character += means.index(max(means)) == question.answer
        of_answers += choices[question.answer]
    count = len(questions)
    return Score(count, right / count, per_character / count, -math.fsum(of_answers) / len(of_answers))


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@options_of(engine=EngineConfig, accuracy=AccuracyConfig)
def bench_accuracy(engine: EngineConfig, accuracy: AccuracyConfig, model: str | None) -> int:
    """Score MODEL (as for --model-path) on multiple-choice questions, by the likelihood of each answer."""
    engine = with_model(engine, model)
    check_result_file(accuracy.result_filename, "--result-filename")
    questions = read_task(accuracy.task)
    with start_engine(engine) as running:

        def requests() -> Iterator[dict[str, Any]]:
            for question in questions:
                prompt = running.encode(question.prompt)
                for choice in question.choices:
                    whole = running.encode(question.prompt + choice)
                    yield {
                        "prompt": whole,
                        "max_new_tokens": 0,
                        "return_logprob": True,
                        "logprob_start_len": answer_start(prompt, whole),
                    }

        logprobs = []
        for result in running.batch(requests(), ordered=True):
            if result.error is not None:
                raise result.error
            logprobs.append(_values(result.outputs[0].prompt_logprobs))
    choices = iter(logprobs)
    figures = score(questions, [[next(choices) for _ in question.choices] for question in questions])
    click.echo(
        f"{figures.questions} questions: accuracy {figures.accuracy:.1%}, by logprob per character "
        f"{figures.per_character:.1%}; {figures.nll:.4f} nats per token of right answers"
    )
    if accuracy.result_filename is not None:
        line = {
            **engine.model_dump(mode="json"),
            "task": str(accuracy.task),
            "questions": figures.questions,
            "accuracy": figures.accuracy,
            "accuracy_per_character": figures.per_character,
            "nll": figures.nll,
        }
        append_json_line(accuracy.result_filename, "--result-filename", line)
    return 0


def _values(tokens: Sequence[TokenLogprob] | None) -> list[float]:
    """Returns the logprobs of an answer's tokens. Raises `RuntimeError` for a missing one: the sum would be too
    high."""
    values = [token.logprob for token in tokens or () if token.logprob is not None]
    if not values or len(values) < len(tokens or ()):
        raise RuntimeError(f"the engine gave logprobs for {len(values)} of {len(tokens or ())} tokens of an answer")
    return values

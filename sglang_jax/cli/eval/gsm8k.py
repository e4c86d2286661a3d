"""GSM8K: word problems from grade school, whose answers are numbers. Its authors publish JSON lines with `question` and
`answer`: the solution in words, and the number after `####`."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_jax.cli.eval.task import Question, Task
from sglang_jax.cli.json_lines import read_json_lines
from sglang_jax.errors import ConfigError

NAME = "gsm8k"
METRIC = "gsm8k_accuracy"
SHOTS = 5
MAX_NEW_TOKENS = 512

STOP = ("Question", "Assistant:", "<|separator|>")
"""End a completion: the model continues with another question, or with marks of a chat."""

MARK = "####"
NUMBER = re.compile(r"(?:(?<![\w)])-)?[0-9]+(?:\.[0-9]*)?")
"""A minus after a digit, a letter or a bracket is a dash, or subtracts."""


class Problem(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(frozen=True)

    question: str = Field(min_length=1)
    answer: str

    @model_validator(mode="after")
    def _check(self) -> Problem:
        if self.number is None:
            raise ValueError(f"answer must end with {MARK} and a number, got {self.answer[-40:]!r}")
        return self

    @property
    def number(self) -> str | None:
        _, mark, after = self.answer.rpartition(MARK)
        return last_number(after) if mark else None

    @property
    def text(self) -> str:
        return f"Question: {self.question}\nAnswer:"


def last_number(text: str) -> str | None:
    """Returns the last number of a text in its shortest form: `1,200.50` is `1200.5`, `007.` is `7`. None without
    one."""
    found = NUMBER.findall(text.replace(",", ""))
    if not found:
        return None
    number: str = found[-1]
    whole, _, fraction = number.removeprefix("-").partition(".")
    fraction = fraction.rstrip("0")
    size = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return f"-{size}" if number.startswith("-") and size != "0" else size


def read_gsm8k(data: Path, *, num_shots: int | None, num_questions: int | None, chat: bool) -> Task:
    """Returns the task of a file. Its first lines are the examples before each question and are not asked; the next
    `num_questions` are, or all of them. Raises `ConfigError` with an invalid line, or if there are too few lines."""
    problems = read_json_lines(data, "--data", Problem)
    shots = SHOTS if num_shots is None else num_shots
    if len(problems) <= shots:
        raise ConfigError(
            f"--data {data} has {len(problems)} questions, of which --num-shots {shots} takes the first {shots}: "
            "none is left to ask"
        )
    examples = "".join(f"{one.text} {one.answer}\n\n" for one in problems[:shots])
    asked = problems[shots:] if num_questions is None else problems[shots : shots + num_questions]
    questions = [Question(NAME, examples, one.text, one.number or "") for one in asked]
    return Task(NAME, METRIC, shots, questions, last_number, () if chat else STOP, MAX_NEW_TOKENS)

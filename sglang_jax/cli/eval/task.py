"""Questions, answers of a model, and their score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Question:
    """`examples`: the part of the prompt before the question; `text`: the question as the model sees it; `answer`: the
    right answer, as `Task.extract` returns it."""

    subject: str
    examples: str
    text: str
    answer: str

    @property
    def prompt(self) -> str:
        return self.examples + self.text


@dataclass(frozen=True, slots=True)
class Task:
    """The questions of a run. `metric`: the name of the score in published logs; `num_shots`: examples before each
    question; `extract`: returns the answer that a text of the model gives, None if it gives none; `stop`: strings that
    end a text; `max_new_tokens`: the default."""

    name: str
    metric: str
    num_shots: int
    questions: Sequence[Question]
    extract: Callable[[str], str | None]
    stop: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for a question. `output_tokens`: 0 if the server does not send them; `error`: why nothing did;
    `cut`: whether it ended at the maximum of tokens."""

    text: str = ""
    output_tokens: int = 0
    error: str | None = None
    cut: bool = False


class Verdict(StrEnum):
    """`INVALID`: the text gives no answer; `FAILED`: the request failed."""

    RIGHT = "right"
    WRONG = "wrong"
    INVALID = "invalid"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """A question with its reply. `predicted`: the answer in the reply's text."""

    question: Question
    reply: Reply
    predicted: str | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Score:
    """Fractions of `questions`. Questions without an answer count as wrong in `accuracy`; `cut`: of replies that ended
    at the maximum of tokens."""

    questions: int
    accuracy: float
    invalid: float
    failed: float
    cut: float


def judge(task: Task, replies: Sequence[Reply]) -> list[Result]:
    """Returns the results of the task's questions. `replies`: one for each question, in their order."""
    results = []
    for question, reply in zip(task.questions, replies, strict=True):
        predicted = task.extract(reply.text) if reply.error is None else None
        if reply.error is not None:
            verdict = Verdict.FAILED
        elif predicted is None:
            verdict = Verdict.INVALID
        else:
            verdict = Verdict.RIGHT if predicted == question.answer else Verdict.WRONG
        results.append(Result(question, reply, predicted, verdict))
    return results


def score(results: Sequence[Result]) -> Score:
    """Returns the score of at least one result."""
    verdicts = [result.verdict for result in results]
    count = len(verdicts)
    right, invalid, failed = (verdicts.count(one) / count for one in (Verdict.RIGHT, Verdict.INVALID, Verdict.FAILED))
    return Score(count, right, invalid, failed, cut=sum(result.reply.cut for result in results) / count)


def score_by_subject(results: Sequence[Result]) -> Mapping[str, Score]:
    """Returns the score of each subject, in the order of the results."""
    subjects: dict[str, list[Result]] = {}
    for result in results:
        subjects.setdefault(result.question.subject, []).append(result)
    return {subject: score(each) for subject, each in subjects.items()}

"""MMLU: questions on 57 subjects with four choices. Its authors publish a CSV file per subject, without a header, whose
rows are the question, four choices and a letter; those in `dev/` are examples for those in `test/`. One file of all
subjects, with a header, is also in use."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain, zip_longest
from pathlib import Path

from sglang_jax.cli.eval.task import Question, Task
from sglang_jax.cli.json_lines import read_text
from sglang_jax.errors import ConfigError

NAME = "mmlu"
METRIC = "mmlu_score"
LETTERS = "ABCD"
SHOTS = 5

COMPLETION_TOKENS = 4
"""Enough for a letter that a tokenizer does not join with the space before it."""

CHAT_TOKENS = 2048
"""Enough to think before the answer."""

COLUMNS = ("Question", *LETTERS, "Answer")
"""The header of a file of all subjects; further columns are `Subject` and a number."""

INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
)

FIRST_LETTER = re.compile(rf"\s*\(?([{LETTERS}])(?!\w)")
NAMED_LETTER = re.compile(rf"(?i:answer)[ \t*]*:[ \t*$({{]*(?:\\(?:boxed|text|mathrm|mathbf)\{{)*([{LETTERS}])(?!\w)")


@dataclass(frozen=True, slots=True)
class Row:
    question: str
    choices: Sequence[str]
    letter: str

    def as_example(self) -> str:
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{self.question}{choices}\nAnswer:"

    def as_message(self) -> str:
        choices = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{INSTRUCTION}\n\n{self.question}\n\n{choices}"


@dataclass(frozen=True, slots=True)
class Subject:
    """`examples`: rows that are shown before each question; None if the data has no separate ones. `source`: the file
    that errors name."""

    source: Path
    rows: Sequence[Row]
    examples: Sequence[Row] | None = None


def first_letter(text: str) -> str | None:
    """Returns the letter with which a completion starts, None if it starts with something else."""
    found = FIRST_LETTER.match(text)
    return found[1] if found else None


def named_letter(text: str) -> str | None:
    """Returns the letter after the first `Answer:` of a reply that has one, also with Markdown or TeX around it; None
    without one."""
    found = NAMED_LETTER.search(text)
    return found[1] if found else None


def read_mmlu(data: Sequence[Path], *, num_shots: int | None, num_questions: int | None, chat: bool) -> Task:
    """Returns the task of files and folders. A subject's examples are those of its `dev` file, otherwise its own first
    rows, which are then not asked. `num_questions`: taken from all subjects in turn. Raises `ConfigError` for an
    invalid row, too few rows, and examples in a chat."""
    if chat and num_shots:
        raise ConfigError(f"--num-shots must be 0 with --chat, which asks without examples, got {num_shots}")
    subjects = _read_subjects(data)
    shots = 0 if chat else SHOTS if num_shots is None else num_shots
    by_subject = [_questions(name, subject, shots, chat) for name, subject in subjects.items()]
    in_turn = [one for together in zip_longest(*by_subject) for one in together if one is not None]
    places = {name: place for place, name in enumerate(subjects)}
    asked = sorted(in_turn[:num_questions], key=lambda one: places[one.subject])  # a subject's prompts share a prefix
    if chat:
        return Task(NAME, METRIC, shots, asked, named_letter, (), CHAT_TOKENS)
    return Task(NAME, METRIC, shots, asked, first_letter, (), COMPLETION_TOKENS)


def _questions(name: str, subject: Subject, shots: int, chat: bool) -> list[Question]:
    if chat:
        return [Question(name, "", row.as_message(), row.letter) for row in subject.rows]
    if subject.examples is None:
        examples, asked, needed = subject.rows[:shots], subject.rows[shots:], shots + 1
    else:
        examples, asked, needed = subject.examples[:shots], subject.rows, shots
    available = len(subject.rows if subject.examples is None else subject.examples)
    if available < needed:
        raise ConfigError(
            f"{subject.source} has {available} rows on {name}, but --num-shots {shots} needs at least {needed}"
        )
    head = f"The following are multiple choice questions (with answers) about {name.replace('_', ' ')}.\n\n"
    shown = head + "".join(f"{row.as_example()} {row.letter}\n\n" for row in examples)
    return [Question(name, shown, row.as_example(), row.letter) for row in asked]


def _read_subjects(data: Sequence[Path]) -> Mapping[str, Subject]:
    subjects: dict[str, Subject] = {}
    for file in chain.from_iterable(map(_files, data)):
        for name, subject in _subjects_of(file):
            if name in subjects:
                raise ConfigError(f"--data: subject {name} is in two files: {subjects[name].source} and {file}")
            subjects[name] = subject
    return subjects


def _files(place: Path) -> list[Path]:
    """Returns the files of questions of a folder: those in its folder `test`, or its own."""
    if not place.is_dir():
        return [place]
    files = sorted(place.glob("test/*_test.csv")) or sorted(place.glob("*_test.csv"))
    if not files:
        raise ConfigError(f"--data: no file *_test.csv in {place} or {place / 'test'}")
    return files


def _subjects_of(file: Path) -> Iterator[tuple[str, Subject]]:
    """Yields the subjects of a file, each with its name: several if it has a header."""
    lines = list(_lines(file))
    header = [word.strip() for word in lines[0][1]]
    if set(COLUMNS) <= set(header):
        if len(lines) == 1:
            raise ConfigError(f"--data {file} has no questions, only a header")
        places = [header.index(column) for column in COLUMNS]
        subject_at = header.index("Subject") if "Subject" in header else None
        grouped: dict[str, list[Row]] = {}
        for number, words in lines[1:]:
            if len(words) != len(header):
                raise ConfigError(f"{file}:{number}: must have {len(header)} columns like the header, got {len(words)}")
            name = file.stem if subject_at is None else words[subject_at].strip()
            if not name:
                raise ConfigError(f"{file}:{number}: column Subject is empty")
            grouped.setdefault(name, []).append(_row(file, number, [words[place] for place in places]))
        yield from ((name, Subject(file, rows)) for name, rows in grouped.items())
        return
    name = re.sub("_(test|val|dev)$", "", file.stem)
    development = next((one for one in _development_files(file, name) if one.is_file()), None)
    examples = None if development is None else [_row(development, *line) for line in _lines(development)]
    rows = [_row(file, *line) for line in lines]
    yield name, Subject(file if development is None else development, rows, examples)


def _development_files(file: Path, name: str) -> list[Path]:
    places = [file.parent / f"{name}_dev.csv", file.parent.parent / "dev" / f"{name}_dev.csv"]
    return [place for place in places if place != file]


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows of a CSV file, which is not empty, each with the number of its first line."""
    text = read_text(file, "--data")
    if not text.strip():
        raise ConfigError(f"--data {file} has no questions")
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    number = 1
    try:
        for words in reader:
            if words:
                yield number, words
            number = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{file}:{number}: {error}") from error


def _row(file: Path, number: int, words: Sequence[str]) -> Row:
    if len(words) != len(COLUMNS):
        raise ConfigError(
            f"{file}:{number}: must have {len(COLUMNS)} columns (question, four choices, letter), got {len(words)}"
        )
    letter = words[-1].strip()
    if len(letter) != 1 or letter not in LETTERS:
        raise ConfigError(f"{file}:{number}: the last column must be one of {', '.join(LETTERS)}, got {letter[:40]!r}")
    return Row(words[0], words[1:-1], letter)

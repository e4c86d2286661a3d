"""Writes a task for `bench accuracy`: facts that a small model knows, each with three wrong answers.

    python benchmarks/facts_task.py facts.jsonl
    sglang-jax bench accuracy --model-path demo --task facts.jsonl

The lines are made from lists and a seed, and are the same every time. Wrong answers are right answers to other
questions of the same kind.
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
import string
from pathlib import Path

CAPITALS = {
    **{"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon"},
    **{"Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm"},
    **{"Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Ireland": "Dublin", "Belgium": "Brussels"},
    **{"Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi"},
    **{"Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Iran": "Tehran"},
    **{"Iraq": "Baghdad", "Israel": "Jerusalem", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana"},
    **{
        "Argentina": "Buenos Aires",
        "Chile": "Santiago",
        "Peru": "Lima",
        "Australia": "Canberra",
        "Cambodia": "Phnom Penh",
    },
    **{
        "South Korea": "Seoul",
        "Vietnam": "Hanoi",
        "the Philippines": "Manila",
        "England": "London",
        "Nepal": "Kathmandu",
    },
}
OPPOSITES = (
    "hot cold, big small, up down, left right, black white, day night, open closed, fast slow, high low, old new, "
    "rich poor, wet dry, full empty, hard soft, heavy light, strong weak, long short, early late, happy sad, "
    "true false, in out, on off, love hate, war peace, win lose, buy sell, begin end, push pull, north south, east west"
)
PLURALS = (
    "child children, foot feet, tooth teeth, mouse mice, man men, woman women, leaf leaves, knife knives, wolf wolves, "
    "city cities, baby babies, box boxes, church churches, hero heroes, bus buses, country countries, life lives, "
    "person people, goose geese, half halves"
)
COUNTED_TO = 50
LETTERS_BEFORE = 5


def pairs(text: str) -> list[tuple[str, str]]:
    """Parses `a b, c d`."""
    return [(first, second) for first, second in (pair.split() for pair in text.split(", "))]


def kinds() -> list[list[tuple[str, str]]]:
    """Prompts and right answers, by kind."""
    days, months, letters = list(calendar.day_name), list(calendar.month_name)[1:], string.ascii_uppercase
    return [
        [(f"The capital of {country} is", f" {city}") for country, city in CAPITALS.items()],
        [(f"The opposite of {word} is", f" {other}") for word, other in pairs(OPPOSITES)],
        [(f"The opposite of {other} is", f" {word}") for word, other in pairs(OPPOSITES)],
        [(f"One {word}, two", f" {several}") for word, several in pairs(PLURALS)],
        [(f"The day after {days[i]} is", f" {days[(i + 1) % 7]}") for i in range(7)],
        [(f"The month after {months[i]} is", f" {months[(i + 1) % 12]}") for i in range(12)],
        [
            (f"{', '.join(letters[i - LETTERS_BEFORE : i])},", f" {letters[i]}")
            for i in range(LETTERS_BEFORE, len(letters))
        ],
        [(f"{n - 3}, {n - 2}, {n - 1},", f" {n}") for n in range(4, COUNTED_TO)],
    ]


def questions(seed: int = 0) -> list[dict[str, object]]:
    """All questions, each with four choices."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for kind in kinds():
        answers = sorted({answer for _, answer in kind})
        for prompt, answer in kind:
            choices = [answer, *rng.sample([other for other in answers if other != answer], 3)]
            rng.shuffle(choices)
            made.append({"prompt": prompt, "choices": choices, "answer": choices.index(answer)})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a task of facts for `bench accuracy`.")
    parser.add_argument("file", type=Path, nargs="?", default=Path("facts.jsonl"))
    file = parser.parse_args().file
    made = questions()
    file.write_text("".join(json.dumps(question) + "\n" for question in made), encoding="utf-8")
    print(f"{len(made)} questions in {file}")


if __name__ == "__main__":
    main()

"""The tutorial's commands run as printed; its outputs, the picture of a terminal and README's badges are true."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
PAGE = (ROOT / "docs/tutorial.md").read_text()
README = (ROOT / "README.md").read_text()
FIRST_SCREEN = README.partition("## ")[0]
TERMINAL = runpy.run_path(str(IMAGES / "draw_terminal.py"))
BADGES = runpy.run_path(str(IMAGES / "draw_badges.py"))


@pytest.fixture(scope="module")
def recorded() -> list[Any]:
    return [TERMINAL["Ran"](**one) for one in json.loads((IMAGES / "terminal.json").read_text())]


def test_the_page_shows_the_recorded_run(recorded: list[Any]) -> None:
    """After a change of the page: `python docs/images/draw_terminal.py --record`."""
    commands = [text for _, language, text in TERMINAL["blocks"](PAGE) if language == "sh"]
    assert [one.command for one in recorded] == [text for text in commands if text not in TERMINAL["INSTALLED"]]
    assert TERMINAL["with_outputs"](PAGE, recorded) == PAGE


def test_the_terminal_shows_commands_and_outputs_of_the_recorded_run(recorded: list[Any]) -> None:
    drawn = (IMAGES / "terminal.svg").read_text()
    assert drawn == TERMINAL["draw"](recorded)
    shown = re.findall(r'<text class="output"[^>]*>(.*?)</text>', drawn)
    outputs = [one.output.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for one in recorded]
    assert len(shown) >= 6
    assert [line for line in shown if not any(line in output for output in outputs)] == []


def test_badges_say_what_the_project_says() -> None:
    found = {name: badge[:2] for name, badge in BADGES["badges"]().items()}
    named = dict(re.findall(r"!\[([^\]]+)\]\(docs/images/badge_(\w+)\.svg\)", FIRST_SCREEN))
    assert {name: text.lower() for text, name in named.items()} == {
        name: (f"{label} {value}" if name == "python" else f"{label}: {value}").lower()
        for name, (label, value) in found.items()
    }
    for name, badge in BADGES["badges"]().items():
        assert (IMAGES / f"badge_{name}.svg").read_text() == BADGES["draw"](*badge)


def test_the_first_screen_loads_nothing_from_elsewhere_and_has_true_figures() -> None:
    assert all("://" not in target for target in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", README))
    assert "REPOSITORY" not in README
    figures = json.loads((IMAGES / "decode_cpu.json").read_text())["output tokens per second"]
    pairs = zip(figures["Torch backend"], figures["transformers generate"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times the tokens per second of transformers" in FIRST_SCREEN


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_command_runs_as_printed(tmp_path: Path) -> None:
    """Against one server, which starts like that of `make serve`. Texts may differ from the page's by the processor."""
    ran = TERMINAL["run_page"](PAGE, tmp_path, TERMINAL["free_port"]())
    assert [one for one in ran if one.status] == []
    outputs = {one.command: one.output for one in ran}
    assert outputs["make serve"].endswith("serving demo at http://127.0.0.1:30000.")
    [answer] = [json.loads(one.output) for one in ran if one.command.startswith("curl")]
    assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
    [chat] = [one.output.splitlines() for one in ran if "sglang-jax chat" in one.command]
    assert chat[0] == "The capital of Japan is Tokyo."
    assert chat[1].startswith("A prime number is")
    assert outputs["python ask.py"].splitlines()[0] == "The capital of Japan is Tokyo."
    assert re.fullmatch(r"\{'name': '.{0,20}', 'country': '\w+', 'millions': \d+\}", outputs["python city.py"])
    assert re.match(r"get_weather \{'city': '(Oslo|Paris|Rome)'\}\n.", outputs["python weather.py"])
    [resumed] = [one.output for one in ran if one.command.startswith("sglang-jax batch") and "kill" not in one.command]
    assert re.match(r"40 lines done \([1-9]\d* by earlier runs\), 0 in the error file", resumed)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{number}" for number in range(1, 41))
    assert all(each["response"]["status_code"] == 200 for each in answers)
    [served] = [json.loads(one.output) for one in ran if one.command.startswith("sglang-jax serve --model-task embed")]
    assert np.linalg.norm(served["data"][0]["embedding"]) == pytest.approx(1.0)
    assert len(served["data"][0]["embedding"]) == 3
    products = re.findall(r"^the cat and the (\w+): (0\.\d+)$", outputs["python vectors.py"], re.MULTILINE)
    assert [name for name, _ in products] == ["kitten", "revenue"]
    assert float(products[0][1]) > float(products[1][1])

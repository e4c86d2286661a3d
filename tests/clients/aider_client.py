"""Aider: a message about a file, which it sends with its long prompts and streams the answer of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, URL, check, main

QUIET = ("--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-show-model-warnings")
PLAIN = ("--no-pretty", "--no-gitignore", "--no-show-release-notes", "--no-detect-urls", "--map-tokens", "0")
PRICES = {f"openai/{MODEL}": {"max_input_tokens": 8192, "input_cost_per_token": 0, "output_cost_per_token": 0}}
"""What aider otherwise fetches from another host: a table of models."""

SETTINGS = """
- name: openai/{model}
  edit_format: ask
  extra_params: {{max_tokens: 24, temperature: 0}}
"""


def ask(*options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "add.py").write_text("def add(a, b):\n    return a + b\n")
        prices = Path(folder) / ".aider/caches/model_prices_and_context_window.json"
        prices.parent.mkdir(parents=True)
        prices.write_text(json.dumps(PRICES))
        settings = Path(folder) / "settings.yaml"
        settings.write_text(SETTINGS.format(model=MODEL))
        command = [
            str(Path(sys.executable).with_name("aider")),
            *("--model", f"openai/{MODEL}", "--model-settings-file", str(settings)),
            *("--openai-api-base", f"{URL}/v1", "--openai-api-key", KEY),
            *("--message", "What does this do?", "--llm-history-file", "history.txt"),
            *(*QUIET, *PLAIN, *options, "add.py"),
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Error" not in done.stdout, done.stdout
        _, answered, said = (Path(folder) / "history.txt").read_text().rpartition("LLM RESPONSE")
    assert answered, done.stdout
    return "".join(line.removeprefix("ASSISTANT").strip() for line in said.splitlines()[1:])


@check
def chat_stream() -> None:
    assert ask("--stream")


@check
def chat() -> None:
    assert ask("--no-stream")


main()

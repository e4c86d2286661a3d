"""The Dockerfile's stages, and its steps in a virtual environment: the part of a build that needs no container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parent.parent.parent
Step = dict[str, str]

OF_ROOT = re.compile(r"useradd |apt-get ")
"""Steps that only a container's root can do: accounts, system packages."""


def read_stages() -> dict[str, list[Step]]:
    """The instructions of each stage, in order; those of `base` before its targets' own."""
    with tempfile.TemporaryDirectory() as folder:
        parser = DockerfileParser(path=folder)
        parser.content = (ROOT / "Dockerfile").read_text()
        found: dict[str, list[Step]] = {}
        for step in parser.structure:
            if step["instruction"] == "FROM":
                image, _, name = step["value"].partition(" AS ")
                found[name] = steps = list(found.get(image, [{"instruction": "FROM", "value": image}]))
            elif step["instruction"] != "COMMENT":
                steps.append(step)
    return found


def values(steps: list[Step], instruction: str) -> list[str]:
    return [step["value"] for step in steps if step["instruction"] == instruction]


class BuiltImage:
    """A target's COPY and RUN steps, run in `folder` with its environment and a virtual environment of `python` instead
    of the image's Python. Raises `CalledProcessError` for a step that fails."""

    def __init__(self, target: str, python: str, folder: Path) -> None:
        steps = read_stages()[target]
        self.folder, source = folder, folder / "src"
        source.mkdir()
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment["PATH"] = f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"
        for assignments in values(steps, "ENV"):
            for assignment in assignments.split():
                name, _, value = assignment.partition("=")
                self.environment[name] = value.replace("/cache", str(folder / "cache"))
        for step in steps:
            if step["instruction"] == "COPY":
                self._copy(*step["value"].split(), into=source)
            elif step["instruction"] == "RUN" and not OF_ROOT.search(step["value"]):
                subprocess.run(["sh", "-c", step["value"]], cwd=source, env=self.environment, check=True)
        self.entry_point: list[str] = json.loads(values(steps, "ENTRYPOINT")[-1])
        (check,) = values(steps, "HEALTHCHECK")
        self.health_check: list[str] = json.loads(check.partition("CMD ")[2])

    def _copy(self, *paths: str, into: Path) -> None:
        *sources, target = paths
        for name in sources:
            source, copy = ROOT / name, into / target
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                shutil.copy(source, copy)

    def command(self, words: list[str], *arguments: str) -> list[str]:
        """A command of the image in the form for this machine: its Python by its path."""
        program = shutil.which(words[0], path=self.environment["PATH"])
        assert program is not None, words
        return [program, *words[1:], *arguments]

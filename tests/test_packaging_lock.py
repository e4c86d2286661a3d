"""The locked dependencies are those of pyproject.toml, each with hashes, for every supported Python."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCKED = ROOT / "requirements"
EXTRAS = ("jax", "bench", "test", "dev")
PYTHONS = ("3.11", "3.12", "3.13")


def entries(file: Path) -> Iterator[tuple[Requirement, list[str]]]:
    """Each locked release, and the hashes of its files."""
    for block in re.split(r"\n(?=\S)", file.read_text().strip()):
        requirement, *hashes = (line.rstrip("\\ ") for line in block.splitlines())
        yield Requirement(requirement), [line.strip().removeprefix("--hash=") for line in hashes]


def environment(python: str) -> dict[str, str]:
    return {**default_environment(), "python_version": python, "python_full_version": f"{python}.9", "extra": ""}


def versions(python: str, name: str = "dev.lock") -> dict[str, str]:
    """The installed versions on this Python, by name."""
    found = {}
    for requirement, _ in entries(LOCKED / name):
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            assert requirement.name not in found, f"{requirement.name} twice on {python}"
            [pin] = requirement.specifier
            found[requirement.name] = pin.version
    return found


def unfit(project: dict[str, Any], python: str, name: str = "dev.lock", extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """Requirements of pyproject.toml that the lock does not meet."""
    locked = versions(python, name)
    asked = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return [
        f"{one}: locked is {locked.get(one.name)}"
        for one in map(Requirement, asked)
        if one.name not in locked or not one.specifier.contains(locked[one.name], prereleases=True)
    ]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_locked(project: dict[str, Any], python: str) -> None:
    assert unfit(project, python) == [], "renew the lock: make lock"


@pytest.mark.parametrize("extra", ["jax", "tpu", "cuda"])
def test_an_image_has_pinned_packages_of_the_versions_that_were_tested(project: dict[str, Any], extra: str) -> None:
    [base] = re.findall(r"^FROM python:(3\.\d+)\.\d+", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for python in {base, *PYTHONS}:
        assert unfit(project, python, "image.lock", (extra,)) == [], "renew the lock: make lock"
        image, tested = versions(python, "image.lock"), versions(python)
        assert {name: image[name] for name in image.keys() & tested} == {
            name: tested[name] for name in image.keys() & tested
        }
        assert len(image.keys() & tested) > 50


def test_a_bound_that_the_lock_violates_is_detected(project: dict[str, Any]) -> None:
    assert unfit({**project, "dependencies": ["numpy>=99", "unheard-of"]}, "3.12") == [
        f"numpy>=99: locked is {versions('3.12')['numpy']}",
        "unheard-of: locked is None",
    ]


@pytest.mark.parametrize("name", ["dev.lock", "model.lock", "libtpu.lock"])
def test_every_file_has_a_hash(name: str) -> None:
    for requirement, hashes in entries(LOCKED / name):
        assert [pin.operator for pin in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_the_lock_names_no_index() -> None:
    """Each user has their own index."""
    for file in LOCKED.glob("*.lock"):
        assert not re.search(r"://|index-url|find-links|\.(?:org|com|io)\b", file.read_text()), file


def test_separate_requirement_files_are_those_that_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for variable, name in (("MODEL", "model.lock"), ("LIBTPU", "libtpu.lock")):
        [(requirement, _)] = entries(LOCKED / name)
        assert f"{variable} := {requirement}\n" in makefile

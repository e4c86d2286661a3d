"""The process that compiles: libtpu only as a compiler, on a machine without a TPU (or with one that is in use)."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sglang_jax.errors import ConfigError, NoRoomError, how_to_install
from tpu.figures import Deployment, Message, ProgramFailure, ProgramFigures, Refusal, Request


class _DiedError(ConfigError):
    """The child process died."""


Work = Callable[..., None]
"""The work of a child, with its own folder, a function that sends messages, and further arguments."""

_INSTALL = (
    f"{how_to_install('tpu')}, or, to leave JAX on this machine as it is, "
    "pip install --no-deps --target FOLDER libtpu==0.0.51 and PYTHONPATH=FOLDER"
)
_LOG_LINES = 12
_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"

_VARIABLES = {
    # JAX runs on the CPU; libtpu is only used for topologies.
    "JAX_PLATFORMS": "cpu",
    # libtpu does not look for a TPU VM's metadata or for other users of a chip.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment for libtpu to compile without a chip; set before it is loaded."""


def require_compiler() -> None:
    """Raises `ConfigError` with the remedy if jax or libtpu is missing."""
    missing = [name for name in ("jax", "flax", "libtpu") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"compiling for TPU needs {' and '.join(missing)}, not installed here: {_INSTALL}")


def compile_in_child(request: Request) -> Iterator[Message]:
    """Yields the compiling process's messages as they arrive. If it dies, the program being compiled has failed. Raises
    `ConfigError` if libtpu or jax is missing, or with the last log lines if it died before the first program."""
    left: list[str] = []
    start = time.monotonic()
    try:
        for message in run_in_child(_compile_programs, request):
            if isinstance(message, Deployment):
                left = list(message.programs)
            elif isinstance(message, ProgramFigures | ProgramFailure):
                left.remove(message.name)
                start = time.monotonic()
            yield message
    except _DiedError as error:
        if not left:
            raise
        yield ProgramFailure(left[0], time.monotonic() - start, str(error))


def run_in_child(work: Work, *arguments: Any) -> Iterator[Any]:
    """Runs `work` in a process without the chip's lock, and yields the messages that it sends. Raises as
    `compile_in_child`, whenever the process dies."""
    require_compiler()
    with tempfile.TemporaryDirectory(prefix="tpu-check-") as folder:
        log = Path(folder) / "log"
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("spawn").Process(
            target=_run, args=(work, arguments, Path(folder), log, sender), daemon=True
        )
        with _without_advice():
            child.start()
        sender.close()
        try:
            while (message := _receive(receiver)) is not None:
                yield message
            child.join()
        finally:
            if child.is_alive():
                child.terminate()
                child.join()
        if child.exitcode:
            raise _DiedError(f"the compiling process ended with status {child.exitcode}:\n{_log_tail(log)}")


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps child processes from reporting at each import of transformers that torch is missing, as this process
    did."""
    before = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = before


def prepare_compiler(folder: Path) -> Path:
    """Prepares this process for compiling, before JAX is imported. Returns the folder for texts of programs."""
    dumps = folder / "dumps"
    dumps.mkdir()
    os.environ.update(_VARIABLES, XLA_FLAGS=f"--xla_dump_to={dumps} --xla_dump_hlo_as_text")
    return dumps


def _receive(receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return None


def _run(work: Work, arguments: tuple[Any, ...], folder: Path, log: Path, sender: Connection) -> None:
    """Runs in the child: sends messages and ends. Output of libraries on stderr goes to `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        work(folder, sender.send, *arguments)
    except ConfigError as error:
        sender.send(Refusal(str(error), of_options=not isinstance(error, NoRoomError)))
    sender.close()


def _compile_programs(folder: Path, send: Callable[[Message], None], request: Request) -> None:
    dumps = prepare_compiler(folder)
    from tpu.compiling import compile_all  # imports jax, which reads the environment

    compile_all(request, dumps, send)


def _log_tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return "\n".join(lines[-_LOG_LINES:])

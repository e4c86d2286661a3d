"""Log lines, as text or JSON, with the time zone and the id of their request."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextvars import ContextVar
from datetime import datetime

import msgspec

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current request, if any. Each request has a separate context."""


REQUEST_ID_HEADER = "X-Request-Id"
"""The header with the id: from clients, to servers behind this one, and back."""

PROJECT_LOGGERS = ("sglang_jax", "torch_backend", "tpu")
"""Loggers of this project."""


def configure(level: int | str, *, as_json: bool = False, process: str = "") -> None:
    """Writes log lines of this process to standard error, unless logging is already configured. Below INFO, only this
    project's lines are written: numba has a hundred thousand for the kernels of a CPU. `level`: minimum level, by
    number or name; `process`: the name of this process in lines, if there are several of its kind."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if as_json else TextLines(process))
    least = logging.getLevelNamesMapping()[level] if isinstance(level, str) else level
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler])
    for name in PROJECT_LOGGERS:
        logging.getLogger(name).setLevel(least)


def own_level() -> int:
    """Returns the minimum level of this project's lines, for processes that this one starts."""
    return logging.getLogger(PROJECT_LOGGERS[0]).getEffectiveLevel()


def writes_json() -> bool:
    """Whether log lines are JSON, for processes that this one starts."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class OnceASecond(logging.Filter):
    """Passes each warning once per second, with the number suppressed since the last time, so that clients cannot fill
    a disk. For one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}
        self._kept_back: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Messages are distinguished before their arguments are filled in, so there are only a few."""
        if record.levelno != logging.WARNING:
            return True
        message, now = str(record.msg), time.monotonic()
        if now - self._passed.get(message, -math.inf) < 1.0:
            self._kept_back[message] += 1
            return False
        self._passed[message] = now
        if kept_back := self._kept_back.pop(message, 0):
            record.msg = f"{message} ({kept_back} more since the last such line)"
        return True


class TextLines(logging.Formatter):
    """`[2026-11-23T14:05:09.123+01:00] INFO replica 1: message [request abc]`."""

    def __init__(self, process: str = "") -> None:
        super().__init__(f"[%(asctime)s] %(levelname)s {f'{process}: ' if process else ''}%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return timestamp(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line without a traceback."""
        request = REQUEST_ID.get()
        return super().formatMessage(record) + (f" [request {request}]" if request else "")


class JsonLines(logging.Formatter):
    """One object per line: `time`, `level`, `logger`, `message`, and if known `process`, `request_id`, `exception` and
    `stack`. Fields from `extra={"fields": {...}}` in a logging call are added."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        if request := REQUEST_ID.get():
            line["request_id"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        line |= record.__dict__.get("fields", {})
        return self._encoder.encode(line).decode()


def timestamp(record: logging.LogRecord) -> str:
    """Returns the time of a record in the machine's time zone: `2026-11-23T14:05:09.123+01:00`."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

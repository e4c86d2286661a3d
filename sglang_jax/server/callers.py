"""Callers: API keys, their rights and limits, and what each has in use. Keys are looked up by digest, so that the time
of a refusal reveals nothing about them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_jax.config import PositiveInt, ServerConfig, check_key
from sglang_jax.engine.types import GenerateInput, Origin, OutputDelta
from sglang_jax.errors import ConfigError, ParameterError
from sglang_jax.server.errors import AdminKeyError, RateLimitError

BATCHES = "batches"
"""The flow of all lines of a caller's batches."""

_CALLER: ContextVar[Caller] = ContextVar("caller")


class KeyEntry(BaseModel):
    """A key in the file of `--api-keys`, under its name.

    - `max_concurrent`: maximum completions in flight; more are refused with 429.
    - `tokens_per_minute`: prompt and output tokens; once they are used up, requests are refused with 429 until some
      have come back. Requests in flight continue.
    - `max_priority`: maximum `priority` of a request.
    - `max_files_bytes`: maximum bytes of its files, see `FileStore`.
    - `share_cache`: shares cached prefixes with other keys that do so; otherwise they are its own.
    - `hide_cached_tokens`: answers do not report how much of a prompt was cached.
    - `admin`: may do what the `--admin-api-key` may.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

    key: str
    max_concurrent: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    max_priority: int = Field(0, ge=-(2**31), lt=2**31)
    max_files_bytes: PositiveInt | None = None
    share_cache: bool = False
    hide_cached_tokens: bool = False
    admin: bool = False


class _KeyFile(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)

    keys: dict[str, KeyEntry] = Field(min_length=1)


class TokenBucket:
    """Refills evenly. Its level may be negative, because a request's tokens are known only afterwards."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen = clock()

    def take(self, tokens: int) -> None:
        self._refill()
        self._level -= tokens

    def seconds_to_wait(self, level: float = 1.0) -> float:
        """Seconds until there are this many tokens; 0 if there are."""
        self._refill()
        return max(level - self._level, 0.0) * 60.0 / self.per_minute

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._level + (now - self._seen) * self.per_minute / 60.0, float(self.per_minute))
        self._seen = now


@dataclass(frozen=True, slots=True)
class Claim:
    """The tenant and the flow that a request's headers name, and whether it is in the background: a server in front of
    this one sends them for its own clients. Empty if it names none."""

    tenant: str = ""
    flow: str = ""
    background: bool = False


NO_CLAIM = Claim()


@dataclass(slots=True)
class Caller:
    """The holder of a key, or any client of a server without keys.

    - `admin`: may change the server's state, and see requests of others.
    - `max_priority`: None for no limit; `running`: completions in flight.
    - `cache_secret`: separates its cached prefixes from those of others; empty if they are shared.
    - `background`: makes the requests of its batches, which wait behind all others. `enter` does not refuse them for
      lack of tokens, for which they have waited.
    """

    name: str
    admin: bool = False
    max_concurrent: int | None = None
    max_priority: int | None = None
    cache_secret: bytes = b""
    hide_cached_tokens: bool = False
    max_files_bytes: int | None = None
    tokens: TokenBucket | None = None
    background: bool = False
    running: int = field(default=0, init=False)

    def in_background(self) -> Caller:
        """Returns the caller of its batches: with its name, rights, part of the cache and tokens, but its own count of
        completions in flight, so that they take none from its other requests."""
        return replace(self, background=True)

    def enter(self, prompts: Sequence[GenerateInput]) -> int:
        """Counts prompts as in flight, and returns their number of completions, for `leave`. Raises `ParameterError`
        for a priority above the caller's maximum; `RateLimitError` above a limit of the caller."""
        for prompt in prompts:
            if self.max_priority is not None and prompt.priority > self.max_priority:
                raise ParameterError(
                    f"priority must be at most {self.max_priority} for this key, got {prompt.priority}",
                    param="priority",
                )
        count = sum(prompt.sampling.n for prompt in prompts)
        if self.background and self.max_concurrent is not None and count > self.max_concurrent:
            raise ParameterError(
                f"this key may have {self.max_concurrent} completions in flight, and one request asks for {count}",
                param="n",
            )
        if self.max_concurrent is not None and self.running + count > self.max_concurrent:
            raise RateLimitError(
                f"this key may have {self.max_concurrent} completions in flight; it has {self.running}, and requested "
                f"{count} more"
            )
        wait = 0.0 if self.tokens is None or self.background else self.tokens.seconds_to_wait()
        if self.tokens is not None and wait > 0.0:
            raise RateLimitError(
                f"this key may use {self.tokens.per_minute} tokens per minute, which are used up; try again "
                f"in {wait:.0f} s",
                retry_after=wait,
            )
        self.running += count
        return count

    def leave(self, count: int) -> None:
        self.running -= count

    def tenant(self, claimed: str) -> str:
        """Returns the tenant of its requests: the caller itself, or the tenant that an operator names."""
        return claimed if self.admin and claimed else self.name

    def origin(self, request_id: str, claimed: Claim = NO_CLAIM) -> Origin:
        """Returns the origin of the request with this id: the caller is its tenant, and the request its flow. Operators
        may claim others."""
        flow = claimed.flow if self.admin and claimed.flow else request_id
        if self.background:
            flow = BATCHES  # one client request, which leaves some rows to others
        background = self.background or (self.admin and claimed.background)
        return Origin(self.tenant(claimed.tenant), flow, self.cache_secret, background)


class Usage:
    """Charges the tokens of one call's completions to its caller as they are generated."""

    def __init__(self, tokens: TokenBucket) -> None:
        self._tokens = tokens
        self._taken: dict[tuple[int, int], int] = {}
        self._prompts: set[int] = set()

    def add(self, number: int, delta: OutputDelta) -> None:
        """Charges the newest delta of a completion of prompt `number`. A prompt counts once."""
        place = (number, delta.index)
        before = self._taken.get(place)
        if before is None:
            before = 0 if number in self._prompts else -delta.prompt_tokens
            self._prompts.add(number)
        self._tokens.take(delta.completion_tokens - before)
        self._taken[place] = delta.completion_tokens


class Callers:
    def __init__(self, by_key: dict[str, Caller], anybody: Caller | None) -> None:
        self._by_digest = {_digest(key.encode()): caller for key, caller in by_key.items()}
        self._anybody = anybody

    @classmethod
    def of(cls, config: ServerConfig) -> Callers:
        """Returns the callers of the options. Without `admin_api_key`, the `api_key` is an operator's; without any key,
        all clients are operators. Raises `ConfigError` for keys that are empty, duplicate or unreadable."""
        by_key: dict[str, Caller] = {}

        def add(key: str, caller: Caller) -> None:
            if key in by_key:
                raise ConfigError(f"{by_key[key].name} and {caller.name} have the same key; each needs its own")
            if any(caller.name == other.name for other in by_key.values()):
                raise ConfigError(
                    f"a key in api_keys must not be named {caller.name}, like the option; choose another name"
                )
            by_key[key] = caller

        admin_key, client_key = config.admin_key(), config.client_key()
        if admin_key is not None:
            add(admin_key, Caller("admin_api_key", admin=True))
        if client_key is not None:
            add(client_key, Caller("api_key", admin=admin_key is None))
        if config.api_keys is not None:
            for name, entry in _read(config.api_keys).items():
                add(entry.key, _caller(name, entry))
        open_to_all = client_key is None and config.api_keys is None
        return cls(by_key, Caller("anybody", admin=admin_key is None) if open_to_all else None)

    @classmethod
    def in_process(cls) -> Callers:
        """Returns callers for an application that only its own process can reach: no key is needed."""
        return cls({}, Caller("this process", admin=True))

    @property
    def asks_for_a_key(self) -> bool:
        """Whether all requests need a key."""
        return self._anybody is None

    def named(self, name: str) -> Caller | None:
        """Returns the caller of this name; None if it has no key any more."""
        known = [*self._by_digest.values(), *([self._anybody] if self._anybody else [])]
        return next((caller for caller in known if caller.name == name), None)

    def find(self, authorization: str) -> Caller | None:
        """Returns the caller of this header (`Bearer KEY`, RFC 6750, section 2.1); None if it is to be refused."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            found = self._by_digest.get(_digest(key.strip().encode("latin-1")))
            if found is not None:
                return found
        return self._anybody


def set_caller(caller: Caller) -> None:
    """Sets the caller of the current task's request, also for tasks that it starts."""
    _CALLER.set(caller)


def current_caller() -> Caller:
    """Returns the caller of the current request. Raises `LookupError` outside of a request, so that no code runs as an
    operator by mistake."""
    return _CALLER.get()


def caller_name() -> str:
    """Returns the name of the current request's caller; empty if none was looked up, as on `auth.OPEN_PATHS`."""
    caller = _CALLER.get(None)
    return "" if caller is None else caller.name


async def require_admin() -> None:
    """A dependency of routes that change the server's state or show requests of others. Raises `AdminKeyError`."""
    if not current_caller().admin:
        raise AdminKeyError(
            "this route is for operators: send the --admin-api-key, or a key with admin: true in --api-keys"
        )


def _caller(name: str, entry: KeyEntry) -> Caller:
    return Caller(
        name,
        admin=entry.admin,
        max_concurrent=entry.max_concurrent,
        max_priority=entry.max_priority,
        cache_secret=b"" if entry.share_cache else _digest(b"cache of " + entry.key.encode()),
        hide_cached_tokens=entry.hide_cached_tokens,
        max_files_bytes=entry.max_files_bytes,
        tokens=None if entry.tokens_per_minute is None else TokenBucket(entry.tokens_per_minute),
    )


def _read(path: Path) -> dict[str, KeyEntry]:
    """Reads YAML or JSON: `{"keys": {NAME: {"key": ..., ...}}}`. No error repeats a key."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"api_keys {path} is neither YAML nor JSON") from error
    try:
        entries = _KeyFile.model_validate(content).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"api_keys {path}: {where or 'the file'}: {first['msg']}") from None
    for name, entry in entries.items():
        check_key(f"api_keys {path}: the key of {name}", entry.key)
    return entries


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()

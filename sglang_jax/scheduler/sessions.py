"""Sessions: conversations whose turns send only new tokens, and whose KV stays in memory between turns.

A session has the tokens of its finished turns and a pin in the prefix cache (`mem_cache.pins`); its next turn is an
ordinary request whose prompt starts with these tokens. So a turn that fails, or is aborted or retracted, does not
change its session, and a session that loses its pin only loses time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_jax.errors import ParameterError, SessionBusyError, SessionLimitError, SessionNotFoundError, quote
from sglang_jax.mem_cache.data_parallel import PinsOfRanks
from sglang_jax.mem_cache.pins import Kept, Pin, Pins
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn

if TYPE_CHECKING:
    from sglang_jax.scheduler.request import Request

LONGEST_TIMEOUT = 86_400.0
"""Maximum timeout that a client may ask for, in seconds, unless the engine's default is longer."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request as a turn of a session. `name`: the client's name for it; `prompt_len`: tokens before its output;
    `length`: tokens of the session after it has finished, 0 before that or if it fails."""

    session: Session
    name: str
    request_id: int = 0
    prompt_len: int = 0
    length: int = 0

    @property
    def has_to_wait(self) -> bool:
        """Whether the KV of the previous turn is not in the cache yet."""
        return self.session.leaving is not None

    def position_in(self, prompt: bytes, wanted: int) -> int:
        """The position in the whole `prompt` (int32 bytes) of position `wanted` in the tokens that the turn adds; -1
        (none) stays -1. Raises `ParameterError` if the turn adds fewer tokens, without a removed beginning-of-sequence
        token."""
        before = len(self.session.tokens) // TOKEN_BYTES
        added = len(prompt) // TOKEN_BYTES - before
        if wanted >= added:
            raise ParameterError(
                f"logprob_start_len must be in [-1, {added - 1}], because this turn adds {added} tokens to session "
                f"{quote(self.session.id)}, got {wanted}",
                param="logprob_start_len",
            )
        return before + wanted if wanted >= 0 else wanted

    def kept(self) -> Kept | None:
        """What its session's pin keeps when its row is released; None if nothing changes."""
        session = self.session
        return Kept(session.pin, self.length) if session.leaving is self and not session.closed else None

    def row_released(self) -> None:
        if self.session.leaving is self:
            self.session.leaving = None


@dataclass(slots=True, eq=False)
class Session:
    """A conversation, which only its `owner` may use. `id`: the client's name for it.

    - `streaming`: turns need not name the turn that they follow; `implicit`: opened by its first turn.
    - `timeout`: seconds without a turn after which it is closed; `used_at`: when the last turn ended.
    - `tokens`: int32 bytes of all finished turns; `namespace`: the namespace of their KV.
    - `turn`: the turn that runs or waits; `last`: the newest finished turn; `leaving`: a finished turn whose row is not
      released yet.
    """

    id: str
    owner: str
    streaming: bool
    timeout: float
    used_at: float
    tokens: bytes = b""
    namespace: Namespace = None
    turn: Turn | None = None
    last: Turn | None = None
    leaving: Turn | None = None
    closed: bool = False
    implicit: bool = False
    pin: Pin = field(default_factory=Pin)


class Sessions:
    """All sessions of a core: at most `most` open ones, with a timeout of `timeout` seconds unless they ask for
    another. `held`: turns, by request id, that wait until the row of the previous turn is released, so that they find
    its KV in the cache."""

    def __init__(
        self, pins: Pins | PinsOfRanks, most: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.held: dict[int, Request] = {}
        self.num_timed_out = 0
        self._pins = pins
        self._most = most
        self._timeout = timeout
        self._clock = clock
        self._open: dict[tuple[str, str], Session] = {}  # by owner and id
        self._last: dict[int, Session] = {}
        self._due = math.inf

    @property
    def count(self) -> int:
        return len(self._open)

    def all(self) -> list[Session]:
        return list(self._open.values())

    def open(self, message: OpenSession) -> None:
        """Opens a session. A timeout above the maximum is reduced to it. Raises `ParameterError` for an id that the
        owner already uses or an invalid timeout, and `SessionLimitError`."""
        self.maintain()
        timeout = self._timeout if message.timeout is None else message.timeout
        if not 0.0 < timeout < math.inf:
            raise ParameterError(f"timeout must be a positive number of seconds, got {timeout}", param="timeout")
        timeout = min(timeout, max(self._timeout, LONGEST_TIMEOUT))
        if (message.owner, message.id) in self._open:
            raise ParameterError(f"session {quote(message.id)} is open already", param="session_id")
        if len(self._open) >= self._most and not (
            self._replace(message.owner, implicit=True) or self._replace(message.owner, implicit=False)
        ):
            raise SessionLimitError(
                f"session {quote(message.id)} cannot be opened: {len(self._open)} sessions are open, the limit "
                "(--max-sessions); close one, or try again later"
            )
        self._add(Session(message.id, message.owner, message.streaming, timeout, self._clock()))

    def _add(self, session: Session) -> Session:
        self._open[session.owner, session.id] = session
        self._due = min(self._due, session.used_at + session.timeout)
        return session

    def _replace(self, owner: str, *, implicit: bool) -> bool:
        """Closes the idle session that was used least recently, of the owner with the most; False if it closes none.
        An owner keeps at least as many as `owner` will have, unless `owner` has none: so none can hold all sessions.
        `implicit`: only sessions that nobody has opened, whose end costs time and nothing else; those of `owner`,
        too."""
        held = Counter(session.owner for session in self._open.values())
        least = held[owner] + 2 if held[owner] else 1
        idle = [
            one
            for one in self._open.values()
            if one.turn is None
            and one.implicit is implicit
            and (held[one.owner] >= least or (implicit and one.owner == owner))
        ]
        if idle:
            self._close(max(idle, key=lambda one: (held[one.owner], -one.used_at)))
        return bool(idle)

    def close(self, session_id: str, owner: str) -> None:
        """Closes a session and releases its KV; a running turn ends as an ordinary request. Raises
        `SessionNotFoundError`."""
        self.maintain()
        self._close(self._find(session_id, owner, "session_id"))

    def next_turn(self, asked: SessionTurn, tokens: bytes, namespace: Namespace) -> tuple[Turn, bytes]:
        """The turn of a request with new `tokens` (int32 bytes), and its whole prompt. Changes nothing, as the request
        may still be refused. Raises `SessionNotFoundError`, `SessionBusyError`, and `ParameterError` for a turn that
        does not follow the last finished one."""
        session = self._find(asked.session, asked.owner, "session_params.id")
        if session.turn is not None:
            raise SessionBusyError(
                f"session {quote(session.id)} has a running turn ({quote(session.turn.name)}); send the next "
                "turn after it ends",
                param="session_params.id",
            )
        _check_follows(session, asked.after)
        if session.last is not None and namespace != session.namespace:
            raise ParameterError(
                f"all turns of session {quote(session.id)} must have the extra_key of the first", param="extra_key"
            )
        bos = asked.bos.to_bytes(TOKEN_BYTES, "little", signed=True)
        if session.tokens and asked.bos >= 0 and tokens.startswith(bos):
            tokens = tokens[TOKEN_BYTES:]
            if not tokens:
                raise ParameterError(
                    f"the prompt adds no tokens to session {quote(session.id)}: a beginning-of-sequence token is "
                    "dropped within a session",
                    param="prompt",
                )
        return Turn(session, asked.name), session.tokens + tokens

    def keeping_turn(self, asked: SessionTurn, namespace: Namespace) -> Turn | None:
        """The turn of a request with a whole conversation, whose KV its session is to keep. Opens the session if it is
        not open; if too many are, in place of another that was opened like this. None if the request has to run without
        a session: none can be opened, a turn of it runs, or its namespace is another."""
        session = self._open.get((asked.owner, asked.session))
        if session is None:
            self.maintain()
            if len(self._open) >= self._most and not self._replace(asked.owner, implicit=True):
                return None
            session = self._add(Session(asked.session, asked.owner, True, self._timeout, self._clock(), implicit=True))
        if session.turn is not None or (session.last is not None and namespace != session.namespace):
            return None
        return Turn(session, asked.name)

    def begin(self, turn: Turn, request_id: int, prompt_len: int) -> None:
        turn.request_id, turn.prompt_len = request_id, prompt_len
        turn.session.turn = turn
        turn.session.pin.busy = True

    def end(self, turn: Turn, tokens: bytes | None, namespace: Namespace, has_row: bool) -> None:
        """Ends a turn. `tokens`: int32 bytes of its prompt and output if it has finished; None leaves the session as it
        was before the turn. `has_row`: whether its KV is not in the cache yet."""
        session = turn.session
        self.held.pop(turn.request_id, None)
        session.turn, session.pin.busy, session.used_at = None, False, self._clock()
        if session.closed:
            return
        self._due = min(self._due, session.used_at + session.timeout)
        if tokens is None:
            return
        self._forget_last(session)
        session.tokens, session.namespace, session.last = tokens, namespace, turn
        turn.length = len(tokens) // TOKEN_BYTES
        if has_row:
            session.leaving = turn
        self._last[turn.request_id] = session

    def shorten(self, request_id: int, num_tokens: int) -> None:
        """Cuts the output of a session's newest finished turn to `num_tokens`. Ignores other requests' ids."""
        session = self._last.get(request_id)
        if session is None or session.last is None:
            return
        turn = session.last
        turn.length = min(turn.length, turn.prompt_len + num_tokens)
        session.tokens = session.tokens[: turn.length * TOKEN_BYTES]
        self._pins.shorten(session.pin, turn.length)

    def ready(self) -> list[Request]:
        """Removes and returns the turns of `held` that need not wait any longer."""
        if not self.held:
            return []
        ready = [one for one in self.held.values() if one.turn is not None and not one.turn.has_to_wait]
        for request in ready:
            del self.held[request.id]
        return ready

    def maintain(self) -> None:
        """Closes sessions that have timed out, and limits the memory that the others keep."""
        self._pins.keep_within_share()
        if not self._open or (now := self._clock()) < self._due:
            return
        for session in [one for one in self._open.values() if _due(one) <= now]:
            self.num_timed_out += 1
            self._close(session)
        self._due = min(map(_due, self._open.values()), default=math.inf)

    def seconds_to_timeout(self) -> float | None:
        """Seconds until the next session may time out; None if none can."""
        return max(self._due - self._clock(), 0.0) if self._open and self._due < math.inf else None

    def _close(self, session: Session) -> None:
        del self._open[session.owner, session.id]
        self._forget_last(session)
        session.closed = True
        self._pins.let_go(session.pin)

    def _forget_last(self, session: Session) -> None:
        if session.last is not None:
            del self._last[session.last.request_id]
            session.last = None

    def _find(self, session_id: str, owner: str, param: str) -> Session:
        """An open session; another owner's is reported like one that does not exist."""
        session = self._open.get((owner, session_id))
        if session is None:
            raise SessionNotFoundError(
                f"there is no session {quote(session_id)}: it was never opened, was closed, has timed out, or was lost "
                "with its engine",
                param=param,
            )
        return session


def _due(session: Session) -> float:
    """When it times out; infinity while it has a turn."""
    return math.inf if session.turn is not None else session.used_at + session.timeout


def _check_follows(session: Session, after: str | None) -> None:
    last = session.last
    if after is None:
        if last is not None and not session.streaming:
            raise ParameterError(
                f"session {quote(session.id)} was not opened with streaming: true, so every turn after the first "
                f"needs a rid; give rid {quote(last.name)}",
                param="session_params.rid",
            )
    elif last is None or last.name != after:
        known = "it has none yet" if last is None else f"which is {quote(last.name)}"
        raise ParameterError(
            f"a turn of session {quote(session.id)} follows the last finished one ({known}): rid must name it or be "
            f"left out, got {quote(after)}",
            param="session_params.rid",
        )

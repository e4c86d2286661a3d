"""Sessions: conversations whose turns send what is new, and whose memory stays between turns.

The core owns them. A session knows the tokens of its finished turns and has a pin in the prefix cache
(`mem_cache.pins`); its next turn is an ordinary request whose prompt begins with these tokens. So a turn that fails, is
aborted or retracted changes nothing of its session, and a session that has lost its pin loses nothing but time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_jax.errors import ParameterError, SessionBusyError, SessionLimitError, SessionNotFoundError, shown
from sglang_jax.mem_cache.pins import Kept, Pin, Pins
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace
from sglang_jax.scheduler.messages import OpenSession, SessionTurn

if TYPE_CHECKING:
    from sglang_jax.scheduler.request import Request

LONGEST_TIMEOUT = 86_400.0
"""Seconds without a turn that a client may ask for, unless the engine's default is longer."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request as a turn of a session. `name`: what the client calls it; `begins`: tokens before its output.

    `length`: tokens that the session has once it has finished; 0 before, and if it ends in any other way.
    """

    session: Session
    name: str
    request_id: int = 0
    begins: int = 0
    length: int = 0

    @property
    def has_to_wait(self) -> bool:
        """The turn before it is still on its way into the cache."""
        return self.session.leaving is not None

    def position_in(self, prompt: bytes, wanted: int) -> int:
        """Where in its whole `prompt` (int32 bytes) is the position `wanted` of what the turn adds; -1, for none, is
        -1. Raises `ParameterError` if the turn adds fewer tokens, with the one that texts begin with left out."""
        before = len(self.session.tokens) // TOKEN_BYTES
        added = len(prompt) // TOKEN_BYTES - before
        if wanted >= added:
            raise ParameterError(
                f"logprob_start_len must be in [-1, {added - 1}], because this turn adds {added} tokens to session "
                f"{shown(self.session.id)}, got {wanted}",
                param="logprob_start_len",
            )
        return before + wanted if wanted >= 0 else wanted

    def kept(self) -> Kept | None:
        """Its row is about to be given back: what is to become of its session's pin, None if nothing."""
        session = self.session
        return Kept(session.pin, self.length) if session.leaving is self and not session.closed else None

    def row_is_gone(self) -> None:
        """Its row was given back."""
        if self.session.leaving is self:
            self.session.leaving = None


@dataclass(slots=True, eq=False)
class Session:
    """A conversation. Its client knows it by `id`, and its `owner` alone may use it.

    - `streaming`: turns may leave out which one they follow.
    - `timeout`: seconds without a turn after which it is closed; `used_at`: when the last one ended.
    - `tokens`: int32 bytes of all finished turns; `namespace`: in which their KV is.
    - `turn`: the one that runs or waits; `last`: the newest finished one; `leaving`: a finished one that has its row
      still.
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
    pin: Pin = field(default_factory=Pin)


class Sessions:
    """All sessions of a core.

    `held`: turns, by the ids of their requests, that wait until the one before them has given back its row, so that
    they find all of it in the cache.

    **Arguments:** `most`: sessions that may be open at once; `timeout`: of those that are opened without one, in
    seconds; `clock`: tells seconds.
    """

    def __init__(self, pins: Pins, most: int, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
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
        """Sessions that are open."""
        return len(self._open)

    def all(self) -> list[Session]:
        """Sessions that are open."""
        return list(self._open.values())

    def open(self, message: OpenSession) -> None:
        """A timeout that is longer than a client may ask for is the longest.

        **Raises:** `ParameterError` for an id that the owner uses already, or a timeout that is none;
        `SessionLimitError`."""
        self.look_after()
        timeout = self._timeout if message.timeout is None else message.timeout
        if not 0.0 < timeout < math.inf:
            raise ParameterError(f"timeout must be a positive number of seconds, got {timeout}", param="timeout")
        timeout = min(timeout, max(self._timeout, LONGEST_TIMEOUT))
        if (message.owner, message.id) in self._open:
            raise ParameterError(f"session {shown(message.id)} is open already", param="session_id")
        if len(self._open) >= self._most and not self._make_room(message.owner):
            raise SessionLimitError(
                f"session {shown(message.id)} cannot be opened: {len(self._open)} sessions are open, the limit "
                "(--max-sessions); close one, or try again later"
            )
        now = self._clock()
        self._open[message.owner, message.id] = Session(message.id, message.owner, message.streaming, timeout, now)
        self._due = min(self._due, now + timeout)

    def _make_room(self, owner: str) -> bool:
        """Closes a session for one who has none, or for one who will still have no more than its owner: of those who
        have most, and an idle one, the session that has been idle longest. So nobody keeps all sessions from others.
        False if there is none such."""
        held = Counter(session.owner for session in self._open.values())
        least = held[owner] + 2 if held[owner] else 1
        idle = [one for one in self._open.values() if one.turn is None and held[one.owner] >= least]
        if idle:
            self._close(max(idle, key=lambda one: (held[one.owner], -one.used_at)))
        return bool(idle)

    def close(self, session_id: str, owner: str) -> None:
        """What the session keeps is let go; a turn that runs goes on to its end as a request of its own. Raises
        `SessionNotFoundError`."""
        self.look_after()
        self._close(self._find(session_id, owner, "session_id"))

    def next_turn(self, asked: SessionTurn, tokens: bytes, namespace: Namespace) -> tuple[Turn, bytes]:
        """The turn that a request asks for with new `tokens` (int32 bytes), and its whole prompt. Changes nothing: the
        request may yet be refused.

        **Raises:** `SessionNotFoundError`, `SessionBusyError`, `ParameterError` for what does not go on behind the last
        finished turn.
        """
        session = self._find(asked.session, asked.owner, "session_params.id")
        if session.turn is not None:
            raise SessionBusyError(
                f"session {shown(session.id)} has a running turn ({shown(session.turn.name)}); send the next "
                "turn after it ends",
                param="session_params.id",
            )
        _check_follows(session, asked.after)
        if session.last is not None and namespace != session.namespace:
            raise ParameterError(
                f"all turns of session {shown(session.id)} must have the extra_key of the first", param="extra_key"
            )
        bos = asked.bos.to_bytes(TOKEN_BYTES, "little", signed=True)
        if session.tokens and asked.bos >= 0 and tokens.startswith(bos):
            tokens = tokens[TOKEN_BYTES:]
            if not tokens:
                raise ParameterError(
                    f"the prompt adds no tokens to session {shown(session.id)}: a beginning-of-sequence token is "
                    "dropped within a session",
                    param="prompt",
                )
        return Turn(session, asked.name), session.tokens + tokens

    def begin(self, turn: Turn, request_id: int, prompt_len: int) -> None:
        """The request of a turn was accepted, with a prompt of so many tokens."""
        turn.request_id, turn.begins = request_id, prompt_len
        turn.session.turn = turn
        turn.session.pin.busy = True

    def end(self, turn: Turn, tokens: bytes | None, namespace: Namespace, has_row: bool) -> None:
        """A turn is over. `tokens`: int32 bytes of its prompt and output if it has finished; None leaves the session as
        it was before. `has_row`: these are yet to go into the cache."""
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
        """Of the output of a turn that has just finished, only the first `num_tokens` are the session's. Ids that are
        not a session's newest turn's are ignored."""
        session = self._last.get(request_id)
        if session is None or session.last is None:
            return
        turn = session.last
        turn.length = min(turn.length, turn.begins + num_tokens)
        session.tokens = session.tokens[: turn.length * TOKEN_BYTES]
        self._pins.shorten(session.pin, turn.length)

    def ready(self) -> list[Request]:
        """Takes out of `held` who need not wait any longer."""
        if not self.held:
            return []
        ready = [one for one in self.held.values() if one.turn is not None and not one.turn.has_to_wait]
        for request in ready:
            del self.held[request.id]
        return ready

    def look_after(self) -> None:
        """Closes sessions that have timed out, and keeps the others within what they may keep."""
        self._pins.keep_within_share()
        if not self._open or (now := self._clock()) < self._due:
            return
        for session in [one for one in self._open.values() if _due(one) <= now]:
            self.num_timed_out += 1
            self._close(session)
        self._due = min(map(_due, self._open.values()), default=math.inf)

    def seconds_to_timeout(self) -> float | None:
        """Until one may time out; None while none is open."""
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
        """Another owner's session is as unknown as one that is not there."""
        session = self._open.get((owner, session_id))
        if session is None:
            raise SessionNotFoundError(
                f"there is no session {shown(session_id)}: it was never opened, was closed, has timed out, or was lost "
                "with its engine",
                param=param,
            )
        return session


def _due(session: Session) -> float:
    """When the session times out; never while it has a turn."""
    return math.inf if session.turn is not None else session.used_at + session.timeout


def _check_follows(session: Session, after: str | None) -> None:
    last = session.last
    if after is None:
        if last is not None and not session.streaming:
            raise ParameterError(
                f"session {shown(session.id)} was not opened with streaming: true, so every turn after the first "
                f"needs a rid; give rid {shown(last.name)}",
                param="session_params.rid",
            )
    elif last is None or last.name != after:
        known = "it has none yet" if last is None else f"which is {shown(last.name)}"
        raise ParameterError(
            f"a turn of session {shown(session.id)} follows the last finished one ({known}): rid must name it or be "
            f"left out, got {shown(after)}",
            param="session_params.rid",
        )

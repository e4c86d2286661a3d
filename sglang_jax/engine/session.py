"""A session of an in-process engine, for scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self, Unpack, overload

from sglang_jax.engine.arguments import template_of
from sglang_jax.engine.items import Prompt, RequestOptions, Sampling
from sglang_jax.engine.types import GenerateInput, GenerateOutput, SessionTurnInput
from sglang_jax.errors import EngineDeadError, SessionNotFoundError

RunTurn = Callable[[Prompt, Sampling | None, GenerateInput], GenerateOutput | Iterator[GenerateOutput]]
"""Completes one prompt. The last argument has the other fields of the request."""


class Session:
    """A conversation whose KV cache is kept between turns. Created by `Engine.open_session`.

    >>> with engine.open_session() as session:
    ...     first = session.generate("The capital of France is", {"max_new_tokens": 8})
    ...     second = session.generate(" Its largest museum is", {"max_new_tokens": 8})

    A turn's prompt is only the text after the previous turn, and only that is computed. A turn that fails, or whose
    stream is left early, changes nothing: the next one follows the last finished turn. Leaving a `with` block closes
    the session, unless it has timed out or its engine is lost.

    **Arguments:** `session_id`: the engine's id of the session; `run`, `close`: the engine's functions for it.
    """

    def __init__(self, session_id: str, run: RunTurn, close: Callable[[], None]) -> None:
        self.id = session_id
        self._run = run
        self._close = close
        self._closed = False

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[True],
        **request: Unpack[RequestOptions],
    ) -> Iterator[GenerateOutput]: ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stream: bool = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput | Iterator[GenerateOutput]:
        """Runs the next turn. `prompt`: text or token ids to append to the session. Otherwise like `Engine.generate`.
        Raises `SessionBusyError` while a turn runs, `SessionNotFoundError` once the session is closed or has timed out,
        and what `Engine.generate` raises."""
        template = template_of(request, stream=stream, session=SessionTurnInput(self.id))
        return self._run(prompt, sampling_params, template)

    def close(self) -> None:
        """Closes the session; further calls do nothing. Raises `SessionNotFoundError` if it has timed out."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(SessionNotFoundError, EngineDeadError):  # it has ended already
            self.close()

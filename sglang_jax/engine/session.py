"""A session of the engine in this process, as scripts use it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self, Unpack, overload

from sglang_jax.engine.arguments import template_of
from sglang_jax.engine.items import Prompt, RequestOptions, Sampling
from sglang_jax.engine.types import GenerateInput, GenerateOutput, SessionTurnInput
from sglang_jax.errors import EngineDeadError, SessionNotFoundError

Run = Callable[[Prompt, Sampling | None, GenerateInput], GenerateOutput | Iterator[GenerateOutput]]
"""Completes one prompt, for which the last argument has all but the prompt and how to sample."""


class Session:
    """A conversation that keeps its memory between turns. Made by `Engine.open_session`.

    >>> with engine.open_session() as session:
    ...     first = session.generate("The capital of France is", {"max_new_tokens": 8})
    ...     second = session.generate(" Its largest museum is", {"max_new_tokens": 8})

    Each turn is given what comes behind the one before, and computes that alone. A turn that fails, or whose stream is
    left early, changes nothing: the next one follows the last that finished. The end of a `with` block closes it,
    unless it has timed out or its engine is lost.

    **Arguments:** `session_id`: what the engine calls it; `run`, `close`: what the engine does for it.
    """

    def __init__(self, session_id: str, run: Run, close: Callable[[], None]) -> None:
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
        """The next turn: what `prompt`, a text or token ids, adds to the session. Otherwise as `Engine.generate`.

        **Raises:** `SessionBusyError` while a turn runs, `SessionNotFoundError` once the session is closed or has timed
        out, and whatever `Engine.generate` does.
        """
        template = dataclasses.replace(template_of(request, stream=stream), session=SessionTurnInput(self.id))
        return self._run(prompt, sampling_params, template)

    def close(self) -> None:
        """Lets its memory go; further calls do nothing. Raises `SessionNotFoundError` if it has timed out."""
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

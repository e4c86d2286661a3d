"""Requests under a grammar: waiting for its compilation, matchers, and masks of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.compile_queue import Compilation
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.grammar.interface import Matcher, MatchState
from sglang_jax.runner.plan import MASK_WORD, Int32, TokenMasks, mask_words
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows

_ANY_TOKEN = -1
"""A mask word that allows all of its tokens."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A request that ends because its grammar is complete, or has failed (`error`)."""

    request: Request
    error: GrammarError | GrammarUnavailableError | None = None


class Constraints:
    """Requests that wait until their grammar is compiled, and the matchers of compiled ones. A matcher gets each output
    token that the host keeps and no other, so a retraction does not change it. `compiler`: None for an engine without
    grammars; `eos_ids`: the tokens with which grammars end outputs."""

    def __init__(self, compiler: GrammarCompiler | None, rows: Rows, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._compiler = compiler
        self._rows = rows
        self._words = mask_words(vocab_size)
        self._eos = tuple(eos_ids)
        self._waiting: dict[int, tuple[Request, Compilation]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self, sampling: SamplingParams) -> None:
        """Raises `GrammarError` for a grammar if the engine supports none."""
        if sampling.grammar is not None and self._compiler is None:
            raise GrammarError(
                f"{sampling.grammar.field} needs structured output, which is off (--grammar-backend none) or does "
                "not support this model's tokenizer",
                param=sampling.grammar.field,
            )

    def begin(self, request: Request) -> None:
        assert self._compiler is not None
        assert request.sampling.grammar is not None
        compilation = self._compiler.start(request.sampling.grammar, request.flow_key)
        self._waiting[request.id] = (request, compilation)

    def forget(self, request: Request) -> None:
        """Drops the compilation and the matcher of a request that has ended."""
        _, compilation = self._waiting.pop(request.id, (None, None))
        if compilation is not None and self._compiler is not None:
            self._compiler.leave(compilation)
        request.matcher = None

    def compiled(self) -> list[Closed]:
        """Removes the requests whose compilation has ended, in order of arrival; each has a matcher or an error."""
        if not self._waiting:
            return []
        assert self._compiler is not None
        done: list[Closed] = []
        for request, compilation in list(self._waiting.values()):
            if not self._compiler.settled(compilation):
                continue
            del self._waiting[request.id]
            if compilation.error is not None:
                done.append(Closed(request, self._own_error(request, compilation)))
            else:
                assert compilation.grammar is not None
                request.matcher = compilation.grammar.matcher()
                done.append(Closed(request))
        return done

    def wait(self, seconds: float) -> None:
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def masks(self, requests: Sequence[Request]) -> tuple[TokenMasks, list[Closed]]:
        """The masks of a step's `requests`, and the requests whose grammar allows no further token. These, and requests
        that have left their row, get a mask that allows all tokens, since their sample is dropped."""
        words: Int32 = np.full((len(requests), self._words), _ANY_TOKEN, np.int32)
        places = [place for place, request in enumerate(requests) if self._rows.runs(request)]
        if not places:
            return TokenMasks(words), []
        assert self._compiler is not None
        matchers = [_matcher(requests[place]) for place in places]
        all_run = len(places) == len(requests)
        own = words if all_run else np.empty((len(places), self._words), np.int32)
        progress = self._compiler.backend.fill(matchers, own)
        closed: list[Closed] = []
        for line, (place, found) in enumerate(zip(places, progress, strict=True)):
            request = requests[place]
            if found is MatchState.CONTINUES:
                self._mask_end_tokens(request, own[line])
            else:
                closed.append(self._closed(request, found))
                own[line] = _ANY_TOKEN
        if not all_run:
            words[places] = own
        return TokenMasks(words), closed

    def follow(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[Closed]:
        """Feeds each of the `requests`' matchers its token. Returns the requests whose output is complete or breaks the
        grammar."""
        assert self._compiler is not None
        progress = self._compiler.backend.accept([_matcher(request) for request in requests], tokens)
        return [
            self._closed(request, found)
            for request, found in zip(requests, progress, strict=True)
            if found is not MatchState.CONTINUES
        ]

    def _mask_end_tokens(self, request: Request, words: Int32) -> None:
        """Masks end tokens of a request that must not end yet, unless the grammar allows nothing else; if it may end,
        allows its stop tokens too."""
        sampling = request.sampling
        output = int(self._rows.num_tokens[request.row]) - request.prompt_len
        if sampling.ignore_eos or output < sampling.min_new_tokens:
            ends = {*self._eos, *(request.stop_ids.tolist() if output < sampling.min_new_tokens else ())}
            without = words.copy()
            for token in ends:
                without[token // MASK_WORD] &= ~_bit(token)
            if without.any():
                words[:] = without
        elif sampling.stop_token_ids and any(words[token // MASK_WORD] & _bit(token) for token in self._eos):
            for token in sampling.stop_token_ids:
                words[token // MASK_WORD] |= _bit(token)

    @staticmethod
    def _closed(request: Request, progress: MatchState) -> Closed:
        if progress is MatchState.COMPLETE:
            return Closed(request)
        assert request.sampling.grammar is not None
        field = request.sampling.grammar.field
        reason = _matcher(request).failure
        return Closed(request, GrammarError(f"the output can no longer follow {field}: {reason}", param=field))

    @staticmethod
    def _own_error(request: Request, compilation: Compilation) -> GrammarError | GrammarUnavailableError:
        """The error with this request's name for the grammar, which another request may have submitted."""
        assert compilation.error is not None
        assert request.sampling.grammar is not None
        theirs, own, error = compilation.source.field, request.sampling.grammar.field, compilation.error
        if theirs == own:
            return error
        param = None if error.param is None else error.param.replace(theirs, own, 1)
        return type(error)(error.message.replace(theirs, own, 1), param=param)


def _matcher(request: Request) -> Matcher:
    assert request.matcher is not None, f"request {request.id} has no grammar"
    return request.matcher


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token % MASK_WORD)).view(np.int32)

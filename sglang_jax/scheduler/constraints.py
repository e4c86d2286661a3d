"""Requests under a grammar: their wait until it is compiled, their matchers, and the masks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.compile_queue import Compilation
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.grammar.interface import Matcher, Progress
from sglang_jax.runner.plan import MASK_WORD, Int32, TokenMasks, mask_words
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows

_ANY_TOKEN = -1
"""A word of a mask that allows all of its tokens."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A request whose grammar lets nothing more come, or has failed (`error`)."""

    request: Request
    error: GrammarError | GrammarUnavailableError | None = None


class Constraints:
    """A request waits here, in COMPILING, until its grammar is compiled; from then on it has a matcher, which is told
    each token that the host keeps of its output, and no other. So a retraction changes nothing about it.

    **Arguments:** `compiler`: None where there are no grammars; `eos_ids`: those that grammars end outputs with.
    """

    def __init__(self, compiler: GrammarCompiler | None, rows: Rows, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._compiler = compiler
        self._rows = rows
        self._words = mask_words(vocab_size)
        self._eos = tuple(eos_ids)
        self._waiting: dict[int, tuple[Request, Compilation]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is compiled."""
        return len(self._waiting)

    def check(self, sampling: SamplingParams) -> None:
        """Raises `GrammarError` for a grammar where there can be none."""
        if sampling.grammar is not None and self._compiler is None:
            raise GrammarError(
                f"{sampling.grammar.field} needs structured output, which is off (--grammar-backend none) or does "
                "not support this model's tokenizer",
                param=sampling.grammar.field,
            )

    def begin(self, request: Request) -> None:
        """Has the grammar of a request compiled."""
        assert self._compiler is not None
        assert request.sampling.grammar is not None
        compilation = self._compiler.start(request.sampling.grammar, request.flow_key)
        self._waiting[request.id] = (request, compilation)

    def forget(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        _, compilation = self._waiting.pop(request.id, (None, None))
        if compilation is not None and self._compiler is not None:
            self._compiler.leave(compilation)
        request.matcher = None

    def compiled(self) -> list[Closed]:
        """Who waits no longer, in order of arrival: with a matcher, or with what is wrong with the grammar."""
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
        """Returns once a grammar is compiled, or after so long."""
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def masks(self, requests: Sequence[Request]) -> tuple[TokenMasks, list[Closed]]:
        """The masks of those who sample under one in a step, and whose grammar turns out to let nothing come.

        What these, and those that have left, sample is nobody's: they may sample anything.
        """
        words: Int32 = np.full((len(requests), self._words), _ANY_TOKEN, np.int32)
        places = [place for place, request in enumerate(requests) if self._rows.runs(request)]
        if not places:
            return TokenMasks(words), []
        assert self._compiler is not None
        matchers = [_matcher(requests[place]) for place in places]
        everybody = len(places) == len(requests)
        own = words if everybody else np.empty((len(places), self._words), np.int32)
        progress = self._compiler.backend.fill(matchers, own)
        closed: list[Closed] = []
        for line, (place, found) in enumerate(zip(places, progress, strict=True)):
            request = requests[place]
            if found is Progress.GOES_ON:
                self._settle_ends(request, own[line])
            else:
                closed.append(self._closed(request, found))
                own[line] = _ANY_TOKEN
        if not everybody:
            words[places] = own
        return TokenMasks(words), closed

    def follow(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[Closed]:
        """Tells the matcher of each of `requests` its next token. Whose output is over by it, or cannot be followed."""
        assert self._compiler is not None
        progress = self._compiler.backend.accept([_matcher(request) for request in requests], tokens)
        return [
            self._closed(request, found)
            for request, found in zip(requests, progress, strict=True)
            if found is not Progress.GOES_ON
        ]

    def _settle_ends(self, request: Request, words: Int32) -> None:
        """Who is not to end yet does not, unless nothing else can come; who may end may end by a token of its own."""
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
    def _closed(request: Request, progress: Progress) -> Closed:
        if progress is Progress.COMPLETE:
            return Closed(request)
        assert request.sampling.grammar is not None
        field = request.sampling.grammar.field
        reason = _matcher(request).failure
        return Closed(request, GrammarError(f"the output can no longer follow {field}: {reason}", param=field))

    @staticmethod
    def _own_error(request: Request, compilation: Compilation) -> GrammarError | GrammarUnavailableError:
        """In the words of this request, which may call the same grammar something else."""
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
    """The bit of a token in its word."""
    return np.uint32(1 << (token % MASK_WORD)).view(np.int32)

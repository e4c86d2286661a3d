"""Logprobs in the formats of OpenAI's two routes, and a limit for those of answers that do not stream, which are held
until the answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from sglang_jax.engine.types import OutputDelta, StreamDecoder, TextTokenizer, TokenLogprob
from sglang_jax.errors import ParameterError
from sglang_jax.server.errors import BusyError

ALL_ANSWERS_FACTOR = 2
"""Limit of all unwritten answers together, as a multiple of the limit of one answer."""

SHORT_ANSWER = 2**16
"""An answer with at most this many logprobs is not refused because of long answers of others."""

EXTRA_FOR_SHORT_ANSWERS = 128 * SHORT_ANSWER
"""Additional logprobs of short answers together: thousands of requests may be in flight."""

LOWEST_LOGPROB = -9999.0
"""Reported instead of minus infinity, which JSON does not have; OpenAI's own choice."""


def reported(logprob: float | None) -> float | None:
    """Returns a logprob that JSON can represent."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def token_string(tokenizer: TextTokenizer, token_id: int) -> str:
    r"""Returns a token as text, or as `bytes:\xe2\x82` if it is a part of a character: unlike U+FFFD, different for
    different tokens, as the keys of `top_logprobs` must be."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/completions`: one entry per token in each list."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []
    text_offset: list[int] = []


class CompletionLogprobWriter:
    """Writes the logprobs of one choice step by step: those of an echoed prompt if `from_prompt`, then the output's.
    Offsets count characters of the choice's text, including an echoed prompt. Tokens are decoded as the text is, so
    that omitted special tokens, and characters of several tokens, are counted correctly."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, *, from_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0
        self._decoder: StreamDecoder = tokenizer.stream_decoder(skip_special_tokens, continues_text=not from_prompt)

    def end_prompt(self, prompt_text: str) -> None:
        """Ends the echoed prompt with this text: output follows."""
        self._offset = len(prompt_text)
        self._decoder = self._tokenizer.stream_decoder(self._skip_special_tokens, continues_text=True)

    def write(self, tokens: Iterable[TokenLogprob], written: CompletionLogprobs) -> None:
        """Appends the next tokens to `written`. A token is one of its own alternatives, as with OpenAI."""
        for one in tokens:
            text = token_string(self._tokenizer, one.token_id)
            written.tokens.append(text)
            written.token_logprobs.append(reported(one.logprob))
            top: dict[str, float | None] | None = None
            if one.logprob is not None:
                top = {token_string(self._tokenizer, token): reported(logprob) for logprob, token in one.top}
                top.setdefault(text, reported(one.logprob))
            written.top_logprobs.append(top)
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.push(one.token_id))


class ChatAlternative(msgspec.Struct):
    """A likely token at a position."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token of a chat answer, and the most likely ones at its position."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/chat/completions`."""

    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    def alternative(token_id: int, logprob: float | None) -> ChatAlternative:
        spelled = list(tokenizer.token_bytes(token_id))
        return ChatAlternative(token_string(tokenizer, token_id), reported(logprob), spelled)

    content = []
    for one in tokens:
        token = alternative(one.token_id, one.logprob)
        top = [alternative(token_id, logprob) for logprob, token_id in one.top]
        content.append(ChatLogprob(token.token, token.logprob, token.bytes, top))
    return ChatLogprobs(content)


class HeldLogprobs:
    """Counts the logprobs that all answers of a server hold, on one event loop. `most`: limit of one answer: prompts'
    and outputs', with alternatives, for each of n completions. Each takes 20 to 110 bytes, and some thirty as JSON."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[OutputDelta], None]]:
        """Yields a function to call with each output of one answer; raises `ParameterError`, `BusyError` above a
        limit."""
        mine = 0

        def hold(output: OutputDelta) -> None:
            nonlocal mine
            more = _count(output)
            mine += more
            self.count += more
            if mine > self.most:
                raise ParameterError(
                    f"the request asks for more than {self.most} logprobs, the limit of one response "
                    "(--max-logprobs-per-response), counting alternatives of all prompts and outputs. Send fewer "
                    "prompts per request, or set stream",
                    param="top_logprobs_num",
                )
            limit = ALL_ANSWERS_FACTOR * self.most + (EXTRA_FOR_SHORT_ANSWERS if mine <= SHORT_ANSWER else 0)
            if self.count > limit:
                raise BusyError(
                    f"responses in preparation hold {self.count} logprobs; the limit is {limit}. Try again later, or "
                    "set stream"
                )

        try:
            yield hold
        finally:
            self.count -= mine


def _count(output: OutputDelta) -> int:
    return sum(
        len(tokens) * (1 + len(tokens[-1].top)) for tokens in (output.logprobs, output.prompt_logprobs) if tokens
    )

"""`suffix` of `/v1/completions`: the model fills a gap."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import ByteTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint.token_spelling import byte_alphabet
from sglang_jax.checkpoint.tokenizer import Tokenizer
from sglang_jax.config import EngineConfig
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fill_in import GapTokens

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in "☺\n".encode()), *"▁abcdefghijklmnopqrstuvwxyz"]
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]


def sentencepiece_like(*added: str) -> Tokenizer:
    """As the tokenizer.json of Code Llama and Codestral: each text starts with a space, after `<s>`."""
    pieces = [*PIECES, *(left + right for left, right in MERGES)]
    ids = {token: number for number, token in enumerate(pieces)}
    backend = Backend(models.BPE(ids, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", *added)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"), "test")


def byte_level(*added: str, special: bool, bos: str = "") -> Tokenizer:
    """The id of a byte is its value; added tokens follow from 256 on."""
    backend = Backend(models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    if bos:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 256)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "test")


QWEN = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>")
CODEGEMMA = ("<bos>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>")
STARCODER = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
SANTACODER = ("<|endoftext|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CODESTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")

BEFORE, AFTER = "the fox", "fox the\n"
BEFORE_BYTES, AFTER_BYTES = BEFORE.encode(), AFTER.encode()


@pytest.mark.parametrize(
    ("tokenizer", "expected", "ends"),
    [
        (byte_level(*QWEN, special=False), [257, *BEFORE_BYTES, 259, *AFTER_BYTES, 258], [256, 260, 261]),
        (
            byte_level(*CODEGEMMA, special=False, bos="<bos>"),
            [256, 257, *BEFORE_BYTES, 259, *AFTER_BYTES, 258],
            [260],
        ),
        (byte_level(*STARCODER, special=True), [257, *BEFORE_BYTES, 259, *AFTER_BYTES, 258], [256, 260]),
        (byte_level(*SANTACODER, special=True), [257, *BEFORE_BYTES, 259, *AFTER_BYTES, 258], [256, 260]),
        (
            byte_level(*DEEPSEEK, special=False, bos="<｜begin▁of▁sentence｜>"),
            [256, 258, *BEFORE_BYTES, 257, *AFTER_BYTES, 259],
            [],
        ),
        (
            sentencepiece_like(*CODE_LLAMA),
            ["<s>", "▁<PRE>", "▁the", "▁fox", "▁<SUF>", "fox", "▁the", "<0x0A>", "▁<MID>"],
            ["▁<EOT>"],
        ),
        (
            sentencepiece_like(*CODESTRAL),
            ["<s>", "[SUFFIX]", "fox", "▁the", "<0x0A>", "[PREFIX]", "▁the", "▁fox"],
            [],
        ),
    ],
    ids=["qwen", "codegemma", "starcoder", "santacoder", "deepseek", "code-llama", "codestral"],
)
def test_prompts_of_families(tokenizer: Tokenizer, expected: list[int | str], ends: list[int | str]) -> None:
    def ids(tokens: Sequence[int | str]) -> list[int]:
        found = [tokenizer.token_id(token) if isinstance(token, str) else token for token in tokens]
        return [token for token in found if token is not None]

    async def encode(text: str, field: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    gap = GapTokens.of(tokenizer)
    [prompt, empty] = asyncio.run(gap.prompts([BEFORE, ""], AFTER, encode, 100))
    assert list(prompt) == ids(expected)
    assert tokenizer.decode(prompt[prompt.before]) == BEFORE
    assert len(empty) == len(prompt) - len(prompt[prompt.before])
    assert any(one is other for one in prompt.parts for other in empty.parts if len(one) > 1)  # the suffix, once
    assert sorted(gap.ends) == sorted(ids(ends))


@pytest.mark.parametrize(
    ("added", "missing"),
    [((), "none of <|fim_prefix|>, <fim_prefix>"), (("<fim_prefix>", "<fim_suffix>"), "no <fim_middle>")],
)
def test_what_a_tokenizer_lacks_is_named(added: tuple[str, ...], missing: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=missing.replace("|", r"\|")):
        GapTokens.of(byte_level(*added, special=True))


class MarkingTokenizer(ByteTokenizer):
    """Bytes that texts do not use are the tokens around a gap."""

    def token_id(self, text: str) -> int | None:
        return {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|fim_pad|>": 4}.get(text)


@pytest.fixture(scope="module")
def marking() -> Iterator[EchoServer]:
    def load(config: EngineConfig) -> MarkingTokenizer:
        return MarkingTokenizer()

    with serve_echo(load_tokenizer=load) as server:
        yield server


@pytest.fixture(scope="module")
def code_llama() -> Iterator[EchoServer]:
    with serve_echo(load_tokenizer=lambda config: sentencepiece_like(*CODE_LLAMA)) as server:
        yield server


def choices(server: EchoServer, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_the_model_reads_both_texts(marking: EchoServer) -> None:
    several = choices(marking, prompt=["a€", "", "b"], suffix="c", n=2)
    assert [choice["text"] for choice in several] == [
        text for text in ("\x01a€\x02c\x03", "\x01\x02c\x03", "\x01b\x02c\x03") for _ in range(2)
    ]
    assert choices(marking, prompt="ab", suffix="cd", stop="d")[0]["text"] == "\x01ab\x02c"
    for nothing in ("", None):
        assert choices(marking, prompt="ab", suffix=nothing)[0]["text"] == "ab"


def test_the_familys_tokens_end_the_middle(marking: EchoServer) -> None:
    body = {"prompt": "a\x04b", "suffix": "c"}
    ended = choices(marking, **body)[0]
    assert (ended["text"], ended["finish_reason"], ended["matched_stop"]) == ("\x01a", "stop", 4)
    assert choices(marking, **body, ignore_eos=True, max_tokens=5)[0]["text"] == "\x01a\x04b\x02"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_repeats_only_the_prompt(marking: EchoServer, stream: bool) -> None:
    body = {"prompt": ["b€", ""], "suffix": "c", "echo": True, "logprobs": 0, "max_tokens": 2}
    parts = [choice for event in marking.events("/v1/completions", body) for choice in event["choices"]]
    if not stream:
        parts = choices(marking, **body)
    texts, logprobs = ["", ""], [[[], []], [[], []]]
    for part in parts:
        texts[part["index"]] += part["text"]
        logprobs[part["index"]][0] += part["logprobs"]["text_offset"]
        logprobs[part["index"]][1] += part["logprobs"]["tokens"]
    assert texts == ["b€\x01b", "\x01\x02"]
    assert logprobs[0][0] == [0, 1, 1, 1, 2, 3]
    assert logprobs[0][1][0::4] == ["b", "\x01"]
    assert logprobs[1] == [[0, 1], ["\x01", "\x02"]]


def test_the_middle_keeps_its_leading_space(code_llama: EchoServer) -> None:
    body = {"prompt": "the fox", "suffix": "fox"}
    assert choices(code_llama, **body)[0]["text"] == " the foxfox"
    echoed = choices(code_llama, **body, echo=True, logprobs=0)[0]
    assert echoed["text"] == "the fox the foxfox"
    assert echoed["logprobs"]["text_offset"][:6] == [0, 3, 7, 7, 7, 11]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": [1, 2], "suffix": "b"}, "suffix", "got token ids"),
        ({"prompt": [[]], "suffix": "b"}, "prompt", "empty"),
        ({"prompt": "a", "suffix": "b", "session_params": {"id": "s"}}, "suffix", "session"),
        ({"prompt": "a", "suffix": 5}, "suffix", "string, got 5"),
        ({"prompt": "a" * 2000, "suffix": "b" * 2093}, "prompt", "4096 tokens, with suffix .* the limit is 4095"),
        ({"prompt": "a", "suffix": "b" * 70_000}, "suffix", "suffix has .* 4096"),
        ({"prompt": "a", "suffix": "b", "stop_token_ids": [*range(10, 25)]}, "stop_token_ids", "at most 14 .* got 15"),
    ],
)
def test_refused(marking: EchoServer, body: dict[str, Any], param: str, message: str) -> None:
    for more in ({}, {"stream": True}):
        response = marking.http.post("/v1/completions", json={**body, **more})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert re.search(message, error["message"]), error

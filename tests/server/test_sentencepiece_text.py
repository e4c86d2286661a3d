"""Text of outputs where every text starts with a space that decoding removes, as sentencepiece does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint.tokenizer import Tokenizer
from sglang_jax.config import EngineConfig

TOKENS = ["<unk>", "<s>", "</s>", "<0xE2>", "<0x82>", "<0xAC>", *"▁abcdefghijklmnopqrstuvwxyz"]
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def llama_like_tokenizer(config: EngineConfig) -> Tokenizer:
    """Normalizer and decoder as in the tokenizer.json of Llama 2, over a few words."""
    vocabulary = [*TOKENS, *(left + right for left, right in MERGES)]
    ids = {token: number for number, token in enumerate(vocabulary)}
    backend = Backend(models.BPE(ids, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hugging_face = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    return Tokenizer(hugging_face, "test")


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with serve_echo(load_tokenizer=llama_like_tokenizer) as server:
        yield server


def complete(server: EchoServer, **body: Any) -> Any:
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


PROMPTS = ["the fox", "fox", "a  the", "€the", "x €"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_keeps_the_space_between_prompt_and_output(server: EchoServer, prompt: str, as_ids: bool) -> None:
    tokenizer = server.engine.tokenizer
    ids = tokenizer.encode(prompt)
    whole = tokenizer.decode([*ids, *ids])
    assert whole == f"{prompt} {prompt}"
    body: dict[str, Any] = {"prompt": ids if as_ids else prompt, "echo": True}
    assert complete(server, **body)["text"] == whole
    events = server.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_plus_text_is_the_whole_without_an_echo_too(server: EchoServer, prompt: str) -> None:
    whole = f"{prompt} {prompt}"
    assert prompt + complete(server, prompt=prompt)["text"] == whole
    assert prompt + server.http.post("/generate", json={"text": prompt}).json()["text"] == whole
    assert prompt + server.events("/generate", {"text": prompt})[-1]["text"] == whole


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_characters_of_the_returned_text(server: EchoServer, echo: bool) -> None:
    choice = complete(server, prompt="the fox", echo=echo, logprobs=0, max_tokens=2)
    assert choice["text"] == "the fox the fox"[0 if echo else 7 :]
    words = [" the", " fox"]
    assert choice["logprobs"]["tokens"] == words * (2 if echo else 1)
    assert choice["logprobs"]["text_offset"] == ([0, 3, 7, 11] if echo else [0, 4])


def test_a_chat_answer_has_no_leading_space(server: EchoServer) -> None:
    def content(*messages: tuple[str, str], **fields: Any) -> str:
        body = {"messages": [{"role": role, "content": text} for role, text in messages], **fields}
        answer: str = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        streamed = server.events("/v1/chat/completions", body)
        deltas = [choice["delta"] for event in streamed for choice in event["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == answer
        return answer

    assert content(("user", "the fox")) == "the fox"
    begun = content(("user", "the"), ("assistant", " fox"), continue_final_message=True)
    assert begun == " the fox"

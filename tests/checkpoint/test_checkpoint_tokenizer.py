"""Tokenizers of folders and GGUF files, against transformers' tokenizers."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_files import byte_level_metadata, write_gguf
from helpers.tiny_models import CHAT_TEMPLATE, make_tiny_checkpoint, make_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from sglang_jax.checkpoint import ModelSource, SourceKind, resolve_model, resolve_tokenizer
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.gguf_tokenizer import gguf_tokenizer
from sglang_jax.checkpoint.tokenizer import KEPT_TOKENS, SHORT_TEXT, Tokenizer, load_tokenizer
from sglang_jax.errors import CheckpointError, ParameterError, RequestError

TEXTS = [
    "the quick brown fox, again and again",
    "What's the capital of France? It's Paris!",
    "  two  spaces\n\n\tand tabs  ",
    "naïve café, 東京 🙂👩‍👩‍👧 Ελλάδα",
    "x = 1234 + 56.78e9",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a <b>city</b> & a 'river'.\n"},
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(resolve_model("demo"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(folder)))


def test_a_folder_tokenizes_as_transformers_does(tiny: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tiny.encode(text)
        assert ids == theirs.encode(text)
        assert tiny.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tiny.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert (tiny.bos_token_id, tiny.eos_token_id, tiny.vocab_size) == (0, 2, len(theirs))
    assert tiny.special_token_ids == {0, 1, 2}


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_as_tokenizer_json_says(tmp_path: Path, add_bos: bool) -> None:
    make_tiny_tokenizer(tmp_path)
    if add_bos:
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
        backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(resolve_tokenizer(str(tmp_path)))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == ([0, *plain] if add_bos else plain)
    assert tokenizer.encode("the fox") == AutoTokenizer.from_pretrained(tmp_path).encode("the fox")


def test_padding_and_truncation_settings_are_dropped(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(resolve_tokenizer(str(tmp_path))).encode(TEXTS[0])
    assert len(ids) > 3
    assert ids[-1] != 0


def test_known_ids_of_the_embedded_model(demo: Tokenizer) -> None:
    """`Digits` splits numbers into single digits, and the space before a number is a separate token, as in training."""
    assert demo.encode("What is the capital of France?") == [1780, 314, 260, 3575, 282, 4649, 47]
    assert demo.encode("a  12") == [*demo.encode("a"), *demo.encode("  "), *demo.encode("1"), *demo.encode("2")]
    assert demo.encode("<|im_start|>") == [1]
    assert (demo.bos_token_id, demo.eos_token_id, demo.vocab_size) == (1, 2, 49152)
    assert demo.special_token_ids == set(range(17))
    for text in TEXTS:
        assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


def test_the_embedded_model_tokenizes_as_transformers_conversion_where_there_are_no_digits(demo: Tokenizer) -> None:
    metadata = open_gguf(resolve_model("demo").path).metadata
    fields = {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")}
    backend, _ = convert_gguf_tokenizer("llama", fields | {"tokenizer_type": "gpt2"})
    for text in [text for text in TEXTS if not any(character.isdigit() for character in text)]:
        assert demo.encode(text) == backend.encode(text).ids


def test_token_bytes_join_to_the_text(demo: Tokenizer, tiny: Tokenizer) -> None:
    for tokenizer in (demo, tiny):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert {tiny.token_bytes(tiny.encode(chr(byte))[0]) for byte in range(128)} == {bytes([b]) for b in range(128)}
    assert tiny.token_text(2) == "<|im_end|>"
    smile = tiny.encode("🙂")
    assert [tiny.token_bytes(token) for token in smile] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert tiny.token_text(smile[0]) == "\ufffd"
    assert (tiny.token_bytes(100_000), tiny.decode([100_000])) == (b"", "")


def test_text_that_is_not_unicode_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(ParameterError, match=r"lone surrogate U\+D83D at position 2"):
        tiny.encode("hi\ud83d")


def test_chat_renders_as_transformers_renders_it(tiny: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for prompt in (True, False):
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        assert tiny.render_chat(MESSAGES, add_generation_prompt=prompt) == text
    assert "<b>city</b> & a 'river'." in tiny.render_chat(MESSAGES)


def test_chat_of_the_embedded_model(demo: Tokenizer) -> None:
    assert demo.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": ["parts"]}], "the chat template refused the messages: .*concatenate"),
        ([{"role": "user"}], "the chat template refused the messages: .*content"),
        ([], "messages is empty; a conversation needs"),
    ],
)
def test_messages_that_the_template_refuses_are_an_error(
    tiny: Tokenizer, messages: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tiny.render_chat(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_chat_template_overrides(tmp_path: Path, folder: Path) -> None:
    source = resolve_model(str(folder))
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert load_tokenizer(source, chat_template=template).render_chat(MESSAGES[:1]) == "[Be brief.]"
    (tmp_path / "mine.jinja").write_text(template + "!")
    mine = load_tokenizer(source, chat_template=str(tmp_path / "mine.jinja"))
    assert mine.render_chat(MESSAGES[:1]) == "[Be brief.]!"
    with pytest.raises(CheckpointError, match="'/none' is neither a file nor a Jinja template"):
        load_tokenizer(source, chat_template="/none")


def test_a_chat_template_that_is_not_text_is_refused(tmp_path: Path, folder: Path) -> None:
    """Neither from the option nor from the checkpoint."""
    mine = tmp_path / "mine.jinja"
    mine.write_bytes(b"{{ '\xff' }}")
    with pytest.raises(CheckpointError, match=re.escape(f"chat template {mine} is not UTF-8: ")):
        load_tokenizer(resolve_model(str(folder)), chat_template=str(mine))
    checkpoint = tmp_path / "checkpoint"
    make_tiny_tokenizer(checkpoint)
    further = checkpoint / "additional_chat_templates" / "rag.jinja"
    further.parent.mkdir()
    for own in (further, checkpoint / "chat_template.jinja"):
        own.write_bytes(b"{{ '\xff' }}")
        with pytest.raises(CheckpointError, match=re.escape(f"chat template {own} is not UTF-8: ")):
            load_tokenizer(resolve_tokenizer(str(checkpoint)))


def test_without_a_chat_template_chats_are_refused(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(resolve_tokenizer(str(tmp_path))).render_chat(MESSAGES)


def test_a_saved_tokenizer_loads_the_same(tmp_path: Path, demo: Tokenizer) -> None:
    demo.save(tmp_path)
    again = load_tokenizer(resolve_tokenizer(str(tmp_path)))
    for text in TEXTS:
        assert again.encode(text) == demo.encode(text)
    assert again.render_chat(MESSAGES) == demo.render_chat(MESSAGES)
    assert (again.bos_token_id, again.eos_token_id) == (demo.bos_token_id, demo.eos_token_id)


@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_special_tokens_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, add_bos: bool, add_eos: bool) -> None:
    """`unk` has a role, but the file's token types mark it as text."""
    metadata = sentencepiece_metadata() | {
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.ggml.add_eos_token": add_eos,
        "tokenizer.ggml.unknown_token_id": 5,
        "tokenizer.ggml.padding_token_id": 1,
    }
    source = gguf_with(tmp_path, metadata)
    own, parts = load_tokenizer(source), gguf_tokenizer(open_gguf(source.path))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=parts.backend_tokenizer,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        **parts.special_tokens_map,
    )
    unknown = metadata["tokenizer.ggml.tokens"][5]
    for text in [*TEXTS, f"a{unknown}b <s> </s>"]:
        for add in (False, True):
            assert own.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    assert own.special_token_ids == frozenset(theirs.all_special_ids)
    assert (own.bos_token_id, own.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_a_folder_without_a_tokenizer_or_with_an_unknown_kind(tmp_path: Path) -> None:
    source = ModelSource(SourceKind.SAFETENSORS, tmp_path, "x")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; give --tokenizer-path"):
        load_tokenizer(source)
    backend = Backend(models.BPE())
    backend.decoder = decoders.BPEDecoder()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"decodes by \['BPEDecoder'\]; supported: ByteLevel, WordPiece"):
        load_tokenizer(source)


@pytest.mark.parametrize("kind", ["WordPiece", "Metaspace"])
def test_tokenizers_of_encoders(kind: str, tmp_path: Path) -> None:
    """As BERT's and XLM-RoBERTa's, with texts that these spell as they are."""
    words = ["un", "##break", "##able", "words", "▁un", "▁words", "break", "able", "[UNK]", "[SEP]"]
    if kind == "WordPiece":
        backend = Backend(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    else:
        backend = Backend(models.Unigram([(word, -1.0) for word in words], unk_id=8))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    files = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]")
    files.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelSource(SourceKind.SAFETENSORS, tmp_path, "x"))
    for text in ("unbreakable words", "un words un", ""):
        ids = tokenizer.encode(text)
        assert ids == files.encode(text)
        assert tokenizer.decode(ids) == files.decode(ids) == text
        stream = tokenizer.stream_decoder(skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == text
    assert tokenizer.special_tokens == {"[UNK]": 8, "[SEP]": 9}


def gguf_with(path: Path, metadata: dict[str, Any]) -> ModelSource:
    return ModelSource(SourceKind.GGUF, write_gguf(path / "t.gguf", "llama", metadata, {}), "t")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"])
def test_splits_are_those_of_transformers_conversion(tmp_path: Path, pre: str) -> None:
    metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path), pre)
    own = load_tokenizer(gguf_with(tmp_path, metadata))
    fields = {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")}
    backend, _ = convert_gguf_tokenizer("llama", fields | {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre})
    assert backend.pre_tokenizer is not None
    parts = gguf_tokenizer(open_gguf(tmp_path / "t.gguf"))
    assert parts.backend_tokenizer.pre_tokenizer is not None
    for text in [*TEXTS, "I'LL CamelCase/ABCdef 12345\r\n ...", "e\u0301"]:
        ours, theirs = parts.backend_tokenizer.pre_tokenizer, backend.pre_tokenizer
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
        if text != "e\u0301":
            assert own.encode(text) == backend.encode(text).ids
    composed = own.encode("e\u0301") == own.encode("é")
    assert composed is (pre == "qwen2")


def test_whole_tokens_win_over_merges_for_llama3(tmp_path: Path) -> None:
    """Llama 3 keeps a word that is a token even where the merges would build it from other tokens."""
    metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zq")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.add_bos_token"] = True
    tokenizer = load_tokenizer(gguf_with(tmp_path, metadata))
    assert tokenizer.encode("zq") == [0, len(metadata["tokenizer.ggml.tokens"]) - 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, r"tokenizer\.ggml\.pre is 'brand-new'.*give --tokenizer-path"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer 'bert' is not supported \(supported: gpt2, llama\)"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', which is not two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "one type for each of 384 tokens"),
        ({"tokenizer.ggml.model": "llama"}, "one score for each of 384 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "should be a list of strings"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_built(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path)) | change
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(gguf_with(tmp_path, metadata))


@pytest.mark.parametrize("role", ["bos", "eos", "padding", "unknown"])
@pytest.mark.parametrize("index", [5000, 4294967295])
def test_ids_outside_the_vocabulary_decode_to_nothing(
    tmp_path: Path, role: str, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = byte_level_metadata(make_tiny_tokenizer(tmp_path))
    plain = load_tokenizer(gguf_with(tmp_path, metadata)).encode("a fox")
    tokenizer = load_tokenizer(gguf_with(tmp_path, metadata | {f"tokenizer.ggml.{role}_token_id": index}))
    assert tokenizer.encode("a fox") == plain
    assert tokenizer.eos_token_id is None or role != "eos"
    if role in ("bos", "eos"):
        assert f"Ignoring tokenizer.ggml.{role}_token_id {index}" in caplog.text


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary in the order of sentencepiece BPE: control tokens, bytes, pieces by falling score, then letters."""
    pieces = ["▁t", "he", "▁the", "in", "an", "▁f", "ox", "▁fox", "er", "▁a", "▁an", "and", "▁and", "▁▁", "ther"]
    letters = sorted(set("▁the quick brown fox jumps over lazy dog inad".replace(" ", "")))
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SENTENCEPIECE_TEXTS = ["the fox and the other", "  the  fox", "naïve 🙂 fox", "the</s> and", "and\n\nthen", "foxther"]


def test_sentencepiece_tokenizes_as_transformers_conversion(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = load_tokenizer(gguf_with(tmp_path, metadata))
    fields = {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")}
    backend, _ = convert_gguf_tokenizer("llama", fields | {"tokenizer_type": "llama"})
    for text in SENTENCEPIECE_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == backend.decode(ids)
    tokens = metadata["tokenizer.ggml.tokens"]
    words = [tokens[token] for token in tokenizer.encode("the fox", add_special_tokens=False)]
    assert words == ["▁the", "▁fox"]


def test_bytes_of_sentencepiece_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_with(tmp_path, sentencepiece_metadata()))
    for text in SENTENCEPIECE_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        prefixed = text if text.startswith(" ") else f" {text}"
        assert b"".join(map(tokenizer.token_bytes, ids)) == prefixed.encode()
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(2) == "</s>"


def test_a_sentencepiece_vocabulary_without_a_space_before_text(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = load_tokenizer(gguf_with(tmp_path, metadata))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"the fox"
    assert tokenizer.decode(ids) == "the fox"


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    stream = tokenizer.stream_decoder(skip)
    return "".join(stream.push(token) for token in ids) + stream.flush()


@pytest.mark.parametrize("kind", ["tiny", "demo", "sentencepiece"])
def test_streamed_text_is_the_decoded_text(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "sentencepiece":
        tokenizer = load_tokenizer(gguf_with(tmp_path, sentencepiece_metadata()))
    else:
        tokenizer = request.getfixturevalue(kind)
    for text in [*TEXTS, *SENTENCEPIECE_TEXTS]:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert streamed(tokenizer, ids, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_any_byte_level_tokens_stream_to_their_decoding(tiny: Tokenizer) -> None:
    """Random tokens are mostly not UTF-8; decoding and the stream place U+FFFD by the same rule."""
    generator = random.Random(0)
    for _ in range(300):
        ids = [generator.randrange(tiny.vocab_size) for _ in range(generator.randrange(30))]
        for skip in (True, False):
            assert streamed(tiny, ids, skip=skip) == tiny.decode(ids, skip_special_tokens=skip)


def test_a_character_is_held_back_until_it_is_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("a🙂b")
    stream = tiny.stream_decoder()
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""
    stream = tiny.stream_decoder()
    assert [stream.push(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.flush() == "\ufffd" == tiny.decode(ids[1:3])


def test_a_continued_sentencepiece_text_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_with(tmp_path, sentencepiece_metadata()))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    stream = tokenizer.stream_decoder(continues_text=True)
    assert [stream.push(token) for token in ids] == [" the", " fox"]
    stream = tokenizer.stream_decoder()
    assert [stream.push(token) for token in ids] == ["the", " fox"]


def test_neither_torch_nor_jax_is_imported(folder: Path) -> None:
    """Torch is installed here, and transformers imports it at the slightest use of a model's config."""
    program = f"""
import sys
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.tokenizer import load_tokenizer
for path in ("demo", {str(folder)!r}):
    checkpoint = open_checkpoint(path)
    checkpoint.reader.read("model.norm.weight")
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    tokenizer.render_chat([{{"role": "user", "content": "hi"}}])
    stream = tokenizer.stream_decoder()
    print([stream.push(token) for token in tokenizer.encode("the fox")])
    print("transformers" in sys.modules)
print([name for name in ("torch", "jax", "flax", "tensorflow") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    lines = result.stdout.splitlines()
    assert lines[-1] == "[]"
    assert lines[0] == "['the', ' fox']"
    assert (lines[1], lines[3]) == ("False", "True"), "a GGUF file needs no transformers, whose import takes long"


def test_the_tiny_chat_template_is_the_one_saved(folder: Path) -> None:
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_has_the_ids_that_its_tokenizer_gives(
    demo: Tokenizer, tiny: Tokenizer, folder: Path, add_special_tokens: bool
) -> None:
    """Long texts are encoded by another method than short ones."""
    theirs = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(3)
    for _ in range(5):
        text = "".join(draw.choice(TEXTS) for _ in range(200))
        assert len(text) > SHORT_TEXT
        assert tiny.encode(text, add_special_tokens=add_special_tokens) == theirs.encode(
            text, add_special_tokens=add_special_tokens
        )
        one_by_one = demo._backend.encode(text, add_special_tokens=add_special_tokens)
        assert demo.encode(text, add_special_tokens=add_special_tokens) == one_by_one.ids


def test_special_tokens_around_a_long_text() -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "test")
    text = "a " * SHORT_TEXT
    assert tokenizer.encode(text) == [0, *[2] * SHORT_TEXT, 1]
    assert tokenizer.encode(text, add_special_tokens=False) == [2] * SHORT_TEXT


def has_turns_during(work: Callable[[int], object]) -> bool:
    """Whether this thread runs repeatedly while another does the work, whose size grows: on a busy machine it gets
    few turns in a short time, and none at all if the other thread keeps the GIL."""
    for size in (1, 5, 25):
        thread = threading.Thread(target=work, args=(size,))
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
            time.sleep(0.001)
        if turns > 5:
            return True
    return False


def test_other_threads_run_while_a_text_is_tokenized(demo: Tokenizer) -> None:
    draw = random.Random(5)
    text = " ".join("".join(draw.choices("abcdefghij", k=draw.randrange(1, 9))) for _ in range(30_000))
    assert has_turns_during(lambda size: demo.encode(text * size))


def test_other_threads_run_while_many_tokens_are_decoded(demo: Tokenizer) -> None:
    ids = [random.Random(7).randrange(demo.vocab_size) for _ in range(200_000)]
    texts: list[str] = []
    assert has_turns_during(lambda size: texts.append(demo.decode(ids * size)))
    assert texts[0] == demo._backend.decode(ids)


def test_the_cache_of_token_bytes_is_limited(demo: Tokenizer) -> None:
    """A cache of every token that a server ever produced made it grow for hours."""
    first = [demo.token_bytes(token) for token in range(KEPT_TOKENS + 10)]
    assert len(demo._bytes) <= KEPT_TOKENS
    assert [demo.token_bytes(token) for token in range(KEPT_TOKENS + 10)] == first


def test_no_token_is_longer_than_the_longest_token(demo: Tokenizer, tiny: Tokenizer) -> None:
    for tokenizer in (demo, tiny):
        longest = max(len(tokenizer.token_text(token)) for token in range(tokenizer.vocab_size))
        assert longest <= tokenizer.longest_token < 200

"""Tokenizers, streams of text and chat templates of all checkpoint formats, without tensor libraries.

For folders, transformers' `PreTrainedTokenizerFast` is used, because `AutoTokenizer` imports torch if it is installed.
It is imported only for folders, because importing transformers takes most of a second.
"""

from __future__ import annotations

import codecs
import ctypes
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from sglang_jax.architectures.files import check_regular, read_file
from sglang_jax.checkpoint.chat_template import ChatTemplate, TemplateFiles
from sglang_jax.checkpoint.control_tokens import ControlTokens
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from sglang_jax.checkpoint.marked_text import MarkedText
from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.checkpoint.template_process import TEMPLATE_SECONDS
from sglang_jax.checkpoint.token_spelling import spelling_of
from sglang_jax.errors import CheckpointError, ParameterError, RequestError, cut

TOKENIZER_FILE = "tokenizer.json"
TOKEN_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 1 << 20

_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError)
"""Exceptions of transformers for malformed files."""

SHORT_TEXT = 1024
"""Texts up to this many characters are tokenized without releasing the GIL: that costs less than waking threads."""

MANY_TOKENS = 1024
"""Up to this many tokens are decoded without releasing the GIL, for the same reason."""

KEPT_TOKENS = 8192
"""Tokens whose bytes are cached. With the whole vocabulary, a server of random tokens would grow for hours."""

LARGE_TEXT = 32_768
"""Tokenizing texts of more characters takes 10 MB or more, which the allocator would keep for each thread."""


class TokenizerFiles(TemplateFiles, Protocol):
    """The parts of a tokenizer that are used, under the names of transformers' `PreTrainedTokenizerFast`."""

    response_template: Mapping[str, Any] | None

    @property
    def backend_tokenizer(self) -> Backend: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def save_pretrained(self, folder: str | Path) -> object: ...


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Thread-safe."""

    def __init__(
        self,
        files: TokenizerFiles,
        source: str,
        *,
        special_tokens_in_content: bool = False,
        template_seconds: float = TEMPLATE_SECONDS,
    ) -> None:
        """`source`: the checkpoint's name in errors. `special_tokens_in_content`: control tokens spelt in messages are
        read as such. `template_seconds`: time limit of the chat template per conversation. Raises `CheckpointError` for
        an unsupported kind of vocabulary."""
        self._files = files
        self._backend: Backend = files.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._spelling = spelling_of(self._backend, source)
        self._bytes: dict[int, bytes] = {}
        added = self._backend.get_added_tokens_decoder()
        self._misread = self._misread_tokens({token_id: token.content for token_id, token in added.items()})
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        self._control = ControlTokens(
            token.content for token in added.values() if token.special and not special_tokens_in_content
        )
        self._marked_text = MarkedText(self._backend, self._control)
        ends = {files.bos_token_id, files.eos_token_id, files.pad_token_id}
        others = [str(self._backend.id_to_token(token_id)) for token_id in sorted(self._special_ids - ends)]
        self._chat = ChatTemplate(files, self._control, others, seconds=template_seconds)

    @property
    def vocab_size(self) -> int:
        """Number of tokens with text. The model's vocabulary may be padded beyond it."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def longest_token(self) -> int:
        """Upper bound of the characters of one token: a vocabulary spells each byte as at least a character."""
        return self._longest_token

    @property
    def bos_token_id(self) -> int | None:
        return self._files.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._files.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that `skip_special_tokens` leaves out."""
        return self._special_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that `skip_special_tokens` leaves out, by spelling."""
        return self._special_tokens

    def token_id(self, text: str) -> int | None:
        """Id of the token with this spelling in the vocabulary, special or not; None without one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @property
    def role_tokens(self) -> Mapping[str, str]:
        """Spellings of tokens with a role, by transformers' name of the role, such as `bos_token`."""
        return {role: str(token) for role, token in self._files.special_tokens_map.items() if role in TOKEN_ROLES}

    @property
    def chat_template(self) -> str:
        return self._chat.text

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """transformers' description of the format of replies, if the checkpoint has one."""
        found = self._files.response_template
        return found if isinstance(found, Mapping) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids. Special tokens in the text are recognised, except those that `render_chat` marked as spelt
        by a message. Raises `ParameterError` for text with a lone surrogate, and `RequestError` if the tokenizer
        fails."""
        return self._encoded((text,), lambda: self._encode(text, add_special_tokens))

    def encode_pair(self, first: str, second: str) -> list[int]:
        """See `TextTokenizer.encode_pair`."""

        def encode() -> list[int]:
            [encoding] = self._backend.encode_batch_fast([(first, second)])
            ids: list[int] = encoding.ids
            return ids

        return self._encoded((first, second), encode)

    def _encoded(self, texts: Sequence[str], encode: Callable[[], list[int]]) -> list[int]:
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ParameterError(
                    f"text contains the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}",
                    param="text",
                ) from error
        try:
            return encode()
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise RequestError("the model's tokenizer cannot read this text", param="text") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._control.has_marks(text):
            ids = self._marked_text.encode(text, add_special_tokens)
        elif len(text) <= SHORT_TEXT:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            # A batch of one gives the same ids, and releases the GIL.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
            del encoding
        if len(text) > LARGE_TEXT:
            _give_memory_back()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids. Ids without text add nothing, and bytes that are not UTF-8 become U+FFFD."""
        text: str
        if not self._misread.keys().isdisjoint(ids):
            skipped = self._special_ids if skip_special_tokens else frozenset()
            text = b"".join(self.token_bytes(token) for token in ids if token not in skipped).decode("utf-8", "replace")
        elif len(ids) <= MANY_TOKENS:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:  # as a batch of one, as in `_encode`
            [text] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a token, also of a special one; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; empty for an id without text."""
        known = self._bytes.get(token_id, self._misread.get(token_id))
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = b"" if token is None else self._spelling.bytes_of(token)
            if len(self._bytes) >= KEPT_TOKENS:
                self._bytes.clear()
            self._bytes[token_id] = known
        return known

    def stream_decoder(
        self,
        skip_special_tokens: bool = True,
        *,
        continues_text: bool = False,
        markers: Set[int] = frozenset(),
    ) -> TextStream:
        """A decoder for a growing sequence of tokens. `continues_text`: the tokens follow other text, so the leading
        space that sentencepiece removes is kept. `markers`: special tokens that are not skipped."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if markers:
            skipped -= markers
        stripped = 0 if continues_text else self._spelling.leading_spaces_stripped
        return TextStream(self.token_bytes, skipped, stripped)

    def check_roles(self, roles: Sequence[object]) -> None:
        self._chat.check_roles(roles)

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Renders a conversation for `encode`; see `ChatTemplate.render`."""
        return self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def marked(self, text: str) -> str:
        """Marks the control tokens in a message's text, as `render_chat` does."""
        return self._control.mark(text)

    def _misread_tokens(self, added: Mapping[int, str]) -> dict[int, bytes]:
        """Bytes of added tokens that the library decodes wrongly, as if they were in GPT-2's byte alphabet."""
        if not self._spelling.byte_level:
            return {}
        # A GGUF file has one vocabulary for pieces and added tokens.
        is_file = isinstance(self._files, GgufTokenizer)
        pieces = {} if is_file else self._backend.get_vocab(with_added_tokens=False)
        texts = {
            token_id: self._spelling.bytes_of_added(token, is_piece=token in pieces)
            for token_id, token in added.items()
        }
        return {token_id: text for token_id, text in texts.items() if text != self._spelling.bytes_of(added[token_id])}

    def save(self, folder: Path) -> None:
        self._files.save_pretrained(folder)


def _give_memory_back() -> None:
    """Makes glibc return free memory to the system; other C libraries do so without this. Takes some 20 ms, during
    which other threads run."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def load_tokenizer(
    source: ModelSource,
    *,
    chat_template: str | None = None,
    special_tokens_in_content: bool = False,
    template_seconds: float = TEMPLATE_SECONDS,
) -> Tokenizer:
    """Loads the tokenizer of `Checkpoint.tokenizer_source` or `resolve_tokenizer`. `chat_template` replaces the
    checkpoint's: a Jinja file, or the template itself. The other arguments: see `Tokenizer`. Raises `CheckpointError`
    for a missing or unsupported tokenizer, and for an unreadable template."""
    files: TokenizerFiles = _from_gguf(source.path) if source.kind is SourceKind.GGUF else _from_folder(source.path)
    if chat_template is not None:
        files.chat_template = _template_text(chat_template)
    return Tokenizer(
        files, str(source.path), special_tokens_in_content=special_tokens_in_content, template_seconds=template_seconds
    )


def import_tokenizers() -> type[Any]:
    from transformers import PreTrainedTokenizerFast

    found: type[Any] = PreTrainedTokenizerFast
    return found


def _from_folder(folder: Path) -> TokenizerFiles:
    from transformers.utils.hub import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE

    if not (folder / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"the folder {folder} has no {TOKENIZER_FILE}; give --tokenizer-path with a folder that has one (older "
            "tokenizer files can be converted by loading and saving them with transformers)"
        )
    for file in folder.glob("*.json"):
        check_regular(file)  # transformers may open it
    if (size := (folder / TOKENIZER_FILE).stat().st_size) > _MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{folder / TOKENIZER_FILE} has {size} bytes, the limit is {_MAX_TOKENIZER_BYTES}")
    for file in (*folder.glob(CHAT_TEMPLATE_FILE), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*.jinja")):
        _read_template(file)  # transformers reads it too, but its errors do not name the file
    with _damage_named(folder):
        files: TokenizerFiles = import_tokenizers().from_pretrained(str(folder), local_files_only=True)
    return files


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic of the tokenizers package. It does not export the class, which is not a subclass
    of `Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _damage_named(source: Path) -> Iterator[None]:
    """Turns the libraries' exceptions for a damaged tokenizer into `CheckpointError`."""
    try:
        yield
    except BaseException as error:
        # The tokenizers package raises plain `Exception`, so nothing more specific can be caught.
        if not (type(error) is Exception or isinstance(error, _DAMAGED) or _is_panic(error)):
            raise
        reason = f"{type(error).__name__}: {cut(str(error))}"
        raise CheckpointError(f"the tokenizer of {source} cannot be read: {reason}") from error


def _from_gguf(file: Path) -> TokenizerFiles:
    with _damage_named(file):
        return gguf_tokenizer(open_gguf(file))


def _template_text(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise CheckpointError(f"chat template {chat_template!r} is neither a file nor a Jinja template")
    return _read_template(file)


def _read_template(file: Path) -> str:
    try:
        return read_file(file, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"chat template {file} is not UTF-8: {error}") from error


class TextStream:
    """Decodes a growing sequence of tokens in pieces.

    A character split over tokens is held back until its last byte, so U+FFFD appears only for bytes that are not UTF-8.
    The joined pieces equal the decoding of all tokens at once; each token costs the same, whatever the length.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped: Collection[int],
        leading_spaces_stripped: int,
    ) -> None:
        """`skipped`: tokens without text; `leading_spaces_stripped`: maximum leading spaces to remove."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._spaces_to_strip = leading_spaces_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False

    def push(self, token_id: int) -> str:
        """The text that a token adds; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if data.isascii() and not self._holds_bytes:
            text = data.decode("ascii")  # most tokens; the decoder takes ten times as long
        else:
            text = self._decoder.decode(data)
            self._holds_bytes = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """Ends the text: returns U+FFFD if the last character is incomplete."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._spaces_to_strip and text.startswith(" "):
            text = text[1:]
            self._spaces_to_strip -= 1
        if text:
            self._spaces_to_strip = 0
        return text

"""`/v1/files`: uploads in pieces, with OpenAI's client and with bad ones; owners, limits, expiry, restarts."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from openai import OpenAI

from sglang_jax.cli.main import run as run_command
from sglang_jax.cli.serve import serve
from sglang_jax.errors import ConfigError
from sglang_jax.server.callers import Caller
from sglang_jax.server.file_store import LEAST_COUNTED, FileStore

MAX_FILE = 3 * LEAST_COUNTED
MAX_FILES = 16 * LEAST_COUNTED
BOUNDARY = "----b"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    folder = tmp_path_factory.mktemp("files")
    keys = folder / "keys.json"
    ann, bob = {"key": "ann's"}, {"key": "bob's", "max_files_bytes": 2 * LEAST_COUNTED}
    keys.write_text(json.dumps({"keys": {"ann": ann, "bob": bob, "eve": {"key": "eve's", "admin": True}}}))
    options: dict[str, Any] = {"max_body_bytes": 10_000}  # does not apply to uploads
    options |= {"files_dir": folder / "here", "max_file_bytes": MAX_FILE, "max_files_bytes": MAX_FILES}
    with serve_echo(api_keys=keys, client_timeout=0.4, **options) as server:
        yield server


def client(server: EchoServer, key: str = "ann's") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
GOOD = part("purpose", b"batch") + part("file", b"{}\n", "a.jsonl") + END


def post(server: EchoServer, body: bytes, kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> httpx2.Response:
    headers = {"Authorization": "Bearer ann's", "Content-Type": kind}
    return server.http.post("/v1/files", content=body, headers=headers)


def empty(server: EchoServer) -> None:
    for one in client(server, "eve's").files.list():
        client(server, "eve's").files.delete(one.id)
    assert server.context.files is not None
    assert server.context.files.space.used == 0
    assert list(server.context.files.folder.rglob("*-*")) == []


def test_the_client_stores_lists_reads_and_deletes(keyed: EchoServer) -> None:
    """Contents of many sizes, so that boundaries lie anywhere in the pieces."""
    ann = client(keyed).files
    choice = random.Random(4)
    sizes = [0, 1, 70_000, 262_143, 262_144, 300_001, MAX_FILE]
    contents = {f"{size}\u00e9.bin": choice.randbytes(size).replace(b"a", b"\r\n--")[:size] for size in sizes}
    stored = {name: ann.create(file=(name, content), purpose="user_data") for name, content in contents.items()}
    for name, content in contents.items():
        file = stored[name]
        assert (file.filename, file.bytes, file.purpose, file.expires_at) == (name, len(content), "user_data", None)
        assert ann.retrieve(file.id) == file
        assert ann.content(file.id).read() == content
    batch = ann.create(file=("b.jsonl", b"{}"), purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 86_400
    brief = ann.create(file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert brief.expires_at == brief.created_at + 3600
    everything = [*(one.id for one in stored.values()), batch.id, brief.id]
    assert [one.id for one in ann.list(order="asc")] == everything
    assert [one.id for one in ann.list(limit=2)] == everything[::-1]  # the client asks for page after page
    assert [one.id for one in ann.list(purpose="batch")] == [brief.id, batch.id]
    assert ann.delete(batch.id).deleted
    assert batch.id not in [one.id for one in ann.list()]
    answer = keyed.http.get(f"/v1/files/{brief.id}/content", headers={"Authorization": "Bearer ann's"})
    assert answer.headers["content-type"] == "application/octet-stream"
    empty(keyed)


def test_a_key_sees_only_its_own_files(keyed: EchoServer) -> None:
    ann, bob, operator = (client(keyed, key).files for key in ("ann's", "bob's", "eve's"))
    file = ann.create(file=("../../etc/passwd", b"secret"), purpose="user_data")
    assert ann.retrieve(file.id).filename == "../../etc/passwd"
    assert [one.id for one in bob.list()] == []
    for refused in (bob.retrieve, bob.content, bob.delete):
        with pytest.raises(Exception, match=r"404.*there is no file"):
            refused(file.id)
    assert operator.content(file.id).read() == b"secret"
    assert operator.delete(file.id).deleted
    empty(keyed)


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (part("file", b"{}", "a") + END, 400, "missing_field", "purpose is required"),
        (part("purpose", b"batch") + END, 400, "missing_field", "file is required"),
        (part("purpose", b"batch") + part("file", b"{}") + END, 400, "invalid_value", "must be a file"),
        (part("purpose", b"vision") + part("file", b"", "a") + END, 400, "unsupported_parameter", "'vision'"),
        (part("purpose", b"batch_output") + part("file", b"", "a") + END, 400, "unsupported_parameter", "purpose"),
        (part("color", b"red") + GOOD, 400, "unsupported_parameter", "'color'"),
        (part("purpose", b"batch") + GOOD, 400, "invalid_value", "twice"),
        (part("file", b"", "b") + GOOD, 400, "invalid_value", "twice"),
        (part("purpose", b"\xff") + END, 400, "malformed_request", "UTF-8"),
        (part("expires_after[seconds]", b"9") + GOOD, 400, "missing_field", "expires_after.anchor"),
        (
            part("expires_after[seconds]", b"9") + part("expires_after[anchor]", b"created_at") + GOOD,
            400,
            "invalid_value",
            "expires_after.seconds",
        ),
        (b"".join(part(f"f{n}", b"") for n in range(20)) + GOOD, 400, "malformed_request", "16 fields"),
        (part("purpose", b"x" * 5000) + END, 400, "invalid_value", "4096"),
        (part("purpose", b"batch") + part("file", b"{}", "n" * 2000) + END, 400, "invalid_value", "1024"),
        (part("purpose", b"batch") + part("file", b"{}", "n" * 9000) + END, 400, "malformed_request", "header size"),
        (GOOD[:-4], 400, "malformed_request", "before its last boundary"),
        (b"nonsense", 400, "malformed_request", "multipart"),
        (b"", 400, "malformed_request", "before its last boundary"),
        (GOOD + b"x" * (MAX_FILE + 300_000), 400, "malformed_request", "may have"),
        (part("purpose", b"batch") + part("file", b"x" * (MAX_FILE + 1), "a") + END, 413, "file_too_large", "786432"),
    ],
)
def test_bad_uploads(keyed: EchoServer, body: bytes, status: int, code: str, said: str) -> None:
    answer = post(keyed, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert said in error["message"]
    empty(keyed)


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", f"multipart/form-data; boundary={'b' * 300}"]
)
def test_bad_types(keyed: EchoServer, kind: str) -> None:
    assert post(keyed, GOOD, kind).status_code == 415


def test_bad_queries(keyed: EchoServer) -> None:
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=file-1", "after")):
        answer = keyed.http.get(f"/v1/files?{query}", headers={"Authorization": "Bearer ann's"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_limits_of_all_files_and_of_a_key(keyed: EchoServer) -> None:
    bob = client(keyed, "bob's").files
    for _ in range(2):
        bob.create(file=b"", purpose="batch")
    with pytest.raises(Exception, match=r"413.*this key"):
        bob.create(file=b"", purpose="batch")
    ann = client(keyed).files
    for _ in range(4):
        ann.create(file=b"x" * MAX_FILE, purpose="batch")
    with pytest.raises(Exception, match=r"413.*this server"):
        ann.create(file=b"x" * MAX_FILE, purpose="batch")
    empty(keyed)


def test_an_upload_that_stops_is_refused_and_leaves_nothing(keyed: EchoServer) -> None:
    for leaves in (True, False):
        with socket.create_connection(("127.0.0.1", keyed.port)) as connection:
            head = (
                "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann's\r\nContent-Length: 99999\r\n"
            )
            connection.sendall((head + f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n").encode())
            connection.sendall(GOOD[:-20])
            if not leaves:
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
                assert b"client_too_slow" in answer
        wait_for(lambda: keyed.context.files is not None and keyed.context.files.space.used == 0)
    empty(keyed)


def test_a_server_without_files_says_how_to_have_them(server: EchoServer) -> None:
    for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/file-1/content"), ("GET", "/v1/batches")):
        answer = server.http.request(method, path)
        assert answer.status_code == 404
        assert "--files-dir" in answer.json()["error"]["message"]


async def test_a_start_finds_whole_files_and_removes_remnants(tmp_path: Path) -> None:
    """As after a kill at any moment of a change."""
    now = 1000.0

    def opened(**limits: Any) -> FileStore:
        return FileStore(tmp_path, **{"max_file_bytes": 100, "max_bytes": 2**30, **limits}, clock=lambda: now)

    ann = Caller("ann")
    with opened() as store:
        with pytest.raises(ConfigError, match=r"--files-dir .* in use by another server"):
            opened()
        kept, short, half, gone = [await _stored(store, ann, lifetime) for lifetime in (None, 50, None, None)]
        store.draft(ann)
    store.content(half).unlink()
    (tmp_path / "files" / f"{gone.id}.json").write_bytes(b"{")
    foreign = tmp_path / "files" / "foreign"
    foreign.touch()
    with opened() as store:
        assert list(store.seen_by(ann)) == [short, kept] or list(store.seen_by(ann)) == [kept, short]
        assert store.space.used == 2 * LEAST_COUNTED
        assert {one.name for one in tmp_path.rglob("*-*")} == {
            f"{one.id}{end}" for one in (kept, short) for end in (".json", ".data")
        }
        assert foreign.exists()
        now += 50
        assert list(store.seen_by(ann)) == [kept]
        store.use(short.id)
        assert store.find(short.id, ann) == short
        await store.delete_expired()
        store.unuse(short.id)
        await store.delete_expired()
        assert store.space.used == LEAST_COUNTED
        assert not store.content(short).exists()


async def _stored(store: FileStore, caller: Caller, lifetime: int | None) -> Any:
    draft = store.draft(caller)
    await draft.add(b"content")
    return await draft.finish("name", "batch", lifetime)


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_command(serve, "serve", ["--model-path", "demo", "--port", "0", "--files-dir", str(tmp_path / "file")])
    assert "--files-dir" in capsys.readouterr().err

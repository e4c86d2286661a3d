"""A bucket on this machine: Google Cloud Storage's JSON API for metadata and contents of objects, over HTTP.

`STORAGE_EMULATOR_HOST` directs gcsfs to it, `TENSORSTORE_GCS_HTTP_URL` directs TensorStore, with which Orbax reads
arrays.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NAME = "models"
_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_LISTING = re.compile(r"/storage/v1/b/([^/]+)/o")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(slots=True)
class Bucket:
    """Objects are the files below `root`.

    - `sent`: name, first byte and number of bytes of each part of an object that was sent.
    - `failures`: statuses that the next requests for bytes get instead. `cut`: bytes missing at the end of each answer.
    - `sizes`: wrong sizes to report for objects. `extra`: names of objects without a file.
    - `generation`: of all objects; a request for another one gets 404, as if an object had been replaced.
    """

    root: Path
    url: str = ""
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    cut: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    generation: int = 1

    def bytes_of(self, suffix: str) -> int:
        """Bytes that were sent of objects whose names end with `suffix`."""
        return sum(count for name, _, count in self.sent if name.endswith(suffix))

    def names(self) -> list[str]:
        files = (str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        return sorted([*files, *self.extra])

    def described(self, name: str) -> dict[str, str]:
        path = self.root / name
        size = self.sizes.get(name, path.stat().st_size if name not in self.extra else 2)
        time = "2026-01-01T00:00:00.000Z"
        identity = {"kind": "storage#object", "name": name, "bucket": NAME, "generation": str(self.generation)}
        return {**identity, "metageneration": "1", "size": str(size), "updated": time, "timeCreated": time}

    def listed(self, prefix: str, delimiter: str) -> dict[str, object]:
        items, prefixes = [], set()
        for name in self.names():
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.described(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body are sent together, without waiting for an acknowledgement in between
    bucket: Bucket

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        if found := _LISTING.fullmatch(address.path):
            if found[1] != NAME:
                return self._answer(404, b"{}")
            return self._answer_json(self.bucket.listed(query.get("prefix", ""), query.get("delimiter", "")))
        if found := _OBJECT.fullmatch(address.path):
            return self._object(unquote(found[2]), query)
        return self._answer(404, b"{}")

    def _object(self, name: str, query: dict[str, str]) -> None:
        missing = name not in self.bucket.names()
        if missing or query.get("generation", str(self.bucket.generation)) != str(self.bucket.generation):
            return self._answer(404, b"{}")
        if query.get("alt") != "media":
            return self._answer_json(self.bucket.described(name))
        if self.bucket.failures:
            return self._answer(self.bucket.failures.pop(0), b"{}")
        data = b"{}" if name in self.bucket.extra else (self.bucket.root / name).read_bytes()
        wanted = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        assert wanted is not None, self.headers["Range"]
        first, last = int(wanted[1]), int(wanted[2] or len(data))
        part = data[first : last + 1]
        self.bucket.sent.append((name, first, len(part)))
        headers = {
            "x-goog-generation": str(self.bucket.generation),
            "Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}",
        }
        return self._answer(206 if "Range" in self.headers else 200, part[: len(part) - self.bucket.cut], headers)

    def _answer_json(self, values: object) -> None:
        self._answer(200, json.dumps(values).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_bucket(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The files below `root` as `gs://models/...` for this process."""
    bucket = Bucket(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.url)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # gcsfs would query the kind of the bucket by gRPC
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # no search for credentials in the network
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""API keys: where they are configured, which routes they open, and their limits."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, post_bytes, serve_echo, wait_for
from helpers.engine_fakes import load_fake_model

from sglang_jax.cli.main import run as run_command
from sglang_jax.cli.serve import serve
from sglang_jax.config import ServerConfig
from sglang_jax.errors import ConfigError
from sglang_jax.server import serve as serving
from sglang_jax.server.callers import Caller, Callers, Claim, TokenBucket, current_caller

OPERATORS_ROUTES = (
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/cache_report"),
    ("GET", "/cache_summary"),
    ("GET", "/ui/state"),
    ("GET", "/v1/loads"),
    ("GET", "/metrics"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/load"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weight_version"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("POST", "/drain_replica"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/abort_request"),
)
LONG = {"text": "a" * 1000, "sampling_params": {"max_new_tokens": 1000}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: EchoServer, method: str, path: str, key: str = "") -> httpx2.Response:
    body = {"json": {"abort_all": True} if path == "/abort_request" else {}} if method == "POST" else {}
    return server.http.request(method, path, headers=bearer(key) if key else {}, **body)


def complete(server: EchoServer, key: str, **fields: Any) -> httpx2.Response:
    return server.http.post("/v1/completions", json={"prompt": "ab", **fields}, headers=bearer(key))


def key_file(folder: Path, **keys: dict[str, object]) -> Path:
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"keys": keys}))
    return file


@pytest.fixture(scope="module")
def two_keys() -> Iterator[EchoServer]:
    with serve_echo(api_key="client's", admin_api_key="operator's") as server:
        yield server


@pytest.fixture(scope="module")
def named_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    """Echoes one token every 20 ms."""
    keys = key_file(
        tmp_path_factory.mktemp("keys"),
        ann={"key": "ann's"},
        bob={"key": "bob's", "max_concurrent": 3, "max_priority": 5},
        cyd={"key": "cyd's", "tokens_per_minute": 60, "hide_cached_tokens": True},
        dan={"key": "dan's", "share_cache": True},
        eve={"key": "eve's", "share_cache": True, "admin": True},
        fay={"key": "fay's", "hide_cached_tokens": True},
    )
    with serve_echo(model_path="echo:0.02", api_keys=keys) as server:
        yield server


class TestSourcesOfKeys:
    def test_a_key_comes_from_one_of_three_places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "key"
        file.write_text("of the file\n".replace(" ", "-"))
        assert ServerConfig().client_key() is None
        monkeypatch.setenv("SGLANG_JAX_API_KEY", "of-the-environment")
        monkeypatch.setenv("SGLANG_JAX_ADMIN_API_KEY", "an-operator's")
        assert ServerConfig().client_key() == "of-the-environment"
        assert ServerConfig().admin_key() == "an-operator's"
        assert ServerConfig(api_key_file=file).client_key() == "of-the-file"
        assert ServerConfig(api_key="given").client_key() == "given"
        with pytest.raises(ConfigError, match="api_key and api_key_file are both given"):
            ServerConfig(api_key="given", api_key_file=file).client_key()

    @pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
    @pytest.mark.parametrize("key", ["", " ", "two words", "tab\t"])
    def test_a_blank_or_unsendable_key_is_refused(
        self, flag: str, key: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command(serve, "serve", [flag, key]) == 2
        error = capsys.readouterr().err
        assert ("is empty, so anyone could use the server" if not key else "contains spaces or control") in error
        assert "two words" not in error

    def test_an_empty_file_or_variable_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "key"
        file.write_text("\n")
        with pytest.raises(ConfigError, match=r"api_key_file .* is empty"):
            ServerConfig(api_key_file=file).client_key()
        with pytest.raises(ConfigError, match="cannot be read"):
            ServerConfig(admin_api_key_file=tmp_path / "none").admin_key()
        monkeypatch.setenv("SGLANG_JAX_API_KEY", "")
        with pytest.raises(ConfigError, match="SGLANG_JAX_API_KEY is empty"):
            Callers.of(ServerConfig())

    def test_duplicate_keys_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="admin_api_key and api_key have the same key"):
            Callers.of(ServerConfig(api_key="same", admin_api_key="same"))
        file = key_file(tmp_path, ann={"key": "same"}, bob={"key": "same"})
        with pytest.raises(ConfigError, match="ann and bob have the same key"):
            Callers.of(ServerConfig(api_keys=file))

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("keys: {ann: {key: 'k-1', tokens: 3}}", r"keys\.ann\.tokens: Extra inputs are not permitted"),
            (
                "keys: {ann: {key: 'k-1', max_concurrent: 0}}",
                r"keys\.ann\.max_concurrent: .* greater than or equal to 1",
            ),
            (
                "keys: {ann: {key: 'k-1', share_cache: 'yes'}}",
                r"keys\.ann\.share_cache: Input should be a valid boolean",
            ),
            ("keys: {ann: {key: 12345}}", r"keys\.ann\.key: Input should be a valid string"),
            ("keys: {ann: {key: ''}}", "the key of ann is empty"),
            ("keys: {ann: {}}", r"keys\.ann\.key: Field required"),
            ("keys: {}", "keys: Dictionary should have at least 1 item"),
            ("[k-1]", "the file: Input should be a valid dictionary"),
            ("keys: {ann: {key: k-1", "is neither YAML nor JSON"),
        ],
    )
    def test_the_error_for_a_bad_key_file_has_the_place_and_not_the_key(
        self, tmp_path: Path, text: str, reason: str
    ) -> None:
        file = tmp_path / "keys.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"api_keys .*keys\.yaml.*{reason}") as refused:
            Callers.of(ServerConfig(api_keys=file))
        assert "k-1" not in str(refused.value)
        assert "12345" not in str(refused.value)


class TestRoles:
    @pytest.fixture
    def server(self, two_keys: EchoServer) -> EchoServer:
        return two_keys

    @pytest.mark.parametrize(("method", "path"), OPERATORS_ROUTES)
    def test_operators_routes_ask_for_an_operators_key(self, server: EchoServer, method: str, path: str) -> None:
        assert ask(server, method, path).status_code == 401
        refused = ask(server, method, path, "client's")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert refused.json()["error"]["type"] == "permission_error"
        assert ask(server, method, path, "operator's").status_code in (200, 400)

    def test_both_keys_may_generate(self, server: EchoServer) -> None:
        for key in ("client's", "operator's"):
            assert complete(server, key).status_code == 200
            assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200
            assert server.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
            assert server.http.get("/v1/models", headers=bearer("other") | {"x-api-key": key}).status_code == 401
        for key in ("", "Client's", "client'", "client's "):
            assert complete(server, key + "x").status_code == 401

    def test_keys_are_not_shown(self, server: EchoServer) -> None:
        text = ask(server, "GET", "/server_info", "operator's").text
        assert "client's" not in text
        assert "operator's" not in text

    @pytest.mark.parametrize(("options", "key"), [({}, ""), ({"api_key": "client's"}, "client's")])
    def test_without_an_operators_key_every_client_is_an_operator(self, options: dict[str, str], key: str) -> None:
        with serve_echo(**options) as server:
            for method, path in OPERATORS_ROUTES:
                assert ask(server, method, path, key).status_code in (200, 400), path

    def test_with_only_an_operators_key_the_server_is_open(self) -> None:
        with serve_echo(admin_api_key="operator's") as server:
            assert complete(server, "anything").status_code == 200
            assert ask(server, "GET", "/server_info", "anything").status_code == 403
            assert ask(server, "GET", "/server_info").status_code == 403
            assert ask(server, "GET", "/server_info", "operator's").status_code == 200

    def test_outside_of_a_request_the_caller_is_not_an_operator(self) -> None:
        with pytest.raises(LookupError):
            current_caller()

    def test_every_other_route_is_open_to_all_keys(self, server: EchoServer) -> None:
        """A new route that changes state or shows other clients' activity belongs in the list above."""
        routes = {
            (method, path)
            for path, operations in server.http.get("/openapi.json", headers=bearer("client's")).json()["paths"].items()
            for method in map(str.upper, operations)
        }
        everybodys = {
            ("GET", "/health"),
            ("GET", "/livez"),
            ("GET", "/readyz"),
            ("GET", "/health_generate"),
            ("GET", "/version"),
            ("GET", "/model_info"),
            ("GET", "/get_model_info"),
            *(("GET", path) for path in ("/weight_version", "/get_weight_version", "/weight_info")),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/{model}"),
            ("POST", "/generate"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/messages"),
            ("POST", "/v1/messages/count_tokens"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/messages"),
            ("POST", "/v1/messages/count_tokens"),
            *(("POST", f"/api/{name}") for name in ("chat", "generate", "show")),
            *(("GET", f"/api/{name}") for name in ("tags", "ps", "version")),
            ("POST", "/v1/responses"),
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("POST", "/v1/responses/{response_id}/cancel"),
            ("GET", "/v1/responses/{response_id}/input_items"),
            ("POST", "/tokenize"),
            ("POST", "/parse_function_call"),
            ("POST", "/separate_reasoning"),
            ("GET", "/tokenizer_info"),
            ("POST", "/detokenize"),
            ("POST", "/v1/embeddings"),
            ("POST", "/classify"),
            ("POST", "/v1/score"),
            ("POST", "/v1/rerank"),
            ("POST", "/open_session"),
            ("POST", "/close_session"),
        }
        assert routes == everybodys | set(OPERATORS_ROUTES)


class TestNamedKeys:
    @pytest.fixture
    def server(self, named_keys: EchoServer) -> EchoServer:
        return named_keys

    def test_each_named_key_is_accepted_and_one_is_an_operators(self, server: EchoServer) -> None:
        for name in ("ann", "bob", "dan", "eve"):
            assert complete(server, f"{name}'s").status_code == 200
            status = ask(server, "GET", "/v1/loads", f"{name}'s").status_code
            assert status == (200 if name == "eve" else 403)
        assert complete(server, "ann").status_code == 401
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401

    def test_a_response_belongs_to_its_key(self, server: EchoServer) -> None:
        def status(method: str, path: str, key: str = "bob's", **body: Any) -> int:
            content = {"json": body} if body else {}
            return server.http.request(method, f"/v1/responses{path}", headers=bearer(key), **content).status_code

        created = server.http.post(
            "/v1/responses", json={"input": "x" * 500, "background": True}, headers=bearer("ann's")
        )
        response = created.json()["id"]
        first = f"msg_{response.removeprefix('resp_')}_i0"
        for key, found in (("bob's", 404), ("ann's", 200)):
            assert status("GET", f"/{response}", key) == found
            assert status("GET", f"/{response}/input_items", key) == found
            assert status("POST", f"/{response}/cancel", key) == found
            assert status("GET", f"/{response}?stream=true", key) == (404 if found == 404 else 400)
            assert status("POST", "", key, input="a", max_output_tokens=1, previous_response_id=response) == found
            reference = [{"type": "item_reference", "id": first}]
            assert status("POST", "", key, input=reference, max_output_tokens=1) == found
            assert status("DELETE", f"/{response}", key) == found

    def test_no_dialect_shows_cached_tokens_that_are_hidden(self, server: EchoServer) -> None:
        messages = [{"role": "user", "content": "a"}]
        body = {"model": "default", "max_tokens": 1, "messages": messages}
        usages = []
        for key in ("ann's", "fay's"):
            usages += [
                server.http.post("/v1/messages", json=body, headers=bearer(key)).json()["usage"],
                server.http.post(
                    "/v1/responses", json={"input": "a", "max_output_tokens": 1}, headers=bearer(key)
                ).json()["usage"],
            ]
        ann, ann_too, fay, fay_too = usages
        assert (ann["input_tokens"], ann["cache_read_input_tokens"]) == (len("user: a\n") - 2, 2)
        assert (fay["input_tokens"], fay["cache_read_input_tokens"]) == (len("user: a\n"), None)
        cached = [usage["input_tokens_details"]["cached_tokens"] for usage in (ann_too, fay_too)]
        assert cached == [2, 0]

    def test_the_priority_of_a_key_is_capped(self, server: EchoServer) -> None:
        assert complete(server, "bob's", priority=5).status_code == 200
        refused = complete(server, "bob's", priority=6)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert "at most 5 for this key, got 6" in refused.json()["error"]["message"]
        assert complete(server, "ann's", priority=1).status_code == 400
        assert complete(server, "ann's", priority=-1).status_code == 200

    def test_requests_over_the_in_flight_limit_are_refused(self, server: EchoServer) -> None:
        head = b"Content-Type"
        held = server.send("/v1/completions", {"prompt": "x"})  # without a key: it does not count against a key
        assert held.recv(100).startswith(b"HTTP/1.1 401")
        held.close()
        connection = socket.create_connection(("127.0.0.1", server.port))
        message = post_bytes("/generate", {**LONG, "sampling_params": {"max_new_tokens": 1000, "n": 2}})
        connection.sendall(message.replace(head, b"Authorization: Bearer bob's\r\n" + head, 1))
        wait_for(lambda: server.running() == 2)
        assert complete(server, "bob's").status_code == 200
        refused = complete(server, "bob's", n=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert complete(server, "ann's", n=2).status_code == 200
        connection.close()
        wait_for(lambda: server.running() == 0)
        assert complete(server, "bob's", n=3).status_code == 200
        bob = next(caller for caller in server.context.callers._by_digest.values() if caller.name == "bob")
        assert bob.running == 0

    def test_tokens_per_minute_count_prompts_and_outputs_and_refill(self, server: EchoServer) -> None:
        cyd = next(caller for caller in server.context.callers._by_digest.values() if caller.name == "cyd")
        now = [0.0]
        cyd.tokens = TokenBucket(60, lambda: now[0])
        usage = complete(server, "cyd's", prompt="a" * 20, max_tokens=10, n=3, stream=False).json()["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"] > 30) == (20, True)
        left = 60 - usage["total_tokens"]
        assert cyd.tokens.seconds_to_wait() == (0.0 if left >= 1 else 1.0 - left)
        while cyd.tokens.seconds_to_wait() == 0.0:
            before = cyd.tokens._level
            events = server.http.post(
                "/v1/completions",
                json={"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}},
                headers=bearer("cyd's"),
            ).text.split("\n\n")
            total = json.loads(events[-3].removeprefix("data: "))["usage"]["total_tokens"]
            assert before - cyd.tokens._level == total
        refused = complete(server, "cyd's")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        wait = int(refused.headers["retry-after"])
        assert complete(server, "ann's").status_code == 200
        now[0] += wait
        assert complete(server, "cyd's").status_code == 200

    def test_cached_tokens_are_hidden_where_the_key_says_so(self, server: EchoServer) -> None:
        cyd = next(caller for caller in server.context.callers._by_digest.values() if caller.name == "cyd")
        cyd.tokens = None
        for key, hidden in (("cyd's", True), ("ann's", False)):
            usage = complete(server, key).json()["usage"]
            assert (usage["prompt_tokens_details"] is None) == hidden
            chat = {"messages": [{"role": "user", "content": "a"}]}
            usage = server.http.post("/v1/chat/completions", json=chat, headers=bearer(key)).json()["usage"]
            assert (usage["prompt_tokens_details"] is None) == hidden
            meta = server.http.post("/generate", json={"text": "a"}, headers=bearer(key)).json()["meta_info"]
            assert (meta["cached_tokens"] is None) == hidden

    def test_each_key_has_its_own_prefix_cache_unless_it_shares(self, server: EchoServer) -> None:
        def seen(key: str, path: str = "/v1/completions", **fields: str) -> str | None:
            prompt = {"text": "a"} if path == "/generate" else {"prompt": "a"}
            assert server.http.post(path, json={**prompt, **fields}, headers=bearer(key)).status_code == 200
            found = server.seen()[-1]["extra_key"]
            assert found is None or isinstance(found, str)
            return found

        for name in ("ann", "dan"):
            assert complete(server, f"{name}'s").status_code == 200
            assert server.seen()[-1]["tenant"] == name
        own = [
            seen(key, **fields)
            for key in ("ann's", "bob's")
            for fields in ({}, {"extra_key": "a"}, {"cache_salt": "a"})
        ]
        assert len(set(own)) == 6
        assert None not in own
        assert seen("ann's", "/generate") == own[0]
        assert seen("ann's", "/generate", extra_key="a") == own[1]
        assert [seen("dan's"), seen("eve's", extra_key="a")] == [None, "a"]
        # Not even the namespaces that `seen` shows let another key in.
        assert seen("bob's", extra_key=own[0] or "") != own[0]
        assert seen("dan's", extra_key=own[0] or "") == own[0]  # the secret part is derived from ann's key

    def test_a_key_cannot_abort_another_keys_requests(self, server: EchoServer) -> None:
        def abort(key: str, **body: object) -> httpx2.Response:
            return server.http.post("/abort_request", json=body, headers=bearer(key))

        for key, ends in (("bob's", False), ("ann's", True), ("eve's", True)):
            connection = socket.create_connection(("127.0.0.1", server.port))
            message = post_bytes("/generate", {**LONG, "rid": "anns-own"})
            connection.sendall(message.replace(b"Content-Type", b"Authorization: Bearer ann's\r\nContent-Type", 1))
            wait_for(lambda: server.running() == 1)
            before = len(server.aborted())
            assert abort(key, rid="anns-own").json() == {"success": True}
            assert (len(server.aborted()) > before) == ends
            connection.close()
            wait_for(lambda: server.running() == 0)
            wait_for(lambda: not server.context.in_engine)
        assert abort("ann's", abort_all=True).status_code == 403
        assert abort("eve's", abort_all=True).status_code == 200


def test_keys_do_not_hit_each_others_cache(tmp_path: Path) -> None:
    """With a scheduler and its prefix tree: prompts that one key has cached are misses for others, in the metrics
    too."""
    keys = key_file(tmp_path, ann={"key": "ann's"}, bob={"key": "bob's"})
    with serve_echo(load_fake_model, api_keys=keys, page_size=4) as server:

        def cached(key: str) -> int:
            usage = complete(server, key, prompt="abcdefghijklmnop", max_tokens=1).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached("ann's"), cached("bob's"), cached("ann's"), cached("bob's")] == [0, 0, 12, 12]
        assert ask(server, "GET", "/metrics", "bob's").status_code == 403


def test_a_rate_bucket_refills_evenly_up_to_a_minutes_tokens() -> None:
    now = [0.0]
    bucket = TokenBucket(120, lambda: now[0])
    assert bucket.seconds_to_wait() == 0.0
    bucket.take(120)
    assert bucket.seconds_to_wait() == 0.5
    bucket.take(120)
    assert bucket.seconds_to_wait() == 60.5
    now[0] += 60.0
    assert bucket.seconds_to_wait() == 0.5
    now[0] += 3600.0
    bucket.take(119)
    assert bucket.seconds_to_wait() == 0.0
    bucket.take(1)
    assert bucket.seconds_to_wait() == 0.5


def test_any_cache_salt_stays_in_the_keys_own_cache() -> None:
    ann = Caller("ann", cache_secret=b"made of ann's key")
    origin = ann.origin("x", Claim("bob", "y"))
    assert (origin.tenant, origin.flow) == ("ann", "x")
    found = [origin.namespace(extra_key) for extra_key in (None, "", "a", "\udc00")]
    assert found[0] == found[1]
    assert len(set(found)) == 3


class TestServersWithoutAKey:
    @pytest.mark.parametrize(
        ("host", "options", "warned"),
        [
            ("0.0.0.0", {}, True),
            ("0.0.0.0", {"api_key": "k"}, False),
            ("0.0.0.0", {"admin_api_key": "k"}, True),
            ("127.0.0.1", {}, False),
            ("localhost", {}, False),
        ],
    )
    def test_a_public_address_logs_a_warning(
        self, host: str, options: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Launched(Exception):
            pass

        async def launch(config: ServerConfig) -> Any:
            raise Launched

        with caplog.at_level(logging.WARNING), pytest.raises(Launched):
            serving.run(ServerConfig(host=host, port=0, **options), launch)
        assert (f"Anyone who can connect to {host} may use this server" in caplog.text) == warned

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("LocalHost:1234", 200),
            ("127.0.0.1:30000", 200),
            ("127.8.9.1", 200),
            ("[::1]:30000", 200),
            ("evil.example", 403),
            ("localhost.evil.example:30000", 403),
            ("127.0.0.1.evil.example", 403),
            ("192.168.0.7:30000", 200),
            ("[2001:db8::1]", 200),
        ],
    )
    def test_foreign_host_names_are_refused(self, server: EchoServer, host: str, status: int) -> None:
        found = server.http.get("/model_info", headers={"Host": host})
        assert found.status_code == status
        if status == 403:
            assert found.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts" in found.json()["error"]["message"]

    def test_a_host_name_may_be_allowed(self) -> None:
        with serve_echo(allowed_hosts="proxy.example, other.example") as server:
            for host, status in (("proxy.example", 200), ("OTHER.example:80", 200), ("evil.example", 403)):
                assert server.http.get("/health", headers={"Host": host}).status_code == status
        with serve_echo(allowed_hosts="*") as server:
            assert server.http.get("/health", headers={"Host": "any.example"}).status_code == 200

    @pytest.mark.parametrize("options", [{"api_key": "k"}, {"host": "0.0.0.0"}])
    def test_with_a_key_or_on_a_public_address_any_host_name_is_accepted(self, options: dict[str, str]) -> None:
        with serve_echo(**options) as server:
            found = server.http.get("/model_info", headers={"Host": "any.example", **bearer("k")})
            assert found.status_code == 200

    def test_a_page_of_another_origin_is_refused(self, server: EchoServer) -> None:
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            found = server.http.get("/flush_cache", headers={"Sec-Fetch-Site": site})
            assert found.status_code == status
            assert status == 200 or found.json()["error"]["code"] == "foreign_page"

    def test_a_link_of_another_page_opens_only_the_start_in_a_window(self, server: EchoServer) -> None:
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        frame = {**link, "Sec-Fetch-Dest": "iframe"}
        for method, path, headers, status in (
            ("GET", "/", link, 200),
            ("GET", "/", frame, 403),
            ("POST", "/", link, 403),
            ("GET", "/flush_cache", link, 403),
        ):
            assert server.http.request(method, path, headers=headers).status_code == status

    @pytest.mark.parametrize("options", [{"api_key": "k"}, {"host": "0.0.0.0"}])
    def test_with_a_key_or_on_a_public_address_origins_are_not_checked(self, options: dict[str, str]) -> None:
        with serve_echo(**options) as server:
            headers = {"Host": "any.example", "Sec-Fetch-Site": "cross-site", **bearer("k")}
            assert server.http.get("/model_info", headers=headers).status_code == 200

    def test_a_key_from_a_file_is_required(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_text("k")
        with serve_echo(api_key_file=file) as server:
            assert server.http.get("/model_info").status_code == 401
            assert server.http.get("/model_info", headers={"Host": "any.example", **bearer("k")}).status_code == 200

    def test_answers_are_not_shared_with_other_origins(self, server: EchoServer) -> None:
        origin = {"Origin": "http://localhost:8000"}
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        answers = [server.http.get("/v1/models", headers=origin), server.http.options("/generate", headers=asked)]
        assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]

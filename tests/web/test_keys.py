"""What the page shows and sends where the server has a key, and how it finds the server behind a proxy."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helpers.echo_server import serve_echo
from helpers.web_page import Page
from selenium.webdriver.common.keys import Keys

KEY = "sesame-4711"


def test_nothing_is_shown_without_the_key(page: Page) -> None:
    with serve_echo(api_key=KEY, served_model_name="secret-model") as server:
        for fragment in ("/", "/#live"):
            page.open(server.url, fragment)
            assert page.shown("locked")
            assert not any(page.shown(name) for name in ("tabs", "chat", "live", "forget"))
            assert "secret-model" not in page.driver.page_source + page.driver.title
            assert page.focused.get_attribute("id") == "key"
        asked = {one.path for one in page.requests() if not one.path.startswith("/ui/")}
        assert asked == {"/", "/v1/models"}
        page.find("key").send_keys("wrong", Keys.ENTER)
        assert page.until(lambda: page.text("#key-error")) == "The server does not know this key."
        assert page.shown("locked")
        page.find("key").send_keys(KEY, Keys.ENTER)
        page.until(lambda: page.shown("live"))
        assert page.text("#model") == "secret-model"
        page.until(lambda: "serving" in page.text("#replicas"))
        page.find("tab-chat").click()
        assert "user: hello" in page.ask("hello")
        for one in page.requests():
            assert KEY not in one.url + str(one.body)
            given = one.headers.get("Authorization")
            assert one.path in ("/", "/v1/models") or one.path.startswith("/ui/") or given == f"Bearer {KEY}"
        assert page.script("return JSON.stringify(localStorage)") == '{"theme":"auto"}'
        assert page.script("return document.cookie") == ""
        page.find("forget").click()
        assert page.shown("locked")
        assert not page.shown("chat")
        assert "hello" not in page.driver.page_source
        assert page.script("return JSON.stringify(sessionStorage)") == "{}"


def test_a_key_that_no_header_can_carry_is_refused(page: Page) -> None:
    with serve_echo(api_key=KEY) as server:
        page.open(server.url)
        page.find("key").send_keys("\u043a\u043b\u044e\u0447", Keys.ENTER)
        assert page.until(lambda: page.text("#key-error")) == "The server does not know this key."
        assert not page.shown("trouble")
        page.find("key").send_keys(KEY, Keys.ENTER)
        page.until(lambda: page.shown("chat"))


def test_a_key_that_is_no_longer_accepted_locks_the_page(page: Page) -> None:
    with serve_echo(api_key=KEY) as server:
        page.open(server.url)
        page.find("key").send_keys(KEY, Keys.ENTER)
        page.until(lambda: page.shown("chat"))
        page.ask("hello")
        page.script("sessionStorage.setItem('key of /', 'old'); location.reload()")
        page.until(lambda: page.shown("locked"))
        assert "hello" not in page.driver.page_source


def test_a_key_that_is_not_an_operators_may_only_chat(page: Page) -> None:
    with serve_echo(api_key=KEY, admin_api_key="operator") as server:
        page.open(server.url)
        page.find("key").send_keys(KEY, Keys.ENTER)
        page.until(lambda: page.shown("chat"))
        assert "user: hello" in page.ask("hello")
        page.find("tab-live").click()
        assert "for operators" in page.until(lambda: page.text("#live-note"))
        assert not page.shown("figures")


@contextmanager
def behind_prefix(port: int, prefix: str) -> Iterator[str]:
    """A proxy that serves a server below a prefix, and nothing else. Returns its address."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server = http.client.HTTPConnection("127.0.0.1", port)
            server.request(self.command, self.path.removeprefix(prefix[:-1]), body, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name in ("Content-Type", "Content-Security-Policy"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()


def test_the_page_works_below_a_prefix(page: Page) -> None:
    with serve_echo(api_key=KEY) as server, behind_prefix(server.port, "/llm/") as url:
        page.open(url, "/llm/")
        page.find("key").send_keys(KEY, Keys.ENTER)
        page.until(lambda: page.shown("chat"))
        assert "user: hello" in page.ask("hello")
        page.find("tab-live").click()
        page.until(lambda: "serving" in page.text("#replicas"))
        assert {one.path.split("/")[1] for one in page.requests()} == {"llm"}


def test_a_link_of_another_site_opens_the_page(page: Page) -> None:
    with serve_echo() as server:
        page.origins.add(server.url)
        page.driver.get(f"data:text/html,<a id='link' href='{server.url}/'>chat</a>")
        page.find("link").click()
        page.until(lambda: page.all("#tabs") and page.shown("chat"))
        assert "user: hello" in page.ask("hello")


def test_a_server_that_comes_later_is_found(page: Page) -> None:
    with serve_echo() as server:
        page.open(server.url)
        port = server.port
        page.script("window.kept = true")
    page.ask("hello")
    assert page.text(".turn [role=alert]") == "the server does not answer"
    with serve_echo(port=port):
        page.all(".turn .only-last")[0].click()
        page.until(lambda: "user: hello" in page.text(".turn.assistant .text"))
        assert page.script("return window.kept")

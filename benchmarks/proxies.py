"""Runs nginx or Caddy with the recipe of `deploy/proxy/`, without TLS and on free ports, in front of a server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "deploy/proxy"

PROXIES = ("nginx", "caddy")

UPSTREAM = "127.0.0.1:30000"


def nginx_config(server_port: int, port: int, folder: Path) -> str:
    """The recipe for plain HTTP: without certificate, and with its files in `folder`."""
    text = re.sub(r"\n *ssl_[^\n]*", "", (RECIPES / "nginx.conf").read_text())
    text, listens = re.subn(r"listen 443 ssl http2;", f"listen 127.0.0.1:{port};", text)
    if listens != 1 or text.count(UPSTREAM) != 1:
        raise ValueError("deploy/proxy/nginx.conf has another form than this script expects")
    text = text.replace(UPSTREAM, f"127.0.0.1:{server_port}")
    paths = "".join(
        f"    {name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("http {\n", f"http {{\n    access_log off;\n{paths}", 1)
    return f"pid {folder}/pid;\nerror_log {folder}/error.log;\ndaemon off;\n{text}"


def caddy_config(server_port: int, port: int, folder: Path) -> str:
    """The recipe for plain HTTP, with its files in `folder`."""
    text = (RECIPES / "Caddyfile").read_text()
    if text.count(UPSTREAM) != 1 or text.count("llm.example.org {") != 1:
        raise ValueError("deploy/proxy/Caddyfile has another form than this script expects")
    text = text.replace("llm.example.org {", f"http://127.0.0.1:{port}, http://localhost:{port} {{")
    text = text.replace(UPSTREAM, f"127.0.0.1:{server_port}")
    options = f"\tadmin off\n\tauto_https off\n\tstorage file_system {folder}\n"
    if re.search(r"^\{$", text, flags=re.MULTILINE):
        return re.sub(r"^\{\n", "{\n" + options, text, count=1, flags=re.MULTILINE)
    return f"{{\n{options}}}\n{text}"


HOW_TO_INSTALL = {"nginx": "apt-get install nginx-light", "caddy": "https://caddyserver.com/docs/install"}


def program(kind: str) -> str | None:
    """Returns the path of a proxy's program, None if it is not installed."""
    return shutil.which(kind, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/usr/local/bin")


@contextmanager
def running_proxy(kind: str, server_port: int) -> Iterator[int]:
    """Yields the port of a proxy of this kind in front of the server. Raises `SystemExit` if it is not installed."""
    path = program(kind)
    if path is None:
        raise SystemExit(f"{kind} is not installed: {HOW_TO_INSTALL[kind]}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        config = folder / {"nginx": "nginx.conf", "caddy": "Caddyfile"}[kind]
        make = {"nginx": nginx_config, "caddy": caddy_config}[kind]
        config.write_text(make(server_port, port, folder))
        arguments = {
            "nginx": ["-p", name, "-e", f"{folder}/error.log", "-c", str(config)],
            "caddy": ["run", "--adapter", "caddyfile", "--config", str(config)],
        }
        with (folder / "log").open("wb") as log:
            proxy = subprocess.Popen([path, *arguments[kind]], stdout=log, stderr=log)
            try:
                _await(port, proxy, folder)
                yield port
            finally:
                proxy.terminate()
                proxy.wait(30)


def _await(port: int, proxy: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until the proxy listens. Raises `SystemExit` with its log if it ended."""
    for _ in range(200):
        if proxy.poll() is not None:
            raise SystemExit((folder / "log").read_text())
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the proxy does not listen")

"""What `make client-test` concludes from the results of checks, and that docs/api.md names the versions that it
drives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from clients.run import ROOT, Client, judged, read_table


def test_the_documentation_has_each_client_at_its_version() -> None:
    section = (ROOT / "docs/api.md").read_text().partition("\n## Clients\n")[2].partition("\n# ")[0]
    documented = [
        set(re.findall(r"`([^`]+[@=]\d[^`]*)`", line.split("|")[1])) for line in section.splitlines() if line[:1] == "|"
    ]
    driven = [set(client.packages) for client in read_table().clients]
    assert sorted(map(sorted, documented[2:])) == sorted(map(sorted, driven))


def test_a_check_must_do_what_the_table_says() -> None:
    client = Client("client", ("package==1",), Path("driver.py"), {"new*": "no such route"})
    results = {"chat": "", "tools": "TypeError: no", "new_route": "NotFoundError: 404", "newer": ""}
    assert judged(client, results) == {
        "chat": "passed",
        "tools": "TypeError: no",
        "new_route": "not served",
        "newer": "passes, although clients.toml lists it as not served",
    }
    assert judged(client, {}) == {"driver": "has no checks"}


def test_a_client_has_the_task_of_its_server(tmp_path: Path) -> None:
    table = tmp_path / "clients.toml"
    entry = '[clients.{0}]\npackages = ["{0}==1"]\ndriver = "{0}.py"\n'
    table.write_text('before = "2026-01-01"\n' + entry.format("a") + entry.format("b") + 'task = "embed"\n')
    assert [(client.name, client.task) for client in read_table(table).clients] == [("a", "generate"), ("b", "embed")]
    table.write_text(table.read_text().replace("embed", "embedding"))
    with pytest.raises(ValueError, match="the task of b must be one of generate, embed, got 'embedding'"):
        read_table(table)

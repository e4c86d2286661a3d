"""What `make client-test` concludes from the results of checks, and that docs/api.md names the versions that it
drives."""

from __future__ import annotations

import re
from pathlib import Path

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

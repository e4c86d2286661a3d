"""The server that `benchmarks/abuse.py` attacks."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import RecordingChannel

from sglang_jax.config import EngineConfig
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest


def test_its_core_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the server's default options, some of which are chosen by the runner."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    abuse = importlib.import_module("abuse")
    channel = RecordingChannel()
    core = abuse.load_empty(EngineConfig(), channel)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    channel.inbox.append(NewRequest(id=1, token_ids=prompt, sampling=SamplingParams(max_new_tokens=2)))
    for _ in range(4):
        core._loop.turn()
        if 1 in channel.finished:
            break
    assert channel.finished[1].num_tokens == 2
    core.close()


MET = {"health s": 0.25, "held s": 0.02, "recovery s": 5.0, "left MiB": -3.0}
ALWAYS = ("recovery s", "left MiB")


@pytest.mark.parametrize("proxy", [None, "nginx"])
@pytest.mark.parametrize("over", [None, *MET])
def test_a_missed_target_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    over: str | None,
    proxy: str | None,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    abuse = importlib.import_module("abuse")
    assert (tuple(abuse.TARGETS), list(abuse.PROXY_TARGETS)) == (ALWAYS, list(MET))
    (tmp_path / "log").touch()

    def measure(name: str, *_: Any) -> dict[str, Any]:
        row = {"attack": name, "ttft ms": 5.0, "chat ms": 5.0, **MET}
        if name == "deep" and over is not None:
            row[over] = 100.0
        return row

    monkeypatch.setattr(abuse, "running_server", lambda: nullcontext((0, None, tmp_path / "log")))
    monkeypatch.setattr(abuse, "post", lambda *_: None)
    monkeypatch.setattr(abuse, "measure", measure)
    monkeypatch.setattr(abuse, "running_proxy", lambda kind, port: nullcontext(1))
    monkeypatch.setattr("sys.argv", ["abuse.py", *(["--proxy", proxy] if proxy else [])])
    fails = over is not None and (proxy is not None or over in ALWAYS)
    assert abuse.main() == fails
    told = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    said = {name: rest for name, _, rest in told if name in abuse.ATTACKS}
    assert set(said) == set(abuse.ATTACKS) - {"none"}
    missed = {name: rest for name, rest in said.items() if rest != "all targets are met"}
    assert missed == ({"deep": f"{over} 100.00, target {abuse.PROXY_TARGETS[over]:g}"} if fails else {})


def test_malformed_requests_that_break_the_server_are_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    abuse = importlib.import_module("abuse")
    assert [abuse.tell_failures([{"5xx": count}], {}) for count in (0, 3)] == [0, 3]

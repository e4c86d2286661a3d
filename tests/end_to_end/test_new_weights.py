"""`/update_weights_from_disk`: other weights in a running server, on each backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.model_core import load_core, load_text_tokenizer

PROMPT = {
    "input_ids": list(range(5, 40)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, one of another shape, and one whose file is cut short."""
    root = tmp_path_factory.mktemp("weights")
    folders = {name: root / name for name in ("first", "second", "wider", "torn")}
    make_tiny_checkpoint(folders["first"], seed=1)
    make_tiny_checkpoint(folders["second"], seed=2)
    make_tiny_checkpoint(folders["wider"], intermediate_size=96)
    shutil.copytree(folders["second"], folders["torn"])
    weights = folders["torn"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folders


def serve(folder: Path, backend: str, **options: Any) -> Any:
    return serve_echo(
        launch=lambda config: launch_core(config, in_process=True, load=load_core, load_tokenizer=load_text_tokenizer),
        model_path=str(folder),
        backend=backend,
        device="cpu",
        dtype="float32",
        max_running_requests=2,
        max_total_tokens=256,
        skip_warmup=True,
        **options,
    )


def answer(server: EchoServer) -> tuple[list[int], list[float], int]:
    found = server.http.post("/generate", json=PROMPT).json()
    meta = found["meta_info"]
    return found["output_ids"], [one[0] for one in meta["output_token_logprobs"]], meta["cached_tokens"]


def update(server: EchoServer, folder: Path | str, **body: Any) -> httpx2.Response:
    return server.http.post("/update_weights_from_disk", json={"model_path": str(folder), **body})


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], backend: str) -> Iterator[Any]:
    with serve(folders["second"], backend) as server:
        yield answer(server)


def test_outputs_are_those_of_a_server_with_the_new_weights(
    folders: dict[str, Path], backend: str, expected: Any
) -> None:
    """Refusals leave the old weights. A draft model stays, and changes no output."""
    options = {"speculative_algorithm": "draft", "speculative_draft_model_path": str(folders["first"])}
    with serve(folders["first"], backend, **options) as server:
        old, logprobs, _ = answer(server)
        assert (old, logprobs) != expected[:2]
        for name, words in (("wider", "layers"), ("torn", "model.safetensors"), ("none", "none")):
            refused = update(server, folders.get(name, name))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "model_path"
            assert words in refused.json()["error"]["message"]
        assert answer(server)[:2] == (old, pytest.approx(logprobs))
        done = update(server, folders["second"])
        assert done.json()["success"] is True
        new, logprobs, cached = answer(server)
        assert (new, cached) == (expected[0], 0)
        assert logprobs == pytest.approx(expected[1], abs=1e-4)
        (state,) = server.http.get("/server_info").json()["internal_states"]
        assert state["weights_path"] == str(folders["second"])
        assert update(server, folders["first"], flush_cache=False, abort_all_requests=True).status_code == 200
        assert answer(server)[2] > 0
        assert update(server, folders["first"]).status_code == 200
        assert answer(server)[0] == old

"""`/update_weights_from_disk`: other weights in a running server, on each backend."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import pytest
import torch
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


def memory(server: EchoServer, what: str, *tags: str) -> httpx2.Response:
    return server.http.post(f"/{what}_memory_occupation", json={"tags": list(tags)} if tags else {})


def bytes_held(server: EchoServer) -> tuple[int, int]:
    (state,) = server.http.get("/server_info").json()["internal_states"]
    return state["weight_bytes"], state["kv_bytes"]


def test_released_memory_is_freed_and_made_again(folders: dict[str, Path], backend: str) -> None:
    """By tags, in any order; requests are refused meanwhile. New weights may come before the KV cache."""
    others = live(backend)  # of earlier tests, and kept, so that no new array is taken for one of them
    with serve(folders["first"], backend) as server:
        old, logprobs, _ = answer(server)
        held, before = bytes_held(server), live_bytes(backend, others)
        assert memory(server, "release", "kv_cache").status_code == 200
        assert bytes_held(server)[1] == 0
        assert memory(server, "release").status_code == 200
        assert live_bytes(backend, others) <= before - held[1] - (held[0] if backend == "jax" else 0)
        refused = server.http.post("/generate", json=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_released")
        assert server.http.get("/health").status_code == 200
        assert memory(server, "resume", "weights").status_code == 200
        assert server.http.post("/generate", json=PROMPT).status_code == 503
        assert memory(server, "resume", "kv_cache").status_code == 200
        assert bytes_held(server) == held
        assert live_bytes(backend, others) <= before
        assert answer(server) == (old, pytest.approx(logprobs), 0)
        assert memory(server, "release").status_code == 200
        assert update(server, folders["second"]).status_code == 200
        assert memory(server, "resume").status_code == 200
        assert answer(server)[0] != old
        assert memory(server, "release", "weights").status_code == 200
        assert memory(server, "resume").status_code == 200
        assert answer(server)[2] == 0


def live(backend: str) -> list[Any]:
    """All JAX arrays, or all of Torch's tensors except packed matrices, in this process."""
    gc.collect()
    if backend == "jax":
        return list(jax.live_arrays())
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_mkldnn]


def live_bytes(backend: str, others: list[Any]) -> int:
    """Bytes of the arrays of this process, or of its tensors' storages, except those of `others`."""
    known = set(map(id, others))
    mine = [one for one in live(backend) if id(one) not in known]
    if backend == "jax":
        return sum(array.nbytes for array in mine)
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in mine}.values())


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
    options["weight_version"] = "of birth"
    with serve(folders["first"], backend, **options) as server:
        old, logprobs, _ = answer(server)
        assert (old, logprobs) != expected[:2]
        for name, words in (("wider", "layers"), ("torn", "model.safetensors"), ("none", "none")):
            refused = update(server, folders.get(name, name), weight_version=name)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "model_path"
            assert words in refused.json()["error"]["message"]
        assert answer(server)[:2] == (old, pytest.approx(logprobs))
        assert server.http.get("/model_info").json()["weight_version"] == "of birth"
        done = update(server, folders["second"], weight_version="second")
        assert done.json()["success"] is True
        assert server.http.get("/model_info").json()["weight_version"] == "second"
        new, logprobs, cached = answer(server)
        assert (new, cached) == (expected[0], 0)
        assert logprobs == pytest.approx(expected[1], abs=1e-4)
        (state,) = server.http.get("/server_info").json()["internal_states"]
        assert state["weights_path"] == str(folders["second"])
        assert update(server, folders["first"], flush_cache=False, abort_all_requests=True).status_code == 200
        assert answer(server)[2] > 0
        assert update(server, folders["first"]).status_code == 200
        assert answer(server)[0] == old

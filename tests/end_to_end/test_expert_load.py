"""Tokens per expert as the engine counts them, against a numpy router over transformers' hidden states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.echo_server import serve_echo, wait_for
from helpers.family_cases import FAMILIES
from helpers.scheduling import RecordingChannel
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model
from transformers import PreTrainedModel

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.engine.model_core import load_core, load_text_tokenizer
from sglang_jax.errors import ConfigError
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import GetState
from sglang_jax.scheduler.loop import SchedulerLoop
from sglang_jax.scheduler.messages import NewRequest, Reply

Served = tuple[EngineConfig, Runner]
CASE = FAMILIES["qwen3_moe"]
EXPERTS, CHOSEN = 6, 3
LAYERS_WITH_EXPERTS = [0, 2, 3]


def options(folder: Path, backend: str, **more: object) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        backend=Backend(backend),
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=600,
        context_length=160,
        enable_expert_distribution_metrics=True,
        **more,
    )


@pytest.fixture(scope="module", params=["jax", "torch"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """After a warm-up, whose steps are not counted."""
    folder = make_tiny_checkpoint(Path(tmp_path_factory.mktemp("model")), CASE.architecture, **CASE.changes)
    config = options(folder, request.param)
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    runner.warm_up(lambda done, total, what: None)
    yield config, runner
    runner.close()


@torch.inference_mode()
def expected(model: PreTrainedModel, sequences: list[list[int]]) -> dict[str, list[int]]:
    """For each layer, how often each expert is among the top k of the router's softmax."""
    counts = {str(layer): np.zeros(EXPERTS, np.int64) for layer in LAYERS_WITH_EXPERTS}
    seen: dict[str, np.ndarray] = {}
    routers = {layer: model.get_submodule(f"model.layers.{layer}.mlp.gate") for layer in counts}

    def see(layer: str, hidden: torch.Tensor) -> None:
        seen[layer] = hidden.reshape(-1, hidden.shape[-1]).double().numpy()

    for layer, router in routers.items():
        router.register_forward_pre_hook(lambda module, given, layer=layer: see(layer, given[0]))
    for tokens in sequences:
        model(torch.tensor([tokens]), use_cache=False)
        for layer, router in routers.items():
            logits = seen[layer] @ router.get_parameter("weight").double().numpy().T
            best = np.argsort(-logits, axis=1, kind="stable")[:, :CHOSEN]
            counts[layer] += np.bincount(best.reshape(-1), minlength=EXPERTS)
    return {layer: found.tolist() for layer, found in counts.items()}


def test_counts_are_those_of_a_router_in_numpy(served: Served) -> None:
    """Chunks of prompts together with rows that decode, in steps with padding; each token is counted once."""
    config, runner = served
    channel = RecordingChannel()
    loop = SchedulerLoop(runner, (), config, channel)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (41, 1, 9, 22, 5)]
    sampling = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        token_ids = np.array(prompt, np.int32).tobytes()
        channel.inbox.append(NewRequest(id=number, token_ids=token_ids, sampling=sampling))
    while len(channel.finished) < len(prompts) or not loop.scheduler.idle:
        loop.turn()
    channel.inbox.append(GetState(call=1))
    loop.turn()

    sequences = [prompt + channel.output(number)[:-1] for number, prompt in enumerate(prompts)]
    wanted = expected(make_tiny_model(CASE.architecture, **CASE.changes), sequences)
    (reply,) = [message for message in channel.messages if isinstance(message, Reply)]
    assert reply.state["expert_tokens"] == wanted
    tokens = CHOSEN * sum(map(len, sequences))
    balance = [(one.layer, one.tokens, one.balancedness) for one in channel.stats.experts]
    assert balance == [(int(layer), tokens, tokens / EXPERTS / max(wanted[layer])) for layer in wanted]
    assert runner.report().compiles_after_warm_up == 0


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_model_without_experts_is_refused(backend: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    config = options(folder, backend)
    with pytest.raises(ConfigError, match="needs a model with experts, got one of llama without any"):
        load_backend(config)(config, open_checkpoint(str(folder)))


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_without_the_option_there_are_no_counts(backend: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, CASE.architecture, **CASE.changes)
    config = options(folder, backend).model_copy(update={"enable_expert_distribution_metrics": False})
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    channel = RecordingChannel()
    channel.inbox.append(GetState(call=1))
    SchedulerLoop(runner, (), config, channel).turn()
    (reply,) = [message for message in channel.messages if isinstance(message, Reply)]
    assert "expert_tokens" not in reply.state
    assert (runner.expert_load(), channel.stats.experts) == ((), [])
    runner.close()


def test_a_server_reports_each_layer(tmp_path: Path) -> None:
    """Over HTTP, from an idle engine."""
    folder = make_tiny_checkpoint(tmp_path, CASE.architecture, **CASE.changes)
    config = options(folder, "torch", skip_warmup=True).model_dump(exclude_unset=True)
    with serve_echo(load_core, load_text_tokenizer, **config) as server:
        tokens = CHOSEN * (5 + 3)
        assert "sglang:expert" not in server.http.get("/metrics").text
        body = {"input_ids": [5, 6, 7, 8, 9], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        server.http.post("/generate", json=body).raise_for_status()
        wait_for(lambda: [one.tokens for one in server.context.client.stats.experts] == [tokens] * 3)
        info = server.http.get("/server_info").json()
        metrics = server.http.get("/metrics").text
    assert info["enable_expert_distribution_metrics"] is True
    found = info["internal_states"][0]["expert_tokens"]
    assert {int(layer): sum(counts) for layer, counts in found.items()} == dict.fromkeys(LAYERS_WITH_EXPERTS, tokens)
    assert re.findall(r"^sglang:expert_tokens_total\{.*\} (.*)$", metrics, re.MULTILINE) == [str(3.0 * tokens)]
    balances = dict(re.findall(r'^sglang:expert_balancedness\{layer="(\d)".*\} (.*)$', metrics, re.MULTILINE))
    assert {layer: float(value) for layer, value in balances.items()} == {
        layer: tokens / EXPERTS / max(counts) for layer, counts in found.items()
    }

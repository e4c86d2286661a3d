"""Models with experts through scheduler, cache and runner: greedy outputs are transformers', and drafts, samples, stop
strings and grammars are what they are on any model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.family_cases import FAMILIES
from helpers.guessed_outputs import check_same_outputs
from helpers.scheduling import RecordingChannel
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model
from transformers import PreTrainedModel

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

Served = tuple[PreTrainedModel, EngineConfig, Runner]


@pytest.fixture(scope="module", params=[("qwen2_moe", "torch"), ("gpt_oss", "jax")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Both have layers with a window; one has layers without experts, too."""
    name, backend = request.param
    case, folder = FAMILIES[name], Path(tmp_path_factory.mktemp(name))
    make_tiny_checkpoint(folder, case.architecture, **case.changes)
    config = EngineConfig(
        model_path=str(folder),
        backend=Backend(backend),
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=600,
        context_length=160,
        speculative_algorithm=SpeculativeAlgorithm.NGRAM,
        speculative_num_draft_tokens=3,
        skip_warmup=True,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    yield make_tiny_model(case.architecture, **case.changes), config, runner
    runner.close()


def test_greedy_outputs_are_those_of_transformers(served: Served) -> None:
    """Of prompts that begin alike, in chunks beside each other, some of which have to begin again."""
    model, config, runner = served
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    rng = np.random.default_rng(3)
    shared = rng.integers(3, TINY_VOCAB_SIZE, 30).tolist()
    prompts = [shared + rng.integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (1, 9, 40, 22, 5)]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(NewRequest(id=number, token_ids=np.array(prompt, np.int32).tobytes(), sampling=sampling))
    for step in range(10_000):
        if scheduler.idle:
            break
        scheduler.step()
        check_everything(scheduler.cache)
        if step % 9 == 8 and scheduler.num_running > 1:
            scheduler.retract_newest()
    for number, prompt in enumerate(prompts):
        output = channel.output(number)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
        assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert scheduler.log.counts.retractions > 0


def test_drafts_change_no_output(served: Served) -> None:
    _, config, runner = served
    check_same_outputs(config, runner, count=9, at_once=3, reuse=True)

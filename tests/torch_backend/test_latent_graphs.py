"""Captured steps of a model with latent attention: Triton's kernel reads no lengths on the host."""

from __future__ import annotations

from pathlib import Path

import helpers.triton_interpreter
import numpy as np
import torch
from helpers.fake_capture import FakeCapture
from helpers.plan_driver import DECODE, PlanDriver
from helpers.tiny_models import make_tiny_checkpoint
from helpers.triton_attention import HOPPER

from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, LatentHeads
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.triton import TritonAttention
from torch_backend.batch import ForwardBatch
from torch_backend.graphs import Bucket
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.loading import PagedTransformer
from torch_backend.models import build_model
from torch_backend.native_operations import NativeOperations
from torch_backend.runner import TorchRunner
from torch_backend.weights import load_weights

assert helpers.triton_interpreter

CPU = torch.device("cpu")
MIXED = (Bucket(0, 8), Bucket(2, 8), Bucket(3, 16))
PROMPTS = [np.random.default_rng(3).integers(0, 384, length).tolist() for length in (9, 2, 14, 5)]


@torch.library.custom_op("sglang_jax_tests::attend_latents", mutates_args=())
def _attend(
    queries: torch.Tensor,
    pages: torch.Tensor,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    scale: float,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
) -> torch.Tensor:
    nothing = torch.zeros(len(queries), dtype=torch.int32)
    batch = ForwardBatch(nothing, nothing, nothing, page_table, kv_lens, query_starts, num_decode)
    options = AttentionOptions(scale, latents=LatentHeads(key_up, value_up, None))
    return TritonAttention(HOPPER).prepare(batch)(queries, KVPages(pages, pages), options)


@_attend.register_fake
def _(
    queries: torch.Tensor, pages: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, *_: object
) -> torch.Tensor:
    return queries.new_empty(*queries.shape[:2], value_up.shape[1])


class TracedAttention:
    """Triton's kernel as an operation in a trace, with the host arguments of a launch baked in."""

    def prepare(self, batch: ForwardBatch) -> TracedAttention:
        self._batch = batch
        return self

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        batch, latents = self._batch, options.latents
        assert latents is not None
        up = latents.key_up, latents.value_up
        step = batch.page_table, batch.kv_lens, batch.query_starts, batch.num_decode
        return _attend(queries, kv.keys, *up, options.scale, *step)


def outputs(checkpoint: Checkpoint, attention: AttentionImplementation, capture: FakeCapture | None) -> list[list[int]]:
    assert checkpoint.reader is not None
    config = checkpoint.config
    model = build_model(config, dtype=torch.float32, device=CPU, operations=NativeOperations(), attention=attention)
    load_weights(model, checkpoint.reader, config, pack=False)
    (width,) = {layer.mixer.latent + layer.mixer.rotary_dim for layer in config.layers}
    memory = [LayerMemory(KVPages.allocate(40, 1, 4, width, torch.float32, CPU, shared=True)) for _ in config.layers]
    runner = TorchRunner(
        PagedTransformer(model, memory),
        RunnerSpec((PoolSpec("full", CacheKind.FULL, 40, 4),), 4, 32, 48, config.vocab_size),
        device=CPU,
        capture=capture,
        graph_buckets=(1, 3) if capture else (),
        mixed_buckets=MIXED if capture else (),
    )
    runner.warm_up(lambda done, total, what: None)
    driver = PlanDriver(runner)
    requests = [driver.admit(prompt) for prompt in PROMPTS]
    for parts in (
        [(requests[0], 5)],
        [(requests[0], 4), (requests[1], 2)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[2], 6)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[2], 8), (requests[3], 5)],
        *[[(request, DECODE) for request in requests[1:]]] * 3,
        [(requests[2], DECODE)],
    ):
        driver.step(parts)
    if capture:
        assert capture.replays == 8
        assert runner.report().compiles_after_warm_up == 0
    runner.close()
    return [request.output for request in requests]


def test_steps_of_a_model_with_latent_attention_are_replayed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "minicpm3")))
    expected = outputs(checkpoint, NativeAttention(), None)
    assert len({token for output in expected for token in output}) > 3
    assert outputs(checkpoint, TracedAttention(), FakeCapture()) == expected

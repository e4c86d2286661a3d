"""Layers with separate head counts and feed-forward sizes, in a made-up family on both backends. The oracle is
transformers' Llama with layers taken from other configs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, TOLERANCE, prompts
from helpers.scheduling import RecordingChannel
from helpers.tiny_models import make_tiny_model, make_tiny_tokenizer
from helpers.torch_paged_model import TorchPagedModel
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sglang_jax.architectures import CacheGroup, CacheKind, cache_groups, families, registry
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.backends import load_backend
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

_FILE = '''
"""Wren: Llama whose layers have their own numbers of heads, kv heads and feed-forward columns."""

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.registry import Family


def configure(fields):
    common = CommonFields.read(fields, Defaults(max_position=512))
    sizes = zip(fields.integers("heads"), fields.integers("kv_heads"), fields.integers("columns"), strict=True)
    layers = [
        common.pre_norm_layer(
            replace(common.attention(), num_heads=heads, num_kv_heads=kv_heads),
            replace(common.feed_forward(), size=columns),
        )
        for heads, kv_heads, columns in sizes
    ]
    return common.model("wren", layers)


FAMILY = Family(name="wren", class_name="WrenForCausalLM", configure=configure)
'''
_HEADS, _KV_HEADS, _COLUMNS = (4, 8, 4, 2), (2, 1, 2, 2), (128, 64, 128, 96)


@pytest.fixture
def wren(tmp_path: Path) -> Iterator[None]:
    """A new family."""
    folder = tmp_path / "more_families"
    folder.mkdir()
    (folder / "wren.py").write_text(_FILE)
    families.__path__.append(str(folder))
    registry.known_families.cache_clear()
    registry.family_named.cache_clear()
    yield
    families.__path__.remove(str(folder))
    sys.modules.pop(f"{families.__name__}.wren", None)
    registry.known_families.cache_clear()
    registry.family_named.cache_clear()


def _oracle() -> transformers.PreTrainedModel:
    sizes = list(zip(_HEADS, _KV_HEADS, _COLUMNS, strict=True))
    model = make_tiny_model("llama", num_hidden_layers=len(sizes), head_dim=16)
    for number, (heads, kv_heads, columns) in enumerate(sizes):
        other = make_tiny_model(
            "llama",
            seed=number,
            num_hidden_layers=len(sizes),
            head_dim=16,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=columns,
        )
        layer = other.model.layers[number]
        assert isinstance(layer, LlamaDecoderLayer)
        model.model.layers[number] = layer
    return model


def _write(oracle: transformers.PreTrainedModel, folder: Path) -> Path:
    oracle.config.save_pretrained(folder)
    own = {"heads": _HEADS, "kv_heads": _KV_HEADS, "columns": _COLUMNS}
    config = json.loads((folder / "config.json").read_text()) | own
    config |= {"architectures": ["WrenForCausalLM"], "model_type": "wren"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(oracle.state_dict(), folder / "model.safetensors")
    make_tiny_tokenizer(folder)
    return folder


def _logits(oracle: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return oracle(torch.tensor(tokens[None], dtype=torch.long), use_cache=False).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.usefixtures("wren")
def test_layers_with_separate_head_counts(tmp_path: Path) -> None:
    oracle = _oracle()
    folder = _write(oracle, tmp_path / "model")
    groups = cache_groups(open_checkpoint(str(folder)).config)
    assert groups == (CacheGroup("full", CacheKind.FULL, (0, 2, 3)), CacheGroup("full 2", CacheKind.FULL, (1,)))
    sequences = prompts()
    for model in (PagedModel(folder), TorchPagedModel(folder), TorchPagedModel(folder, numba=True)):
        for tokens, logits in zip(sequences, model.run(sequences, STEPS), strict=True):
            assert np.abs(logits - _logits(oracle, tokens)).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.usefixtures("wren")
def test_two_groups_of_full_attention_are_served_together(tmp_path: Path) -> None:
    """Prompts that share a prefix, twice: the second time their prefixes are in the pages of both groups."""
    oracle = _oracle()
    config = EngineConfig(
        model_path=str(_write(oracle, tmp_path / "model")),
        backend=Backend.TORCH,
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=240,
        context_length=64,
        debug_memory=True,
    )
    runner = load_backend(config)(config, open_checkpoint(config.model_path))
    assert [pool.kind for pool in runner.spec.pools] == [CacheKind.FULL, CacheKind.FULL]
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (), config, channel)
    tokens = prompts()[1]
    asked = [tokens[:30], tokens[:38], np.concatenate([tokens[:20], tokens[:9]])] * 2
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(asked, start=1):
        request = NewRequest(id=number, token_ids=prompt.tobytes(), sampling=sampling, stream=True)
        scheduler.add(request)
        while not scheduler.idle:
            scheduler.step()
            check_everything(scheduler.cache)
        output = channel.output(number)
        likely = _logits(oracle, np.array([*prompt, *output[:-1]], np.int32)).argmax(-1)
        assert output == likely[len(prompt) - 1 :].tolist()
        assert number <= 3 or channel.cached[number] >= 24
    runner.close()

"""Models with experts on both backends: checkpoints in each form, pages of each size, and 16-bit types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from helpers.family_cases import EXPERTS, HYBRIDS, LATENT, PAGE_SIZES, Paged, check_alignments
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, prompts
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_model
from helpers.torch_paged_model import TorchPagedModel
from helpers.torch_ranks import on_threads, thread_ranks
from safetensors import safe_open
from transformers import PreTrainedModel

from torch_backend.layers.experts import Experts

LOADERS: dict[str, Callable[[Path, int, int], Paged]] = {
    "jax": lambda folder, page_size, columns: PagedModel(folder, page_size=page_size, columns=columns),
    "torch": lambda folder, page_size, columns: TorchPagedModel(folder, page_size=page_size, columns=columns),
}


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_stacked_experts_load_like_separate_ones(family: str, tmp_path: Path) -> None:
    """Every array of both backends, from folders with the tensors of the family's own checkpoints and of transformers
    5. (tests/checkpoint/test_experts.py shows for each family that these equal what transformers has in memory.)"""
    model = make_tiny_model(EXPERTS[family].architecture, **EXPERTS[family].changes)
    folders = tmp_path / "plain", tmp_path / "stacked"
    for folder, plain in zip(folders, (True, False), strict=True):
        model.save_pretrained(folder, save_original_format=plain)
    names = [set(safe_open(folder / "model.safetensors", "numpy").keys()) for folder in folders]
    assert len(names[0] ^ names[1]) >= 6 * 2, "each layer has other names"
    for loaded in zip(*(jax.tree.leaves(PagedModel(folder).state) for folder in folders), strict=True):
        np.testing.assert_array_equal(*loaded)
    plain, stacked = (TorchPagedModel(folder).run(prompts(), STEPS) for folder in folders)  # its weights are packed
    for logits, others in zip(plain, stacked, strict=True):
        np.testing.assert_array_equal(logits, others)


@pytest.mark.parametrize(("backend", "page_sizes"), [("jax", (1, 64)), ("torch", PAGE_SIZES)])
def test_chunks_and_hits_in_pages_of_other_sizes(backend: str, page_sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Smaller and larger than a window."""
    check_alignments(EXPERTS["mixtral"], tmp_path, LOADERS[backend], page_sizes, every=9)


def reference(model: PreTrainedModel, tokens: np.ndarray, near: float) -> np.ndarray:
    """float64 logits up to the first token for which, in any layer, the last chosen expert and the next one are within
    `near`: there rounding may choose the other."""
    with torch.no_grad():
        found = model(torch.tensor(tokens[None], dtype=torch.long), output_router_logits=True)
    chosen = model.config.num_experts_per_tok
    certain = np.ones(len(tokens), bool)
    for logits in found.router_logits:
        ranked = np.sort(logits.numpy())[:, ::-1]
        certain &= ranked[:, chosen - 1] - ranked[:, chosen] > near
    return found.logits[0].numpy()[: np.cumprod(certain).sum()]


@pytest.mark.parametrize(
    ("family", "backend", "dtype"),
    [
        ("gpt_oss", "jax", "bfloat16"),
        ("gpt_oss", "torch", "bfloat16"),
        ("gpt_oss", "torch", "float16"),
        ("qwen2_moe", "torch", "bfloat16"),
        ("qwen2_moe", "torch", "float16"),
    ],
)
def test_16_bit_types_are_within_their_rounding(family: str, backend: str, dtype: str, tmp_path: Path) -> None:
    """Error of the logits against float64 with the same weights, as a mean square.

    About 12 roundings a layer lie on the way to a logit. Each is at most the type's unit, relative to its number; as a
    mean square over numbers of all sizes, 0.42 units. They are independent, so their squares add up. (JAX keeps more
    sums in float32. It does not compute in float16.)
    """
    case, kept = EXPERTS[family], getattr(torch, dtype)
    folder = make_tiny_checkpoint(tmp_path, case.architecture, dtype=dtype, **case.changes)
    exact = make_tiny_model(case.architecture, **case.changes).to(kept).double()
    exact.set_experts_implementation("eager")  # the others do not take float64
    model = PagedModel(folder, dtype=dtype) if backend == "jax" else TorchPagedModel(folder, dtype=kept)
    unit = torch.finfo(kept).eps / 2
    rng = np.random.default_rng(11)
    found, wanted = [], []
    for _ in range(8):
        sequences = [rng.integers(0, TINY_VOCAB_SIZE, 12).astype(np.int32) for _ in range(4)]
        steps = (dict.fromkeys(range(4), 10), dict.fromkeys(range(4), 2))
        for tokens, logits in zip(sequences, model.run(sequences, steps), strict=True):
            wanted.append(reference(exact, tokens, 16 * unit))
            found.append(logits[: len(wanted[-1])])
    exactly = np.concatenate(wanted)
    assert len(exactly) > 60
    error = np.sqrt(np.square(np.concatenate(found) - exactly).mean() / np.square(exactly).mean())
    assert unit / 2 < error < 0.42 * np.sqrt(12 * exact.config.num_hidden_layers) * unit


@pytest.mark.parametrize("family", [*EXPERTS, "deepseek_v2_lite", "nemotron_h_latent"])
def test_several_ranks_compute_the_same_as_one(family: str, tmp_path: Path) -> None:
    """Each has a part of every expert, or of some. Each part of a layer has a sum, and one more where norms are over
    heads of all ranks.

    In latent attention each rank has its own heads, and all latent vectors.
    """
    case = (EXPERTS | LATENT | HYBRIDS)[family]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    alone, sequences = TorchPagedModel(folder), prompts()
    expected = alone.run(sequences, STEPS)
    layers = alone.model.decoder_layers
    for size, expert_parts in ((2, 1), (4, 2)):
        ranks = thread_ranks(size)
        models = [TorchPagedModel(folder, parallel=rank, expert_parts=expert_parts) for rank in ranks]
        for whole, *parts in zip(layers, *(model.model.decoder_layers for model in models), strict=True):
            if isinstance(whole.feed_forward, Experts):
                own = [part.feed_forward.down.weight for part in parts]
                experts, *_ = shape = whole.feed_forward.down.weight.shape
                assert {(len(each), each.numel()) for each in own} == {(experts // expert_parts, shape.numel() // size)}
        for memory in (memory for model in models for memory in model.kv if family in LATENT):
            assert memory.pages.keys.shape == alone.kv[0].pages.keys.shape
        for found in on_threads([partial(model.run, sequences, STEPS) for model in models]):
            for logits, wanted in zip(found, expected, strict=True):
                assert np.abs(logits - wanted).max() < 1e-4
        norms = len(layers) if family in ("olmoe", "minimax_m2") else 0
        norms += family == "nemotron_h_latent" and size > 2  # Mamba-2's norm is over two parts
        sums = 1 + sum(len(layer.config.parts) for layer in layers) + norms
        assert [rank.sums for rank in ranks] == [len(STEPS) * sums] * size

"""Vectors and scores of texts against transformers, on both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint, make_tiny_tokenizer, randomise, tiny_fields
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from sglang_jax import Engine
from sglang_jax.architectures.pooling import Pooling
from sglang_jax.errors import ParameterError

TEXTS = [np.random.default_rng(length).integers(3, TINY_VOCAB_SIZE, length).tolist() for length in (1, 7, 40, 90, 33)]
"""Prompts as token ids: longer and shorter than a chunk."""

OPTIONS = {"dtype": "float32", "chunked_prefill_size": 32, "max_running_requests": 4, "context_length": 128}


def _engine(folder: Path, backend: str, **options: object) -> Engine:
    return Engine(model_path=str(folder), backend=backend, device="cpu", skip_warmup=True, **OPTIONS | options)


def _write_pooling(folder: Path, mode: str, *, normalize: bool) -> None:
    """sentence-transformers' files: in the form of its release 6 for means, in an earlier one for others."""
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [
        {"idx": place, "name": str(place), "path": "" if not place else f"{place}_{kind}", "type": f"a.b.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    fields = (
        {"pooling_mode": mode} if mode == "mean" else {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}
    )
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))


def _bare_checkpoint(folder: Path, architecture: str) -> Path:
    """A model without a head, whose tensors lack the prefix."""
    config = transformers.AutoConfig.for_model(architecture, **tiny_fields(architecture))
    model = randomise(transformers.AutoModel.from_config(config).eval(), architecture)
    model.save_pretrained(folder)
    make_tiny_tokenizer(folder)
    return folder


def _masked_checkpoint(folder: Path, architecture: str) -> Path:
    """An encoder with the head that it was trained with, and norms named as in the first checkpoints."""
    config = transformers.AutoConfig.for_model(architecture, **tiny_fields(architecture))
    model = randomise(transformers.AutoModelForMaskedLM.from_config(config).eval(), architecture)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        next((name.replace(new, first) for new, first in old.items() if name.endswith(new)), name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    make_tiny_tokenizer(folder)
    return folder


def _hidden(folder: Path, text: list[int]) -> NDArray[np.float64]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([text])).last_hidden_state[0].double().numpy()


def _expected(folder: Path, pooling: Pooling, *, normalize: bool) -> list[NDArray[np.float64]]:
    found = []
    for text in TEXTS:
        hidden = _hidden(folder, text)
        vector = {Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(0), Pooling.CLS: hidden[0]}[pooling]
        found.append(vector / np.linalg.norm(vector) if normalize else vector)
    return found


CASES: dict[str, tuple[Callable[[Path, str], Path], str, Pooling, str | None]] = {
    "qwen3 embedding": (_bare_checkpoint, "qwen3", Pooling.LAST, "lasttoken"),
    "llama, mean of raw vectors": (make_tiny_checkpoint, "llama", Pooling.MEAN, "mean"),
    "mistral without files of poolings": (_bare_checkpoint, "mistral", Pooling.LAST, None),
    "an encoder": (_bare_checkpoint, "eurobert", Pooling.MEAN, None),
    "the first token of BERT": (_bare_checkpoint, "bert", Pooling.CLS, "cls_token"),
    "RoBERTa with a head": (_masked_checkpoint, "roberta", Pooling.MEAN, "mean"),
}


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", CASES)
def test_vectors(name: str, backend: str, tmp_path: Path) -> None:
    make, architecture, pooling, mode = CASES[name]
    folder = make(tmp_path, architecture)
    normalize = mode != "mean"
    if mode is not None:
        _write_pooling(folder, mode, normalize=normalize)
    expected = _expected(folder, pooling, normalize=normalize)
    with _engine(folder, backend) as engine:
        found = engine.embed(TEXTS)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        again = np.stack([engine.embed(text) for text in TEXTS])
        np.testing.assert_allclose(again, found, atol=1e-6, rtol=1e-5)  # in other chunks, from the cache
        cut = engine.embed(TEXTS[2], dimensions=8, normalize=True)
        np.testing.assert_allclose(cut, expected[2][:8] / np.linalg.norm(expected[2][:8]), atol=1e-4)
        assert engine.embed([]).shape == (0, 64)
        with pytest.raises(ParameterError, match="dimensions must be between 1 and 64"):
            engine.embed(TEXTS[0], dimensions=65)
        with pytest.raises(ParameterError, match="got 'three'"):
            engine.embed(TEXTS[0], dimensions="three")  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="generates none"):
            engine.generate(TEXTS[0])
        with pytest.raises(ParameterError, match="no scores of labels"):
            engine.classify(TEXTS[0])


SEPARATOR = 2

PAIRS = [[1, *first, SEPARATOR, *second, SEPARATOR] for first, second in pairwise(TEXTS)]
"""Pairs as BERT's: the second text, with its separator, has another token type."""


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [("llama", "torch"), ("llama", "jax"), ("bert", "torch"), ("bert", "jax"), ("xlm-roberta", "torch")],
)
def test_labels(architecture: str, backend: str, tmp_path: Path) -> None:
    labels = {0: "calm", 1: "glad", 2: "sad"}
    config = transformers.AutoConfig.for_model(architecture, **tiny_fields(architecture), id2label=labels)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    randomise(model, architecture).save_pretrained(tmp_path)
    make_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sep_token": "<|im_end|>"}))
    texts = [*TEXTS, *PAIRS]
    expected = []
    for text in texts:
        ids = torch.tensor([text])
        ends = (ids == SEPARATOR).long()
        types = {"token_type_ids": (ends.cumsum(1) > ends).long()} if architecture == "bert" else {}
        with torch.no_grad():
            expected.append(model(ids, **types).logits.softmax(-1)[0].numpy())
    with _engine(tmp_path, backend, context_length=256) as engine:
        pooler = engine.model_info.pooler
        assert pooler is not None
        assert pooler.labels == tuple(labels.values())
        np.testing.assert_allclose(engine.classify(texts), expected, atol=1e-4)

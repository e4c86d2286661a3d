"""What a checkpoint gives, from its files and the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_fields

from sglang_jax.architectures.pooling import Activation, Pooler, Pooling
from sglang_jax.architectures.tensor_names import with_model_prefix
from sglang_jax.checkpoint.hf_config import load_hf_config
from sglang_jax.checkpoint.poolers import pooler_of_folder
from sglang_jax.config import PoolingType, Task
from sglang_jax.errors import CheckpointError, ConfigError

NORMALISED_LAST = Pooler(pooling=Pooling.LAST)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def write(folder: Path, class_name: str = "LlamaForCausalLM", **fields: Any) -> None:
    values = {"architectures": [class_name], "model_type": "llama", **tiny_fields("llama"), **fields}
    (folder / "config.json").write_text(json.dumps(values))


def write_modules(folder: Path, pooling: dict[str, Any], modules: Any = None) -> None:
    (folder / "modules.json").write_text(json.dumps(MODULES if modules is None else modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def found(folder: Path, task: Task = Task.AUTO, pooling: PoolingType = PoolingType.AUTO) -> Pooler | None:
    assert load_hf_config(folder).architecture == "llama"
    return pooler_of_folder(folder, task, pooling)


def refusal(folder: Path, task: Task = Task.AUTO, pooling: PoolingType = PoolingType.AUTO) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        pooler_of_folder(folder, task, pooling)
    return str(caught.value)


def test_models_that_generate(tmp_path: Path) -> None:
    write(tmp_path)
    assert found(tmp_path) is None
    assert found(tmp_path, Task.EMBED) == NORMALISED_LAST
    assert found(tmp_path, Task.EMBED, PoolingType.MEAN) == Pooler(pooling=Pooling.MEAN)
    assert "pooling mean needs model_task embed" in refusal(tmp_path, pooling=PoolingType.MEAN)
    assert "needs a checkpoint with a matrix of labels" in refusal(tmp_path, Task.CLASSIFY)
    write(tmp_path, "LlamaModel")
    assert found(tmp_path) == NORMALISED_LAST
    assert found(tmp_path, Task.GENERATE) is None


@pytest.mark.parametrize(
    ("stored", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, Pooling.CLS),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, Pooling.MEAN),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
    ],
)
def test_files_of_sentence_transformers(stored: dict[str, Any], pooling: Pooling, tmp_path: Path) -> None:
    write(tmp_path)
    write_modules(tmp_path, stored)
    assert found(tmp_path) == Pooler(pooling=pooling, normalised=False)
    write_modules(tmp_path, stored, [*MODULES, NORMALIZE])
    assert found(tmp_path) == Pooler(pooling=pooling)
    assert found(tmp_path, Task.GENERATE) is None


@pytest.mark.parametrize(
    ("stored", "modules", "told"),
    [
        ({"pooling_mode_max_tokens": True}, None, ["pooling is ['max']", "cls, mean, lasttoken"]),
        ({"pooling_mode": "mean", "pooling_mode_cls_token": 1}, [*MODULES, {"type": "a.Dense"}], ["Dense are not"]),
        ({"pooling_mode": ["mean", "cls"]}, None, ["['mean', 'cls']"]),
        ({"pooling_mode": "mean", "include_prompt": False}, None, ["include_prompt false"]),
        ({"pooling_mode_cls_token": "yes"}, None, ["pooling_mode_cls_token", "yes"]),
        ({}, [MODULES[0], {**MODULES[1], "path": "../elsewhere"}], ["../elsewhere", "is not a folder in this one"]),
        ({}, {"not": "a list"}, ["modules.json", "is not a list"]),
        ({}, [7], ["modules.json", "is not a list"]),
        ({}, [{**MODULES[0], "path": "0_Transformer"}, MODULES[1]], ["are not supported"]),
    ],
)
def test_other_files_are_refused(stored: dict[str, Any], modules: Any, told: list[str], tmp_path: Path) -> None:
    write(tmp_path)
    write_modules(tmp_path, stored, modules)
    message = refusal(tmp_path)
    for part in told:
        assert part in message


@pytest.mark.parametrize(
    ("fields", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), Activation.SOFTMAX),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), Activation.SOFTMAX),
        ({"id2label": {"0": "fits"}}, ("fits",), Activation.SIGMOID),
        ({"id2label": {"0": "reward"}, "problem_type": "regression"}, ("reward",), Activation.NONE),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), Activation.SIGMOID),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0", "LABEL_1"),
            Activation.NONE,
        ),
    ],
)
def test_labels(fields: dict[str, Any], labels: tuple[str, ...], activation: Activation, tmp_path: Path) -> None:
    write(tmp_path, "LlamaForSequenceClassification", **fields)
    assert found(tmp_path) == Pooler(pooling=Pooling.LAST, labels=labels, activation=activation)


def test_wrong_labels_and_attention(tmp_path: Path) -> None:
    for labels in ({"0": "a", "2": "b"}, {"x": "a"}, {}):
        write(tmp_path, "LlamaForSequenceClassification", id2label=labels)
        assert "id2label must name 1 to 65536 labels" in refusal(tmp_path)
    write(tmp_path, "LlamaForSequenceClassification", sentence_transformers={"activation_fn": "a.Tanh"})
    assert "activation_fn is 'a.Tanh'; supported: Identity, Sigmoid, Softmax" in refusal(tmp_path)
    write(tmp_path, "LlamaModel", is_causal=False)
    with pytest.raises(CheckpointError, match="is_causal is false"):
        load_hf_config(tmp_path)


def test_names_without_a_head() -> None:
    assert with_model_prefix(["norm.weight", "score.weight"]) == {
        "model.norm.weight": "norm.weight",
        "score.weight": "score.weight",
    }
    assert with_model_prefix(["model.norm.weight", "lm_head.weight"]) == {
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }

"""What a folder says that its model gives: files in the forms that sentence-transformers and transformers write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_jax.architectures.pooling import Activation, Pooler, Pooling
from sglang_jax.checkpoint.poolers import pooler_of_folder
from sglang_jax.config import PoolingType, Task
from sglang_jax.errors import CheckpointError


def _pooler(folder: Path, architecture: str, config: dict[str, Any], **files: object) -> Pooler:
    """The pooler of a folder with these JSON files, named without `.json`."""
    for name, content in {**files, "config": {"architectures": [architecture], **config}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = pooler_of_folder(folder, Task.AUTO, PoolingType.AUTO)
    assert found is not None
    return found


def _of_release_6(name: str) -> dict[str, object]:
    return {"config_sentence_transformers": {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.{name}"}}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, Activation.SIGMOID),
        ({}, _of_release_6("linear.Identity"), Activation.NONE),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, _of_release_6("linear.Identity"), "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, Activation.NONE),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, Activation.NONE),
        ({"id2label": {"0": "no", "1": "yes"}}, _of_release_6("activation.Sigmoid"), Activation.SIGMOID),
        ({"id2label": {"0": "no", "1": "yes"}}, {"config_sentence_transformers": {"prompts": {}}}, Activation.SOFTMAX),
    ],
)
def test_activation(
    config: dict[str, Any], files: dict[str, object], expected: Activation | str, tmp_path: Path
) -> None:
    config = {"id2label": {"0": "fits"}} | config
    assert _pooler(tmp_path, "LlamaForSequenceClassification", config, **files).activation == expected


def test_an_unknown_activation_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config_sentence_transformers.json: activation_fn is .*my.Tanh"):
        _pooler(
            tmp_path, "LlamaForSequenceClassification", {}, config_sentence_transformers={"activation_fn": "my.Tanh"}
        )


@pytest.mark.parametrize("labels", [{}, {"1": "a"}, {"00": "a"}, {"\u0660": "a"}, {"9" * 5000: "a"}])
def test_bad_labels_are_refused(labels: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="id2label must name 1 to 65536 labels, numbered from 0"):
        _pooler(tmp_path, "LlamaForSequenceClassification", {"id2label": labels})


def _modules(path: str) -> list[dict[str, str]]:
    return [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": path}]


def test_files_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    folder, blob = tmp_path / "snapshots/1", tmp_path / "blobs/2"
    (folder / "1_Pooling").mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text(json.dumps({"pooling_mode": "mean"}))
    (folder / "1_Pooling/config.json").symlink_to("../../../blobs/2")
    assert _pooler(folder, "Qwen3Model", {}, modules=_modules("1_Pooling")).pooling is Pooling.MEAN


@pytest.mark.parametrize("path", ["../other", "a/../../other", "/etc", "..", "", "1_Pooling\0", "\ud800", "a" * 5000])
def test_a_path_out_of_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (tmp_path / "model/a").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is not a folder in this one"):
        _pooler(tmp_path / "model", "Qwen3Model", {}, modules=_modules(path))


@pytest.mark.parametrize("mode", ["max", ["mean", "cls"], [["mean"]], [{}], [], 1])
def test_other_poolings_are_refused(mode: object, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": mode}))
    with pytest.raises(CheckpointError, match="supported: one of cls, mean, lasttoken, last"):
        _pooler(tmp_path, "Qwen3Model", {}, modules=_modules("1_Pooling"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"config_sentence_transformers": {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}},
            "prompt 'Q: '",
        ),
        ({"sentence_bert_config": {"modality_config": {"text": {}, "message": {}}}}, "its chat template"),
        ({"config_sentence_transformers": {"prompts": {"query": "Q: "}, "default_prompt_name": None}}, None),
        ({"sentence_bert_config": {"modality_config": {"text": {}}}}, None),
    ],
)
def test_a_warning_names_what_sentence_transformers_adds_to_texts(
    files: dict[str, object], expected: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pooler(tmp_path, "Qwen3Model", {}, **files)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]

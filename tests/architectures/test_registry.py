"""A family is one file: a file that a test adds to the package is served like any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, TOLERANCE, prompts, transformers_logits
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel

from sglang_jax.architectures import families, registry
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.errors import CheckpointError

_FILE = '''
"""Starling: Llama whose norms, projections and head have other names, and whose logits are doubled."""

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName


def configure(fields):
    common = CommonFields.read(fields, Defaults(max_position=512))
    layer = common.pre_norm_layer(common.attention(), common.feed_forward())
    return replace(common.model("starling", [layer] * common.num_layers), logit_multiplier=2.0)


FAMILY = Family(
    name="starling",
    class_name="StarlingForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        Part.QUERY: TensorName("wing.left"),
        Part.ATTENTION_NORM: TensorName("wing.norm"),
        Part.HEAD: TensorName("beak"),
    },
)
'''
_RENAMED = {"self_attn.q_proj": "wing.left", "input_layernorm": "wing.norm", "lm_head": "beak"}


def _forget_families() -> None:
    registry.known_families.cache_clear()
    registry.family_named.cache_clear()


@pytest.fixture
def starling(tmp_path: Path) -> Iterator[None]:
    """An added file in the package of families."""
    folder = tmp_path / "more_families"
    folder.mkdir()
    (folder / "starling.py").write_text(_FILE)
    families.__path__.append(str(folder))
    _forget_families()
    yield
    families.__path__.remove(str(folder))
    sys.modules.pop(f"{families.__name__}.starling", None)
    _forget_families()


def _starling_checkpoint(folder: Path) -> Path:
    from safetensors.numpy import load_file, save_file

    make_tiny_checkpoint(folder, "llama")
    tensors = load_file(folder / "model.safetensors")
    for old, new in _RENAMED.items():
        tensors = {name.replace(old, new): values for name, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["StarlingForCausalLM"], "model_type": "starling"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("starling")
def test_an_added_file_is_an_added_family(tmp_path: Path) -> None:
    folder = _starling_checkpoint(tmp_path / "model")
    sequences = prompts()
    for model in (PagedModel(folder), TorchPagedModel(folder)):
        for tokens, logits in zip(sequences, model.run(sequences, STEPS), strict=True):
            assert np.abs(logits - 2 * transformers_logits("llama", tokens)).max() < 2 * TOLERANCE


def test_without_the_file_the_error_names_what_is_supported(tmp_path: Path) -> None:
    folder = _starling_checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    message = str(caught.value)
    assert "architecture StarlingForCausalLM is not supported: supported families have the same fields" in message
    for family in registry.known_families():
        assert family.class_name in message


def test_every_file_of_the_package_is_a_distinct_family() -> None:
    names = [family.name for family in registry.known_families()]
    files = [file.stem for file in Path(str(families.__file__)).parent.glob("*.py") if file.stem != "__init__"]
    assert len(names) == len(set(names)) == len(files) >= 12

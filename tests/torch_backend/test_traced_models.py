"""Models of transformers, traced and rewritten: their outputs, their operation counts, and that faults are noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers.tiny_models import make_tiny_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM

from sglang_jax import Engine
from sglang_jax.architectures import ModelConfig
from sglang_jax.checkpoint.reader import Array, Index, PlainReader
from sglang_jax.checkpoint.transformers_config import load_transformers_config
from sglang_jax.config import ALWAYS_RUN, CompilePass, chosen_passes
from sglang_jax.errors import CheckpointError, ConfigError
from torch_backend.compilation import twin
from torch_backend.compilation.expected_matches import ExpectedMatches
from torch_backend.compilation.graph import Program, calls
from torch_backend.compilation.hf_model import config_of, eager_model, empty_model
from torch_backend.compilation.manager import PASSES, GraphPass, PassManager
from torch_backend.compilation.passes.norms import fuse_norms, fuse_sums_with_norms
from torch_backend.compilation.step import add_rms_norm
from torch_backend.compilation.trace import _check_guards, trace
from torch_backend.compilation.twin import check_twin, twin_config
from torch_backend.compilation.weights import CheckpointWeights, RandomWeights
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import HeadNorms, Rotation

ALL = PassManager(chosen_passes("all"))

QUICK = ("gemma2", "phi3", "olmo2", "stablelm", "gpt_neox")
LONG = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "granite",
    "smollm3",
    "cohere",
    "glm4",
    "gpt2",
    "opt",
    "phi",
)
"""The first have most variants among them: 1 + w, windows, caps, fused matrices, norms of outputs, tables with a
factor, layer norms, partly rotated heads, attention parallel to feed-forward."""

_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
FIELDS = {"olmo2": {"rope_parameters": _YARN}}


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in LONG)])
def test_the_tiny_twin_equals_transformers(family: str) -> None:
    check_twin({"model_type": family} | FIELDS.get(family, {}), ALL)


@pytest.mark.parametrize(
    "chosen", ["none", *(pytest.param(each.value, marks=pytest.mark.soak) for each in CompilePass)]
)
def test_any_subset_of_passes_computes_the_same(chosen: str) -> None:
    check_twin({"model_type": "gemma2"}, PassManager(chosen_passes(chosen)))


def test_norms_of_heads_rotation_and_rounding_to_8_bits_are_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only keys and values are rounded to float8 here. With the passes, the operation that writes them also norms
    and rotates; stored values and outputs are the same as with the three operations separate."""
    normed: list[bool] = []
    write = NativeOperations.rotate_and_write

    def counted(
        operations: NativeOperations,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        assert kv.keys.dtype == torch.float8_e4m3fn
        normed.append(norms is not None)
        return write(operations, qkv, rotation, norms, kv, write_slots)

    monkeypatch.setattr(NativeOperations, "rotate_and_write", counted)
    monkeypatch.setattr(twin, "_empty_pages", lambda found, _: LayerMemory(_float8_pages(found.config)))
    differences = []
    for chosen, fused in (("all", True), ("none", False)):
        config = twin_config({"model_type": "qwen3"})
        eager = eager_model(config, torch.float32)
        weights = RandomWeights.of(eager)
        with torch.no_grad():
            for name, parameter in eager.named_parameters():
                parameter.copy_(weights.tensor(name))
        normed.clear()
        found = twin._rewritten(config, weights, PassManager(chosen_passes(chosen)), None)
        differences.append(twin._compare(eager, found))
        assert normed == [fused] * (config.num_hidden_layers * len(twin._STEPS))
    assert 1e-3 < differences[0] < 0.2, "keys and values are in 8 bits"
    assert differences[1] == pytest.approx(differences[0], rel=0.02)


def _float8_pages(config: ModelConfig) -> KVPages:
    attention = config.layers[0].attention
    assert attention is not None
    shape = (1 + 2 * twin._COLUMNS, attention.num_kv_heads, twin._PAGE, attention.head_dim)
    return KVPages.allocate(*shape, torch.float8_e4m3fn, torch.device("cpu"))


def rewritten(family: str, manager: PassManager, **values: Any) -> Program:
    config = twin_config({"model_type": family, **values})
    model = empty_model(config, torch.float32)
    program = trace(model)
    manager.run(program, ExpectedMatches.of_model(model, program, config.num_hidden_layers))
    return program


def test_a_second_run_of_the_passes_finds_nothing() -> None:
    program = rewritten("qwen3", ALL)
    assert [each.rewrite(program) for each in PASSES] == [0] * len(PASSES)


def test_a_pass_that_drops_a_residual_ends_the_start() -> None:
    def faulty(program: Program) -> int:
        found = fuse_sums_with_norms(program)
        for node in list(calls(program.body, add_rms_norm))[:1]:
            step, x, _, weight, eps = node.args
            node.args = (step, x, x, weight, eps)
        return found

    manager = PassManager(frozenset(CompilePass), _with(CompilePass.ADD_NORM, faulty))
    with pytest.raises(ConfigError, match="a tiny llama, rewritten like this model, differs from transformers"):
        check_twin({"model_type": "llama"}, manager)


@pytest.mark.parametrize("fewer", [lambda program: 0, lambda program: fuse_norms(program) - 1])
def test_a_pass_that_finds_too_little_ends_the_start_by_its_name(fewer: Any) -> None:
    manager = PassManager(frozenset(CompilePass), _with(CompilePass.NORM, fewer))
    with pytest.raises(ConfigError, match=r"the pass norm found \d matches in llama, but its modules imply 5"):
        rewritten("llama", manager)


def _with(name: CompilePass, rewrite: Any) -> list[GraphPass]:
    return [GraphPass(name, rewrite) if each.name is name else each for each in PASSES]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "it has an encoder"),
        ("bert", "attention in BertSelfAttention is not causal"),
        ("mixtral", r"a mixture of experts \(num_local_experts 8\)"),
        ("falcon", "does not use transformers' attention interface"),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"model_impl transformers cannot serve {family}: .*{reason}"):
        trace(empty_model(config_of({"model_type": family, "num_hidden_layers": 1}), torch.float32))


def test_data_dependent_code_is_refused_with_its_place() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=r"depends on data: .*\(in LlamaModel\.forward, modeling_llama\.py:\d+\)"):
        rewritten("llama", ALL, rope_parameters=rope)


SERVED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "granite", "stablelm", "gpt_neox")
CHANGES = {"gpt_neox": {"num_key_value_heads": 4}}
"""transformers keeps fields that a family does not have, which would be read as its kv heads."""


@pytest.mark.parametrize("family", ["starcoder2", *(pytest.param(name, marks=pytest.mark.soak) for name in SERVED)])
def test_served_requests_equal_transformers(family: str, tmp_path: Path) -> None:
    """Greedy tokens and their logprobs, with the prompt computed, and then cached."""
    folder = make_tiny_checkpoint(tmp_path / "model", family, **CHANGES.get(family, {}))
    prompt = np.random.default_rng(2).integers(3, 380, 41).tolist()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        text = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[0].tolist()
        logprobs = torch.log_softmax(oracle(torch.tensor([text])).logits[0], -1).numpy()
    expected = [logprobs[place - 1, text[place]] for place in range(len(prompt), len(text))]
    dump = tmp_path / "graphs"
    with Engine(**_options(folder), dump_graphs=dump) as engine:
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        for cached in (0, 32):
            found = engine.generate(prompt, sampling, return_logprob=True)
            assert not isinstance(found, list)
            assert found.cached_tokens == cached
            assert found.output_ids == text[len(prompt) :]
            assert [each.logprob for each in found.logprobs] == pytest.approx(expected, abs=2e-4)
    stages = sorted({file.name.partition(".")[0] for file in dump.glob("*.*")})
    assert {file.name for file in dump.glob("*.*")} == {file.name for file in (dump / "twin").iterdir()}
    assert stages == ["00-traced", *(f"{number:02d}-{each.name.value}" for number, each in enumerate(PASSES, 1))]
    assert "sglang_jax.attention.default" in (dump / "00-traced.body.txt").read_text()
    assert "attend(" in (dump / "09-add-norm.body.txt").read_text()
    drawing = ElementTree.parse(dump / "09-add-norm.body.svg").getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"


def _options(folder: Path) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "backend": "torch",
        "model_impl": "transformers",
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 640,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
        "grammar_backend": "none",
        "attention_backend": "native",
        "skip_warmup": True,
    }


def test_tensors_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "gpt_neox", **CHANGES["gpt_neox"])
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: gpt_neox\.layers\.2\."):
        Engine(**_options(folder))


class Tensors(PlainReader):
    """A reader of zeros with these names and shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: Index | None = None) -> Array:
        return np.zeros(self._shapes[name], np.float32)


def test_tensors_are_found_under_older_names_and_no_others_are_taken() -> None:
    model = empty_model(twin_config({"model_type": "gpt_neox", "num_hidden_layers": 2}), torch.float32)
    shapes = {name.removeprefix("gpt_neox."): tuple(each.shape) for name, each in model.named_parameters()}
    shapes["embed_out.weight"] = shapes.pop("lm_head.weight")
    old = {f"layers.0.attention.{name}": (1,) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    weights = CheckpointWeights.of(model, Tensors(shapes | old))
    assert weights.names["lm_head.weight"] == "embed_out.weight"
    assert weights.names["gpt_neox.embed_in.weight"] == "embed_in.weight"
    with pytest.raises(CheckpointError, match=r"tensors that the model does not have: layers\.7\.mlp\.bias$"):
        CheckpointWeights.of(model, Tensors(shapes | {"layers.7.mlp.bias": (3,)}))
    with pytest.raises(CheckpointError, match=r"embed_in\.weight is \(2, 3\) in the checkpoint, but \(128, "):
        CheckpointWeights.of(model, Tensors(shapes | {"embed_in.weight": (2, 3)}))


def test_saved_buffers_have_the_values_of_the_checkpoint() -> None:
    model = empty_model(twin_config({"model_type": "llama", "num_hidden_layers": 2}), torch.float32)
    layer = model.get_submodule("model.layers.1")
    layer.register_buffer("learnt", torch.ones(1))
    layer.register_buffer("computed", torch.ones(1), persistent=False)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    CheckpointWeights.of(model, Tensors(shapes | {f"model.layers.1.{name}": (1,) for name in ("learnt", "computed")}))
    assert float(layer.get_buffer("learnt")) == 0
    assert float(layer.get_buffer("computed")) == 1
    with pytest.raises(CheckpointError, match=r"learnt is \(2,\) in the checkpoint, but \(1,\) in the model"):
        CheckpointWeights.of(model, Tensors(shapes | {"model.layers.1.learnt": (2,)}))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tiny"), [(32, 8, (8, 2)), (8, 1, (8, 1)), (2, 1, (2, 1)), (6, 6, (2, 2))]
)
def test_the_twin_has_several_kv_heads_where_the_model_has(heads: int, kv_heads: int, tiny: tuple[int, int]) -> None:
    config = twin_config(
        {
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * 16,
            "num_hidden_layers": 2,
        }
    )
    assert (config.num_attention_heads, config.num_key_value_heads) == tiny


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"backend": "jax"}, "needs the Torch backend")],
)
def test_incompatible_options_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=f"model_impl transformers.*{reason}"):
        Engine(**_options(folder) | change)


def test_code_that_depends_on_the_number_of_tokens_is_refused() -> None:
    shapes = ShapeEnv()
    tokens = FakeTensorMode(shape_env=shapes).from_tensor(torch.zeros(9973))
    assert tokens.shape[0] > 1
    _check_guards(shapes, "fine")
    assert tokens.shape[0] > 200
    with pytest.raises(ConfigError, match=r"cannot serve strange: its code takes another path if .* <= 200"):
        _check_guards(shapes, "strange")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": None}, "model_type is missing; transformers needs it"),
        ({"model_type": "strange"}, "transformers cannot read it: Unrecognized model identifier: strange"),
        ({"hidden_size": "wide"}, "transformers cannot read it: Validation error for field 'hidden_size'"),
        ({"num_attention_heads": 0}, "transformers cannot read it: integer division"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "mamba"}, "num_attention_heads is missing"),
        ({"model_type": "qwen3_next"}, "layer_types has linear_attention; model_impl transformers serves"),
        ({"model_type": "gpt2", "n_embd": 36}, "head_dim is 3, it must be even"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"model_type": "gpt2", "n_embd": 100}, "hidden_size 100 is not a multiple of num_attention_heads 12"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configs_with_missing_or_unsupported_fields(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | changes))
    with pytest.raises(CheckpointError, match=told):
        load_transformers_config(tmp_path)


def test_names_of_passes() -> None:
    assert chosen_passes("all") == frozenset(CompilePass) == {each.name for each in PASSES}
    assert chosen_passes("none") == ALWAYS_RUN
    assert chosen_passes("rope, norm") == {CompilePass.ROPE, CompilePass.NORM} | ALWAYS_RUN
    with pytest.raises(ValueError, match="unknown pass 'ropes'"):
        chosen_passes("ropes")

"""`convert` writes a folder that loads as the checkpoint it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from helpers.gguf_files import make_tiny_gguf
from helpers.kv_scale_checkpoints import add_tensors, kv_scales_of, scale_tensors
from helpers.paged_model import PagedModel
from helpers.quantized_checkpoints import IGNORED, Quantised, quantise, scheme_of
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from orbax.checkpoint import StandardCheckpointer

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint import ORBAX_MARKER, Checkpoint, ParameterReader, SourceKind, open_checkpoint
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.cli.convert import convert
from sglang_jax.cli.main import run
from sglang_jax.config import Dtype, EngineConfig, KVCacheDtype, WeightQuantization
from sglang_jax.engine.engine import Engine
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, Transformer, build_model
from sglang_jax.runner.kv_scales import kv_scale_factor
from sglang_jax.runner.quantization import encodings_of, quantization_for
from sglang_jax.sampling import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("original"))


def weights(
    checkpoint: Checkpoint,
    dtype: str,
    quantization: WeightQuantization = WeightQuantization.AUTO,
    kv_dtype: str | None = None,
) -> dict[str, np.ndarray]:
    wanted = quantization_for(checkpoint, quantization)
    model: Transformer = build_model(
        checkpoint.config,
        dtype=jnp.dtype(dtype),
        attention=AttentionImplementation.XLA,
        platform="cpu",
        kv_dtype=None if kv_dtype is None else jnp.dtype(kv_dtype),
        encodings=encodings_of(checkpoint, wanted),
    )
    mesh = make_mesh(jax.devices()[:1])
    if checkpoint.reader is None:
        restore_orbax(checkpoint.source.path, model, checkpoint.config, mesh)
    else:
        load_weights(model, checkpoint.reader, checkpoint.config, mesh, wanted)
    return {str(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_converted_checkpoint_is_the_same_model(original: Path, tmp_path: Path, dtype: str) -> None:
    output = tmp_path / "converted"
    arguments = [str(original), "--to", "orbax", "--output", str(output), "--dtype", dtype]
    assert run(convert, "convert", arguments) == 0
    before, after = open_checkpoint(str(original)), open_checkpoint(str(output))
    assert after.source.kind is SourceKind.ORBAX
    assert after.config == before.config
    assert after.generation_defaults == before.generation_defaults
    expected, found = weights(before, dtype), weights(after, dtype)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    text = "the capital of france is paris."
    assert load_tokenizer(after.tokenizer_source).encode(text) == load_tokenizer(before.tokenizer_source).encode(text)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [(Quantised.FP8_CHANNEL, WeightQuantization.AUTO), (None, WeightQuantization.INT8)],
    ids=["stored, tied", "converted"],
)
def test_matrices_of_8_bits_are_copied_unchanged(
    kind: Quantised | None, quantization: WeightQuantization, tmp_path: Path
) -> None:
    """With their scales, experts too. A folder without scales has the format that earlier releases read."""
    original, output = tmp_path / "original", tmp_path / "converted"
    if kind is None:
        make_tiny_checkpoint(original, "qwen2_moe")
    else:
        make_tiny_checkpoint(original, "qwen3_moe", tie_word_embeddings=True)
        quantise(original, [scheme_of(kind, "Linear", "Embedding")], IGNORED)
    arguments = [str(original), "--to", "orbax", "--output", str(output)]
    if quantization is not WeightQuantization.AUTO:
        arguments += ["--quantize", quantization.value, "--error-layers", "0"]
    assert run(convert, "convert", arguments) == 0
    expected = weights(open_checkpoint(str(original)), "float32", quantization)
    found = weights(open_checkpoint(str(output)), "float32")
    assert {array.dtype.itemsize for array in found.values()} == {1, 4}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    with pytest.raises(ConfigError, match="convert again with --quantize fp8"):
        quantization_for(open_checkpoint(str(output)), WeightQuantization.FLOAT8_E4M3)
    marker = output / ORBAX_MARKER
    assert json.loads(marker.read_text())["format_version"] == 2
    broken = json.loads(marker.read_text())
    broken["encodings"][0]["matrices"].append(["query", 99])
    marker.write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match="query of layer 99, which the model has not"):
        encodings_of(open_checkpoint(str(output)), None)


def test_a_stored_head_is_kept_although_the_config_ties_it(tmp_path: Path) -> None:
    original, output = tmp_path / "original", tmp_path / "converted"
    make_tiny_checkpoint(original)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert run(convert, "convert", [str(original), "--to", "orbax", "--output", str(output), "--dtype", "float32"]) == 0
    expected, found = (weights(open_checkpoint(str(folder)), "float32") for folder in (original, output))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("options", [("--to", "orbax"), ("--quantize", "int8")])
def test_how_vectors_are_made_is_kept(options: tuple[str, str], tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "source")
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert run(convert, "convert", [str(source), "--output", str(tmp_path / "converted"), *options]) == 0
    pooler = open_checkpoint(str(tmp_path / "converted")).config.pooler
    assert pooler is not None
    assert pooler == open_checkpoint(str(source)).config.pooler


def test_scales_of_keys_and_values_are_kept(original: Path, tmp_path: Path) -> None:
    given = np.random.default_rng(0).uniform(1e-9, 1e3, (2, 2, 2)).astype(np.float32)
    scheme = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
    folder, output = Path(shutil.copytree(original, tmp_path / "scaled")), tmp_path / "converted"
    add_tensors(folder, scale_tensors(given), scheme=scheme)
    assert run(convert, "convert", ["--model-path", str(folder), "--to", "orbax", "--output", str(output)]) == 0
    converted = open_checkpoint(str(output))
    assert converted.kv_parameters().has(ParameterKind.SCALE)
    assert converted.kv_scales_made_for() is KVCacheDtype.INT8
    np.testing.assert_array_equal(kv_scales_of(converted), given)
    for checkpoint in (open_checkpoint(str(folder)), converted):
        found = weights(checkpoint, "float32", kv_dtype="int8")
        scales = [array for path, array in found.items() if "kv_scales" in path]
        np.testing.assert_array_equal(scales, given)
    marker = output / ORBAX_MARKER
    unusable = r"scales of keys and values must be positive.*\n  model.layers.0.self_attn.k_scale: 0\n"
    for wrong, told in (
        ([[[1.0, 2.0]]] * 2, r"sglang_jax_orbax\.json cannot be read: .*KV scales of layer 0 are \(1, 2\)"),
        ([[[1.0, 2.0]] * 2], r"sglang_jax_orbax\.json cannot be read: .*"),
        (np.zeros((2, 2, 2)).tolist(), unusable),
    ):
        marker.write_text(
            json.dumps(json.loads(marker.read_text()) | {"kv_scales": {"made_for": None, "numbers": wrong}})
        )
        with pytest.raises(CheckpointError, match=told):
            kv_scale_factor(converted, KVCacheDtype.INT8)


def test_scales_of_a_model_with_states_are_kept(tmp_path: Path) -> None:
    """Layers without attention have no scales."""
    folder, output = make_tiny_checkpoint(tmp_path / "original", "qwen3_5_text"), tmp_path / "converted"
    layers = open_checkpoint(str(folder)).config.layers
    attention = [number for number, layer in enumerate(layers) if layer.attention is not None]
    assert 0 < len(attention) < len(layers)
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in attention for side in "kv"]
    add_tensors(folder, {name: np.float32([number + 1]) for number, name in enumerate(names)})
    assert run(convert, "convert", ["--model-path", str(folder), "--to", "orbax", "--output", str(output)]) == 0
    found = kv_scales_of(open_checkpoint(str(output)))
    np.testing.assert_array_equal(found, kv_scales_of(open_checkpoint(str(folder))))
    np.testing.assert_array_equal(found[:, 0].reshape(-1), np.arange(len(names)) + 1)


def test_the_engine_generates_the_same_from_it(original: Path, tmp_path: Path) -> None:
    output = tmp_path / "converted"
    assert run(convert, "convert", ["--model-path", str(original), "--to", "orbax", "--output", str(output)]) == 0
    answers = []
    for folder in (original, output):
        config = EngineConfig(
            model_path=str(folder),
            dtype=Dtype.FLOAT32,
            max_running_requests=1,
            max_total_tokens=64,
            chunked_prefill_size=16,
            skip_warmup=True,
        )
        with Engine(config) as engine:
            answer = engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True))
            assert isinstance(answer, GenerateOutput)
            answers.append(answer.output_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


@pytest.mark.parametrize(
    ("stored", "written"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")]
)
def test_weights_keep_the_checkpoints_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: str, written: str
) -> None:
    folder, output = make_tiny_checkpoint(tmp_path / "original", dtype=stored), tmp_path / "converted"
    assert run(convert, "convert", ["--model-path", str(folder), "--to", "orbax", "--output", str(output)]) == 0
    assert f"in {written}: serve it" in capsys.readouterr().out
    found = StandardCheckpointer().metadata(output / "weights").item_metadata
    assert {str(array.dtype) for array in dict(found).values()} == {written}


def test_a_second_conversion_overwrites_nothing(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-path", str(original), "--to", "orbax", "--output", str(tmp_path)]
    assert run(convert, "convert", arguments) == 0
    assert run(convert, "convert", arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(convert, "convert", ["--model-path", str(tmp_path), "--to", "orbax", "--output", "elsewhere"]) == 2
    assert "Orbax checkpoint already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "orbax", "--output", "x"], ["--model-path"]),
        (["--model-path", "demo", "--to", "zip", "--output", "x"], ["--to", "zip", "orbax"]),
        (["--model-path", "demo", "--to", "orbax", "--output", "x", "--dtype", "float16"], ["--dtype", "float16"]),
        (["--model-path", "no/such/folder", "--to", "orbax", "--output", "x"], ["no/such/folder"]),
    ],
)
def test_refusals_are_clear(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert run(convert, "convert", arguments) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'MODEL': what to convert, as for --model-path"),
        (["a", "--model-path", "b"], "two models are given: a and --model-path b"),
        (["/missing"], "/missing does not exist"),
        (["/missing", "--model-path", "/missing"], "/missing does not exist"),
    ],
)
def test_the_source_is_named_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert run(convert, "convert", [*arguments, "--to", "orbax", "--output", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"Error: {message}\n"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_folder_computes_what_loading_quantises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: str
) -> None:
    original = make_tiny_checkpoint(tmp_path / "original", "qwen3_moe", dtype="bfloat16", moe_intermediate_size=64)
    output = tmp_path / "quantised"
    arguments = [str(original), "--quantize", quantization, "--output", str(output), "--error-layers", "1"]
    assert run(convert, "convert", arguments) == 0
    told = capsys.readouterr().out
    assert f"44 matrices in {quantization}" in told
    assert [line.split("  ")[1] for line in told.splitlines()[2:]] == ["layer 0", "all layers"]
    assert min(float(line.split()[-1]) for line in told.splitlines()[2:]) > 0
    after = open_checkpoint(str(output))
    assert after.generation_defaults == open_checkpoint(str(original)).generation_defaults
    text = "the capital of france is paris."
    assert load_tokenizer(after.tokenizer_source).encode(text) == load_tokenizer(
        open_checkpoint(str(original)).tokenizer_source
    ).encode(text)
    wanted = quantization_for(open_checkpoint(str(original)), WeightQuantization(quantization))
    sequence = np.random.default_rng(0).integers(5, 380, 40).tolist()
    found = PagedModel(output).run([sequence], [{0: 40}])
    expected = PagedModel(original, quantization=wanted).run([sequence], [{0: 40}])
    np.testing.assert_array_equal(found, expected)
    assert np.abs(PagedModel(original).run([sequence], [{0: 40}])[0] - expected[0]).max() > 1e-3


def test_a_quantised_folder_keeps_its_own_head(tmp_path: Path) -> None:
    original, output = make_tiny_checkpoint(tmp_path / "original"), tmp_path / "quantised"
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    arguments = ["--quantize", "fp8", "--error-layers", "0", "--dtype", "bfloat16"]
    assert run(convert, "convert", [str(original), *arguments, "--output", str(output)]) == 0
    written = json.loads((output / "config.json").read_text())
    assert (written["tie_word_embeddings"], written["dtype"]) == (False, "bfloat16")
    reader = open_checkpoint(str(output)).reader
    before = open_checkpoint(str(original)).reader
    assert reader.in_bfloat16("lm_head.weight")
    np.testing.assert_array_equal(reader.read("lm_head.weight"), before.read("lm_head.weight").astype("bfloat16"))


def test_errors_that_do_not_fit_in_memory_are_left_out(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_jax.cli.conversion.available_host_memory", lambda: 100_000)
    assert run(convert, "convert", [str(original), "--quantize", "int4", "--output", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    assert "The error by layer is not measured: it needs 0.0 GiB of memory, and 0.0 are available" in told
    assert "KL divergence" not in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option --to (orbax) or --quantize (int8, fp8, int4)"),
        (["--to", "compressed-tensors"], "--to compressed-tensors needs --quantize: int8, fp8 or int4"),
        (["--quantize", "int3"], "'--quantize': 'int3' is not one of 'auto', 'int8', 'fp8', 'int4'"),
        (["--to", "orbax", "--quantize", "int4"], "choose int8 or fp8, or --to compressed-tensors"),
        (["--quantize", "int8"], "output exists already, and is not an empty folder"),
    ],
)
def test_quantised_folders_that_cannot_be_written_are_refused(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    assert run(convert, "convert", [str(original), "--output", str(output), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in output.iterdir()] == ["notes.txt"]


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = make_tiny_checkpoint(tmp_path / "original")
    quantise(original, [scheme_of(Quantised.FP8_CHANNEL)], IGNORED)
    assert run(convert, "convert", [str(original), "--quantize", "int4", "--output", str(tmp_path / "new")]) == 2
    assert f"quantize int4: {original} is quantised already: remove the option" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_gguf_file_becomes_a_quantised_folder_in_bfloat16(tmp_path: Path) -> None:
    file, output = tmp_path / "model.gguf", tmp_path / "quantised"
    make_tiny_gguf(file, make_tiny_model("llama"), make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.F16)
    arguments = [str(file), "--quantize", "int4", "--output", str(output), "--error-layers", "0"]
    assert run(convert, "convert", arguments) == 0
    after, before = open_checkpoint(str(output)), open_checkpoint(str(file))
    assert after.config.dtype == json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert after.reader.in_bfloat16("model.embed_tokens.weight")
    loading = ParameterReader(before.reader, before.config, quantization_for(before, WeightQuantization.INT4))
    written = ParameterReader(after.reader, after.config)
    for part in (Part.QUERY, Part.DOWN):
        name = ParameterName(part, layer=1)
        np.testing.assert_array_equal(written.read(name), loading.read(name))

"""What `convert` does: writes Orbax checkpoints and Hugging Face folders, and measures what quantisation changes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.checkpoint import Checkpoint
from sglang_jax.checkpoint.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE, load_hf_config, model_config_to_hf
from sglang_jax.checkpoint.orbax_marker import kv_scales_to_json
from sglang_jax.checkpoint.poolers import pooler_files
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.quantized_folder import QuantizedTensors, write_quantized_folder
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.cli.convert import MEASURED_TOKENS, StoredDtype
from sglang_jax.config import Device
from sglang_jax.runner.quantization import encodings_of, kept_encodings
from sglang_jax.runner.this_machine import available_host_memory

_DTYPES = {StoredDtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16), StoredDtype.FLOAT32: np.dtype(np.float32)}

TEXT = (
    "The river rises in the hills above the old town, and for most of the year it is shallow enough to cross on foot. "
    'In spring, when the snow melts, it carries stones and branches down to the mill. Its owner wrote in 1873: "We '
    'have 12 hours of water a day, and wheat for 40." def area(width, height): return width * height'
)
"""On which the errors of layers are measured."""


def write_orbax(output: Path, checkpoint: Checkpoint, quantization: Quantization | None, dtype: StoredDtype) -> str:
    """Writes a checkpoint with a reader. Returns the dtype of plain weights, for the user. Raises as `save_orbax`."""
    import jax.numpy as jnp

    from sglang_jax.jax_runner.devices import select_device
    from sglang_jax.jax_runner.orbax_checkpoint import save_orbax
    from sglang_jax.jax_runner.weights import load_weights
    from sglang_jax.layers.sharding import make_mesh
    from sglang_jax.models import AttentionImplementation, build_model

    assert checkpoint.reader is not None
    encodings = encodings_of(checkpoint, quantization)
    dtype = dtype.of(checkpoint.config.dtype)
    device = select_device(Device.CPU)
    model = build_model(
        checkpoint.config,
        dtype=jnp.dtype(dtype.value),
        attention=AttentionImplementation.REFERENCE,
        platform=device.platform,
        encodings=encodings,
    )
    kv_scales, kv_parameters = None, checkpoint.kv_parameters()
    if kv_parameters.has(ParameterKind.SCALE):
        kv_parameters.check(ParameterKind.SCALE)
        kv_scales = kv_scales_to_json(kv_parameters, checkpoint.kv_scales_made_for())
    load_weights(model, checkpoint.reader, checkpoint.config, make_mesh([device]), quantization)
    with tempfile.TemporaryDirectory() as folder:
        extra_files = Path(folder)
        _write_config(checkpoint, extra_files)
        _write_beside_weights(checkpoint, extra_files)
        kept = kept_encodings(checkpoint.config, encodings)
        save_orbax(output, checkpoint.config, model, sorted(extra_files.iterdir()), kv_scales, kept)
    return dtype.value


def write_folder(output: Path, checkpoint: Checkpoint, quantization: Quantization, dtype: StoredDtype) -> str:
    """Writes a checkpoint with a reader, in the format of compressed-tensors. Returns what it has, for the user; a tied
    head counts as a plain layer. Raises as `QuantizedTensors` and `write_quantized_folder`."""
    assert checkpoint.reader is not None
    tensors = QuantizedTensors(checkpoint.reader, checkpoint.config, quantization)
    values, plain = _config_values(checkpoint), None
    if dtype is not StoredDtype.AUTO or checkpoint.reads_gguf:
        chosen = dtype.of(checkpoint.config.dtype)
        plain = _DTYPES[chosen]
        values = {name: value for name, value in values.items() if name != "torch_dtype"} | {"dtype": chosen.value}
    kv_type = None if checkpoint.reads_gguf else checkpoint.kv_scales_made_for()
    output.mkdir(parents=True, exist_ok=True)
    _write_beside_weights(checkpoint, output)
    write_quantized_folder(output, tensors, values, dtype=plain, kv_type=kv_type)
    counts = Counter(encoding.values.value for encoding in tensors.encodings.values())
    matrices = ", ".join(f"{count} matrices in {values}" for values, count in counts.items())
    return f"compressed-tensors ({matrices}, {len(tensors.plain_layers)} layers plain)"


def print_errors(checkpoint: Checkpoint, quantization: Quantization, most: int) -> None:
    """Prints the error of at most `most` layers of a checkpoint with a reader, and of all together; or why not, without
    JAX or the memory that the model takes in float32."""
    if find_spec("jax") is None:
        click.echo("The error by layer is not measured: it needs the JAX backend")
        return
    from sglang_jax.jax_runner.devices import select_device
    from sglang_jax.jax_runner.layer_errors import bytes_to_measure, layer_errors, measured_layers

    assert checkpoint.reader is not None
    needed, available = bytes_to_measure(checkpoint.config), available_host_memory()
    if needed > available:
        click.echo(
            f"The error by layer is not measured: it needs {needed / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} are available"
        )
        return
    tokens = load_tokenizer(checkpoint.tokenizer_source).encode(TEXT)[:MEASURED_TOKENS]
    layers = measured_layers(checkpoint.config.num_layers, most)
    click.echo(
        f"KL divergence of the next token from the plain model's, in nats, mean over {len(tokens)} tokens, if only one "
        "layer is quantised:"
    )
    device = select_device(Device.CPU)
    for error in layer_errors(checkpoint.reader, checkpoint.config, quantization, tokens, layers, device):
        name = "all layers" if error.layer is None else f"layer {error.layer}"
        click.echo(f"  {name:<10}  {error.divergence:.3g}")


def _config_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of config.json. A checkpoint may have its own head although its config ties it; the output keeps
    it."""
    stored = checkpoint.source.path / CONFIG_FILE
    if not stored.is_file():
        return model_config_to_hf(checkpoint.config)
    values: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    own_head = not checkpoint.config.tie_word_embeddings
    if own_head and load_hf_config(checkpoint.source.path).tie_word_embeddings:
        values["tie_word_embeddings"] = False
    return values


def _write_config(checkpoint: Checkpoint, folder: Path) -> None:
    """Copies config.json, unless it has to say something else."""
    stored, values = checkpoint.source.path / CONFIG_FILE, _config_values(checkpoint)
    if stored.is_file() and json.loads(stored.read_text(encoding="utf-8")) == values:
        shutil.copy(stored, folder)
    else:
        _write_json(folder / CONFIG_FILE, values)


def _write_beside_weights(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes tokenizer, generation config, and the files that say how vectors and scores are made."""
    load_tokenizer(checkpoint.tokenizer_source).save(folder)
    for name in pooler_files(checkpoint.source.path):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(checkpoint.source.path / name, folder / name)
    generation_config = checkpoint.source.path / GENERATION_CONFIG_FILE
    if generation_config.is_file():
        shutil.copy(generation_config, folder)
    elif recommended := checkpoint.generation_defaults.recommended():
        _write_json(folder / GENERATION_CONFIG_FILE, recommended)


def _write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

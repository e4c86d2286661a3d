"""Decides which matrices of a model are quantised, by the options and the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import TABLES, Part
from sglang_jax.checkpoint import Checkpoint, ModelConfig, ParameterReader
from sglang_jax.checkpoint.encoding import AnyValues, Encoding, ValueType
from sglang_jax.checkpoint.ggml_blocks import WITH_EXACT_ACTIVATIONS, BlockType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, groups_of
from sglang_jax.checkpoint.orbax_marker import read_orbax_encodings
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT4_GROUPS, INT8_ROWS, Encodings, Quantization, all_plain
from sglang_jax.config import CpuActivations, Dtype, EngineConfig, TpuActivations, WeightQuantization
from sglang_jax.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_MEMORY_FRACTION = 1 / 8
"""Maximum fraction of the memory that the other weights leave for matrices that are also kept in blocks."""

_ENCODINGS = {
    WeightQuantization.INT8: INT8_ROWS,
    WeightQuantization.FLOAT8_E4M3: FLOAT8_ROWS,
    WeightQuantization.INT4: INT4_GROUPS,
}
_ROUNDED = (WeightQuantization.INT8, WeightQuantization.INT4)
"""Options whose matrices multiply activations rounded to int8 on a CPU."""


def quantization_wanted(wanted: WeightQuantization) -> Quantization | None:
    """The quantisation, while matrices are read, that an option asks for; None to keep them as stored."""
    encoding = _ENCODINGS.get(wanted)
    return None if encoding is None else Quantization(encoding)


def encodings_by_option(model: ModelConfig, wanted: WeightQuantization) -> Encodings:
    """The encodings, under an option, of the matrices of a model whose checkpoint has plain numbers."""
    quantization, specs = quantization_wanted(wanted), manifest_of(model).specs
    if quantization is None:
        return all_plain
    found = {name: quantization.of(spec) for name, spec in specs.items()}
    return {name: each.encoding for name, each in found.items() if each is not None}.get


def quantization_of(config: EngineConfig, checkpoint: Checkpoint) -> Quantization | None:
    """The quantisation, while the matrices of a checkpoint are read, that the options ask for; None to keep them as
    stored. Raises `ConfigError` for a checkpoint whose matrices cannot be quantised this way, or already are."""
    wanted = config.quantization
    if wanted is not WeightQuantization.AUTO:
        rounds = config.cpu_activations is CpuActivations.INT8 and wanted not in _ROUNDED
        for asked, option in ((config.keep_gguf_blocks, "keep_gguf_blocks"), (rounds, "cpu_activations int8")):
            if asked:
                raise ConfigError(f"quantization {wanted.value} and {option} exclude each other: remove one of the two")
    return quantization_for(checkpoint, wanted)


def _in_blocks(values: AnyValues) -> bool:
    return not isinstance(values, ValueType)


def _of_integers(values: AnyValues) -> bool:
    """Whether kernels multiply matrices of a type by activations rounded to int8."""
    if isinstance(values, GroupType):
        return values.levels is not Levels.FLOAT8_E4M3
    return values is not ValueType.FLOAT8_E4M3


def _of_groups(values: AnyValues) -> bool:
    return groups_of(values) is not None


def has_blocks(checkpoint: Checkpoint, which: Callable[[AnyValues], bool] = _in_blocks) -> bool:
    """Whether some matrices are quantised in blocks, or as `which` has it."""
    reader = checkpoint.reader
    if reader is None:
        return False
    encodings = (reader.encoding(name) for name in reader.names())
    return any(encoding is not None and which(encoding.values) for encoding in encodings)


def has_groups(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether some matrices are quantised in groups, by the checkpoint or by the options."""
    return config.quantization is WeightQuantization.INT4 or has_blocks(checkpoint, _of_groups)


def require_kernels_for_groups(config: EngineConfig, needed: str) -> None:
    """For a model without kernels for matrices in groups: raises `ConfigError` if an option asks for such matrices."""
    if config.quantization is WeightQuantization.INT4:
        raise ConfigError(f"quantization int4 needs {needed}; or choose int8")


def only_blocks(checkpoint: Checkpoint, quantization: Quantization | None = None) -> bool:
    """Whether kernels for integers can multiply all matrices, except routers, which are small."""
    if checkpoint.reader is None:
        return False
    encodings, others = (
        encodings_of(checkpoint, quantization),
        {*TABLES, Part.POOLER, Part.LABELS, Part.ROUTER, Part.SHARED_ROUTER},
    )
    if checkpoint.config.tie_word_embeddings:
        others.remove(Part.EMBEDDING)
    specs = manifest_of(checkpoint.config).specs.values()
    found = [encodings(spec.name) for spec in specs if spec.is_matrix and spec.name.part not in others]
    return all(encoding is not None and _of_integers(encoding.values) for encoding in found)


def rounds_activations(config: EngineConfig) -> bool:
    """Whether matrices of integers should stay as stored on a CPU, and multiply activations rounded to int8."""
    if config.cpu_activations is not CpuActivations.AUTO:
        return config.cpu_activations is CpuActivations.INT8
    integers = config.quantization in (WeightQuantization.AUTO, *_ROUNDED)
    return integers and config.dtype is not Dtype.FLOAT32 and not config.batch_invariant


def wants_blocks(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether matrices of the checkpoint should be kept in blocks. Raises `ConfigError` if that was asked for and it
    has none."""
    rounds = rounds_activations(config)
    which = _of_integers if rounds else WITH_EXACT_ACTIVATIONS.__contains__
    if (rounds and config.quantization in _ROUNDED) or has_blocks(checkpoint, which):
        return config.keep_gguf_blocks or rounds
    if asks_for_blocks(config):
        known = [kind.value for kind in (BlockType if rounds else WITH_EXACT_ACTIVATIONS)]
        *others, last = [*known, "int8", "grouped int4"] if rounds else known
        raise ConfigError(
            f"{_option_of_blocks(config)}: {checkpoint.source.path} has no {', '.join(others)} or {last} matrices: "
            "remove the option"
        )
    return False


def refuse_rounding(config: EngineConfig, platform: str) -> None:
    """Raises `ConfigError` if the options ask for rounded activations of TPUs on another platform."""
    if config.tpu_activations is TpuActivations.ROUNDED and platform != "tpu":
        raise ConfigError(f"tpu_activations rounded needs a TPU, the device is a {platform}: choose auto")


def asks_for_blocks(config: EngineConfig) -> bool:
    """Whether an option, not a default, asks for matrices in blocks."""
    return config.keep_gguf_blocks or config.cpu_activations is CpuActivations.INT8


def refuse_blocks(config: EngineConfig, checkpoint: Checkpoint, needed: str) -> None:
    """Logs what CPU kernels for matrices of integers would have `needed`. Raises `ConfigError` if an option asks for
    them."""
    if asks_for_blocks(config):
        raise ConfigError(f"{_option_of_blocks(config)} needs {needed}")
    if has_blocks(checkpoint):
        logger.info("Matrices in blocks are widened: blocks need %s", needed)
    else:
        logger.info("Activations are not rounded to int8: that needs %s", needed)


def _option_of_blocks(config: EngineConfig) -> str:
    return "keep_gguf_blocks" if config.keep_gguf_blocks else "cpu_activations int8"


def quantization_for(
    checkpoint: Checkpoint, wanted: WeightQuantization, option: str = "quantization"
) -> Quantization | None:
    """Like `quantization_of`, for one option, whose name errors give as `option`."""
    quantization = quantization_wanted(wanted)
    if quantization is None:
        return None
    where = checkpoint.source.address
    if checkpoint.transformers_config is not None:
        raise ConfigError(f"{option} {wanted.value} needs --model-impl native: remove one of the two")
    if checkpoint.reader is None:
        raise ConfigError(
            f"{option} {wanted.value}: {where} is an Orbax checkpoint, whose weights are used as they are: remove "
            f"the option, or convert again with --quantize {wanted.value}"
        )
    stored = (checkpoint.reader.encoding(name) for name in checkpoint.reader.names())
    if any(encoding is not None and not isinstance(encoding.values, BlockType) for encoding in stored):
        raise ConfigError(f"{option} {wanted.value}: {where} is quantised already: remove the option")
    return quantization


def describe_matrices(model: ModelConfig, kept: Mapping[ParameterName, str]) -> str | None:
    """Describes and logs how many matrices of a model, without the tables of embeddings, are `kept` in another dtype
    than that of activations; None if none are."""
    if not kept:
        return None
    count = sum(spec.is_matrix and spec.name.part not in TABLES for spec in manifest_of(model).specs.values())
    own = sum(name.part not in TABLES for name in kept)
    *others, last = sorted(set(kept.values()))
    types = f"{', '.join(others)} and {last}" if others else last
    found = f"{own} of {count} matrices in {types}"
    logger.info("In memory are %s; the others are in --dtype", found)
    return found


def kept_encodings(model: ModelConfig, encodings: Encodings) -> dict[ParameterName, Encoding]:
    """The encodings of the matrices with a scale per row. A layer that joins some with others of another encoding
    widens them."""
    found = {name: encodings(name) for name in manifest_of(model).specs}
    return {name: encoding for name, encoding in found.items() if encoding is not None and encoding.block is None}


def encodings_of(checkpoint: Checkpoint, quantization: Quantization | None) -> Encodings:
    if checkpoint.transformers_config is not None:
        return all_plain
    if checkpoint.reader is None:
        return read_orbax_encodings(checkpoint.source.path, checkpoint.config).get
    return ParameterReader(checkpoint.reader, checkpoint.config, quantization).encoding


def matrices_in_bfloat16(checkpoint: Checkpoint, quantization: Quantization | None) -> frozenset[ParameterName]:
    """The matrices that the checkpoint stores in bfloat16, and that can be used as stored."""
    if checkpoint.reader is None or checkpoint.transformers_config is not None:
        return frozenset()
    reader = ParameterReader(checkpoint.reader, checkpoint.config, quantization)
    return frozenset(name for name in manifest_of(checkpoint.config).specs if reader.in_bfloat16(name))


def only_bfloat16(model: ModelConfig, names: Collection[ParameterName]) -> bool:
    """Whether all matrices of a model are among `names`, and none is of an expert. Without names, no model is, nor need
    it have a manifest."""
    if not names:
        return False
    matrices = (spec for spec in manifest_of(model).specs.values() if spec.is_matrix)
    return all(spec.name in names and not spec.places for spec in matrices)


def keeps_blocks(needed: int, room: int) -> bool:
    """Whether a model may also keep `needed` bytes of matrices in blocks, of the `room` that its other weights leave.
    Logs it."""
    if needed > room * _MAX_MEMORY_FRACTION:
        logger.info(
            "Quantised matrices are only kept dequantised: keeping both takes %.0f MiB, more than an eighth of %.0f",
            needed / 2**20,
            room / 2**20,
        )
        return False
    logger.info("Matrices are kept in blocks too, in %.0f MiB", needed / 2**20)
    return True

"""BERT (Devlin et al. 2019) and the encoders with its layers.

A norm follows each sum of a part's output and its input. So the norm of the embeddings is the norm before the attention
of layer 0, that after the feed-forward part of a layer is the norm before the attention of the next layer, and that of
the last layer is the final norm: see `NormConfig.replaces_sum`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.feed_forward import UngatedActivation, UngatedConfig
from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.architectures.model_config import LearntPositions, ModelConfig
from sglang_jax.architectures.pooling import ClassifierHead, Pooling
from sglang_jax.architectures.tensor_names import Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError, quote

_DEFAULTS = Defaults(max_position=512, eps=1e-12, activation="gelu", tie_word_embeddings=True)
_ACTIVATIONS = {
    "gelu": UngatedActivation.GELU,
    "relu": UngatedActivation.RELU,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), UngatedActivation.GELU_TANH),
}


def configure_bert(family: str, fields: JsonFields) -> ModelConfig:
    return _configure(family, fields, LearntPositions(rows=_rows(fields), marks_pairs=True), _DEFAULTS)


def configure_roberta(family: str, fields: JsonFields) -> ModelConfig:
    """RoBERTa (Liu et al. 2019) numbers positions from the number after that of its padding token, and does not tell
    the texts of a pair apart."""
    padding = fields.count("pad_token_id")
    learnt = LearntPositions(rows=_rows(fields), first=(1 if padding is None else padding) + 1)
    return _configure(family, fields, learnt, replace(_DEFAULTS, bos_token_id=0, eos_token_id=2))


def _rows(fields: JsonFields) -> int:
    return fields.size("max_position_embeddings", _DEFAULTS.max_position)


def _configure(family: str, fields: JsonFields, learnt: LearntPositions, defaults: Defaults) -> ModelConfig:
    """Reads a config.json. `learnt`: without the number of token types. Raises `CheckpointError` for missing, mistyped
    or unsupported fields."""
    _check_is_encoder(fields)
    _check_heads(fields)
    common = CommonFields.read(fields, defaults)
    if learnt.rows <= learnt.first:
        raise CheckpointError(
            f"{fields.file}: max_position_embeddings is {learnt.rows}; it must be more than {learnt.first}, the row of "
            "the first position"
        )
    types = fields.size("type_vocab_size", 2)
    eps = fields.positive("layer_norm_eps", defaults.eps)
    norm = NormConfig(eps=eps, kind=NormKind.LAYER, weight_in_float32=True, bias=True, replaces_sum=True)
    layer = common.pre_norm_layer(_attention(common), _feed_forward(common), norm)
    model = common.model(family, [layer] * common.num_layers, norm)
    return replace(
        model,
        max_position=learnt.rows - learnt.first,
        learnt_positions=replace(learnt, token_types=types, marks_pairs=learnt.marks_pairs and types > 1),
    )


def _attention(common: CommonFields) -> AttentionConfig:
    head_dim = common.hidden_size // common.num_heads
    return AttentionConfig(
        num_heads=common.num_heads,
        num_kv_heads=common.num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        causal=False,
        bias=True,
        out_bias=True,
    )


def _feed_forward(common: CommonFields) -> UngatedConfig:
    name = common.fields.string("hidden_act") or common.defaults.activation
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{common.fields.file}: hidden_act {quote(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    size = common.fields.required_integer("intermediate_size")
    return UngatedConfig(size=size, activation=_ACTIVATIONS[name], bias=True)


def _check_is_encoder(fields: JsonFields) -> None:
    positions = fields.string("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise CheckpointError(
            f"{fields.file}: position_embedding_type {quote(positions)} is not supported; supported: absolute"
        )
    for field in ("is_decoder", "add_cross_attention"):
        if fields.boolean(field):
            raise CheckpointError(f"{fields.file}: {field} is true; only false is supported")


def _check_heads(fields: JsonFields) -> None:
    hidden, heads = fields.required_integer("hidden_size"), fields.required_integer("num_attention_heads")
    if hidden % heads:
        raise CheckpointError(
            f"{fields.file}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})"
        )


def _name(tensor: str, *, after_first: str | None = None, in_last_layer: bool = False) -> TensorName:
    return TensorName(tensor, layers="encoder.layer", after_first=after_first, in_last_layer=in_last_layer)


NAMES: TensorNames = {
    Part.EMBEDDING: TensorName("embeddings.word_embeddings"),
    Part.POSITION_EMBEDDING: TensorName("embeddings.position_embeddings"),
    Part.TYPE_EMBEDDING: TensorName("embeddings.token_type_embeddings"),
    Part.ATTENTION_NORM: _name("output.LayerNorm", after_first="embeddings.LayerNorm"),
    Part.QUERY: _name("attention.self.query"),
    Part.KEY: _name("attention.self.key"),
    Part.VALUE: _name("attention.self.value"),
    Part.OUTPUT: _name("attention.output.dense"),
    Part.FEED_FORWARD_NORM: _name("attention.output.LayerNorm"),
    Part.UP: _name("intermediate.dense"),
    Part.DOWN: _name("output.dense"),
    Part.FINAL_NORM: _name("output.LayerNorm", in_last_layer=True),
    Part.HEAD: TensorName("lm_head"),
    Part.POOLER: TensorName("pooler.dense"),
    Part.LABELS: TensorName("classifier"),
}

ROBERTA_NAMES: TensorNames = {
    **NAMES,
    Part.POOLER: TensorName("classifier.dense"),
    Part.LABELS: TensorName("classifier.out_proj"),
}

CLASSIFIER = ClassifierHead(pooling=Pooling.CLS, bias=True, dense=True)
"""Its dense layer was trained with the model, or with the labels (RoBERTa)."""

_MODEL = ("bert.", "roberta.")
"""Prefixes of the encoder's tensors in checkpoints with a head."""

_UNUSED = ("cls.", "lm_head.", "embeddings.position_ids")

_OLD_NORMS = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of the norms' tensors in the first checkpoints, and those since."""


def without_head(names: Collection[str]) -> dict[str, str]:
    """See `Family.without_head`. Leaves out the heads that predict tokens and sentences."""
    return _renamed(names, _UNUSED)


def roberta_without_head(names: Collection[str]) -> dict[str, str]:
    """The same. Leaves out the dense layer of RoBERTa without a head, too: classifiers have another one."""
    return _renamed(names, (*_UNUSED, "pooler."))


def _renamed(names: Collection[str], unused: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for stored in names:
        name = next((stored.removeprefix(prefix) for prefix in _MODEL if stored.startswith(prefix)), stored)
        for old, new in _OLD_NORMS.items():
            if name.endswith(f"LayerNorm{old}"):
                name = name.removesuffix(old) + new
        if not name.startswith(unused):
            found[name] = stored
    return found

"""Which tensors a model needs, and whether a checkpoint has exactly these."""

from __future__ import annotations

from sglang_jax.checkpoint.kv_scale_names import KVScaleNames
from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_HARMLESS_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies, which follow from the config."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that the model is made of; matrices are [out, in]."""
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}": shape for name, shape in _layer_tensors(config).items()}
    tensors[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return tensors


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", key, hidden, config.attention_bias),
        ("self_attn.v_proj", key, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.attention_out_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    )
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, has_bias in linears:
        tensors[f"{name}.weight"] = (rows, columns)
        if has_bias:
            tensors[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        tensors["self_attn.q_norm.weight"] = (config.head_dim,)
        tensors["self_attn.k_norm.weight"] = (config.head_dim,)
    return tensors


def check_tensors(reader: TensorReader, config: ModelConfig) -> None:
    """Compares what a checkpoint holds with what its config calls for; reads no values.

    An output matrix beside tied embeddings, stored rotary frequencies, and scales of keys and values are let pass; of
    scales there must be none, or all (see `KVScaleNames.faults`).

    **Raises:** `CheckpointError` naming every missing, every extra and every misshapen tensor.
    """
    expected = expected_tensors(config)
    present = {name for name in reader.names() if not name.endswith(_HARMLESS_SUFFIX)}
    if config.tie_word_embeddings:
        present.discard(LM_HEAD)
    kv_scales = KVScaleNames.find(present, config.num_layers)
    present -= kv_scales.all()
    faults = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in present]
    faults += [f"extra: {name} {reader.shape(name)}" for name in sorted(present - expected.keys())]
    for name, shape in expected.items():
        if name in present and reader.shape(name) != shape:
            faults.append(f"misshapen: {name} is {reader.shape(name)}, the config calls for {shape}")
    faults += kv_scales.faults(reader, config)
    if faults:
        raise CheckpointError(
            f"the tensors do not fit a {config.architecture} model of {config.num_layers} layers "
            f"({len(faults)} faults):\n  " + "\n  ".join(faults)
        )

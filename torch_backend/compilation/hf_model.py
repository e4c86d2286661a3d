"""Creates models of transformers without weights, with attention that can be traced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sglang_jax.errors import cut
from torch_backend.compilation.markers import attention
from torch_backend.compilation.refusal import refused

_TRACED = "sglang_jax_traced"
"""Name of the traced attention in transformers' configs, which create no masks for a name without a mask function."""

_EAGER = "eager"

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

_REDUNDANT = frozenset({"position_ids", "position_embeddings", "cache_position"})
"""Further tensors that models pass to attention, and that causal attention does not need."""


def config_of(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Creates transformers' config from a config.json's values."""
    values = dict(values)
    config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Creates a `...ForCausalLM` with undefined parameters and correct buffers, whose attention is to be traced. Raises
    `ConfigError` for a config whose model cannot be served."""
    _refuse(config)
    AttentionInterface.register(_TRACED, _traced_attention)
    with no_init_weights():
        model = _from_config(config, dtype, _TRACED)
    model.tie_weights()
    return _for_inference(model)


def eager_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Creates the same model with transformers' own attention, for comparison."""
    _refuse(config)
    return _for_inference(_from_config(config, dtype, _EAGER))


def _for_inference(model: PreTrainedModel) -> PreTrainedModel:
    nn.Module.eval(model)
    model.requires_grad_(False)
    return model


def _refuse(config: PreTrainedConfig) -> None:
    kind, values = config.model_type, config.to_dict()
    if config.is_encoder_decoder:
        raise refused(kind, "it has an encoder; only decoder models are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(kind, "transformers has no causal language model of this type")
    for name in _EXPERTS:
        if isinstance(values.get(name), int) and values[name] > 1:
            raise refused(
                kind,
                f"it is a mixture of experts ({name} {values[name]}). The choice of experts depends on data, so a "
                "trace would compute every expert for every token, or the same experts for all tokens",
            )


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    # A copy: the implementation is written into the config, for all models that share it.
    factory: Any = AutoModelForCausalLM
    try:
        model: PreTrainedModel = factory.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=implementation, trust_remote_code=False
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if error.args == (_TRACED,):  # it looks up a class for each implementation
            reason = "its attention does not use transformers' attention interface"
        else:
            reason = f"transformers cannot build it: {cut(' '.join(str(error).split()))}"
        raise refused(config.model_type, reason) from error
    return model


def _traced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `[1, heads, T, head_dim]` each → `[1, T, heads, head_dim]`."""
    own = vars(module)
    where = f"attention in {type(module).__name__}"
    kind = own["config"].model_type if "config" in own else type(module).__name__
    if not (own.get("is_causal", True) if is_causal is None else is_causal):
        raise refused(kind, f"{where} is not causal")
    if attention_mask is not None:
        raise refused(kind, f"{where} has a custom mask")
    if "layer_idx" not in own:
        raise refused(kind, f"{where} has no layer_idx")
    unsupported = [name for name, given in further.items() if _is_tensor(given) and name not in _REDUNDANT]
    if unsupported:
        raise refused(
            kind, f"{where} has the arguments {', '.join(unsupported)}, which paged attention does not support"
        )
    if query.shape[-1] != value.shape[-1]:
        raise refused(
            kind, f"{where} has keys of size {query.shape[-1]} and values of size {value.shape[-1]}; they must be equal"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    by_token = (each.transpose(1, 2) for each in (query, key, value))
    return attention(*by_token, s_aux, own["layer_idx"], scale, sliding_window, softcap), None


def _is_tensor(given: object) -> bool:
    return isinstance(given, torch.Tensor)

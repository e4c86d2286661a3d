"""The sliding windows of Qwen2 and Qwen3."""

from __future__ import annotations

from sglang_jax.architectures.common_fields import CommonFields

_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_SLIDING_LAYER = 28


def qwen_windows(common: CommonFields) -> list[int | None]:
    """The window of each layer: None without `use_sliding_window`, and by default below layer `max_window_layers`."""
    fields = common.fields
    window = fields.count("sliding_window") if "sliding_window" in fields.values else _DEFAULT_WINDOW
    first = fields.count("max_window_layers")
    first = _DEFAULT_FIRST_SLIDING_LAYER if first is None else first
    if not fields.boolean("use_sliding_window"):
        window = None
    sliding = [number >= first for number in range(common.num_layers)]
    if "layer_types" in fields.values:
        sliding = common.sliding_layers(every=None)
    return [common.effective_window(window) if slides else None for slides in sliding]

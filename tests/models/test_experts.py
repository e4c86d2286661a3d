"""Layers with experts on both backends, against a loop over tokens and experts in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers.triton_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.architectures.kinds.experts import ClampedGate, ExpertsConfig, ExpertScores
from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.parallelism import ONE_DEVICE
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.quantization import INT8_ROWS, Encodings, Quantization
from sglang_jax.checkpoint.reader import Role
from sglang_jax.kernels import experts as products
from sglang_jax.kernels.experts import ExpertProducts
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers import batch as jax_batch
from sglang_jax.layers import experts as jax_experts
from sglang_jax.layers import part as jax_part
from torch_backend import batch as torch_batch
from torch_backend.kernels.chip import Chip
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers import experts as torch_experts
from torch_backend.layers import part as torch_part
from torch_backend.layers.plain_products import fused_product_on
from torch_backend.layers.shard import ModelShard
from torch_backend.native_operations import NativeOperations
from torch_backend.parallel import SINGLE

assert helpers.triton_interpreter

CPU = torch.device("cpu")
HIDDEN, EXPERTS, INNER = 24, 8, 16
ROWS = 3
CONFIGS = {
    "softmax": {},
    "renormalised": {"renormalised": True, "activation": Activation.GELU_TANH},
    "softmax of those chosen": {
        "scores": ExpertScores.CHOSEN_SOFTMAX,
        "bias": True,
        "router_bias": True,
        "clamped": ClampedGate(alpha=1.7, limit=0.8),
    },
    "sigmoid in groups": {
        "scores": ExpertScores.SIGMOID,
        "renormalised": True,
        "correction": True,
        "groups": 4,
        "chosen_groups": 2,
        "scale": 2.5,
    },
    "shared": {"shared_size": 20, "shared_gate": True},
    "shared without a gate": {"shared_size": 20, "chosen": 1},
}
JAX_FORMS = [f"jax {one.value}" for one in (ExpertProducts.ALL, ExpertProducts.RAGGED, ExpertProducts.TILES)]
TORCH_FORMS = ["torch tiles", "torch all experts", "torch sorted", "torch fused"]
Arrays = dict[str, np.ndarray]
Layer = Callable[[np.ndarray, int], np.ndarray]


def make(name: str) -> tuple[ExpertsConfig, Arrays]:
    """A config, and random values for its parameters by their names in the layers."""
    config = ExpertsConfig(**{"num_experts": EXPERTS, "chosen": 3, "size": INNER, **CONFIGS[name]})
    rng = np.random.default_rng(sum(map(ord, name)))

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * (0.5 if len(shape) > 1 else 0.3)

    found = {
        "router": draw(EXPERTS, HIDDEN),
        "gate": draw(EXPERTS, INNER, HIDDEN),
        "up": draw(EXPERTS, INNER, HIDDEN),
        "down": draw(EXPERTS, HIDDEN, INNER),
    }
    if config.router_bias:
        found["router_bias"] = draw(EXPERTS)
    if config.correction:
        found["correction"] = draw(EXPERTS)
    if config.bias:
        biases = {"gate_bias": INNER, "up_bias": INNER, "down_bias": HIDDEN}
        found |= {bias: draw(EXPERTS, size) for bias, size in biases.items()}
    if config.shared_size:
        size = config.shared_size
        shared = {"gate": (size, HIDDEN), "up": (size, HIDDEN), "down": (HIDDEN, size)}
        found |= {f"shared.{part}": draw(*shape) for part, shape in shared.items()}
    if config.shared_gate:
        found["shared.router"] = draw(1, HIDDEN)
    return config, found


def in_8_bits(arrays: Arrays, *parts: str) -> Arrays:
    """The same arrays with 8-bit values and scales for some matrices, which are replaced by the values they
    stand for."""
    found, quantization = dict(arrays), Quantization(INT8_ROWS)
    for part in parts:
        values, scales = quantization.arrays(arrays[part], (Role.VALUES, Role.SCALES)).values()
        found |= {part: values * scales[..., None], f"{part}_values": values, f"{part}_scales": scales}
    return found


def encodings_of(arrays: Arrays) -> Encodings:
    parts = {Part.EXPERT_GATE: "gate", Part.EXPERT_UP: "up", Part.EXPERT_DOWN: "down"}
    return lambda name: INT8_ROWS if f"{parts.get(name.part)}_values" in arrays else None


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gated(config: ExpertsConfig, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if config.clamped is not None:
        alpha, limit = config.clamped.alpha, config.clamped.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * gate * sigmoid(alpha * gate)
    if config.activation is Activation.SILU:
        return gate * sigmoid(gate) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def choose(config: ExpertsConfig, logits: np.ndarray, correction: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The experts of one token, and their scores."""
    softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    scores = {
        ExpertScores.SOFTMAX: softmax,
        ExpertScores.SIGMOID: sigmoid(logits),
        ExpertScores.CHOSEN_SOFTMAX: logits,
    }[config.scores]
    ranked = scores + correction
    if config.groups > 1:
        groups = ranked.reshape(config.groups, -1)
        best = np.sort(groups, axis=1)[:, -config.best_of_group :].sum(1)
        kept = sorted(range(config.groups), key=lambda group: -best[group])[: config.chosen_groups]
        ranked = np.where(np.isin(np.arange(len(ranked)) // groups.shape[1], kept), ranked, -np.inf)
    experts = sorted(range(len(ranked)), key=lambda expert: (-ranked[expert], expert))[: config.chosen]
    found = scores[experts]
    if config.scores is ExpertScores.CHOSEN_SOFTMAX:
        found = np.exp(found - found.max()) / np.exp(found - found.max()).sum()
    if config.renormalised:
        found = found / found.sum()
    return experts, found * config.scale


def expected(config: ExpertsConfig, arrays: Arrays, x: np.ndarray) -> np.ndarray:
    own = {name: array.astype(np.float64) for name, array in arrays.items()}
    outputs = np.zeros((len(x), HIDDEN))
    for token, row in enumerate(x.astype(np.float64)):
        logits = own["router"] @ row + own.get("router_bias", 0)
        experts, scores = choose(config, logits, own.get("correction", np.zeros(EXPERTS)))
        for expert, score in zip(experts, scores, strict=True):
            gate, up = (
                own[part][expert] @ row + (own[f"{part}_bias"][expert] if config.bias else 0) for part in ("gate", "up")
            )
            output = own["down"][expert] @ gated(config, gate, up)
            outputs[token] += score * (output + (own["down_bias"][expert] if config.bias else 0))
        if config.shared_size:
            found = own["shared.down"] @ gated(config, own["shared.gate"] @ row, own["shared.up"] @ row)
            outputs[token] += found * (sigmoid(own["shared.router"] @ row) if config.shared_gate else 1)
    return outputs


def jax_layer(form: str, config: ExpertsConfig, arrays: Arrays, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(ExpertProducts, "of", classmethod(lambda cls, *sizes, **platform: ExpertProducts(form)))
    options = jax_part.PartOptions(
        hidden_size=HIDDEN,
        dtype=jnp.dtype(dtype),
        implementation=AttentionImplementation.XLA,
        encodings=encodings_of(arrays),
    )
    layer = jax_experts.Experts(config, options)
    turned = {"router", "down"}

    def give(parameter: Any, array: np.ndarray) -> None:
        assert parameter.shape == array.shape
        parameter.set_value(jnp.asarray(array, parameter.dtype))

    for name, array in arrays.items():
        if "." not in name and not name.endswith("_values"):
            stored = arrays.get(f"{name}_values", array)
            give(getattr(layer, name), stored.swapaxes(-1, -2) if name in turned else stored)
    if config.shared_size:
        both = np.stack([arrays["shared.gate"].T, arrays["shared.up"].T], axis=1)
        give(layer.shared.gate_up.matrix.kernel, both)
        give(layer.shared.down.matrix.kernel, arrays["shared.down"].T)
    if config.shared_gate:
        give(layer.shared.router, arrays["shared.router"].T)
    graph, state = nnx.split(layer)

    @jax.jit
    def run(x: jax.Array, batch: jax_batch.ForwardBatch) -> jax.Array:
        return nnx.merge(graph, state)(x, jax_part.LayerStep(batch), jax_part.LayerMemory())[0]

    def call(x: np.ndarray, padding: int) -> np.ndarray:
        tokens, real = len(x), len(x) - padding
        zeros = jnp.zeros(tokens, jnp.int32)
        batch = jax_batch.ForwardBatch(
            tokens=zeros,
            positions=zeros,
            write_slots=zeros,
            page_table=jnp.zeros((ROWS, 1), jnp.int32),
            kv_lens=jnp.array([real] + [0] * (ROWS - 1), jnp.int32),
            query_starts=jnp.array([0] + [real] * ROWS, jnp.int32),
            num_decode=jnp.int32(0),
        )
        return np.asarray(run(jnp.asarray(x), batch), np.float64)

    return call


_ENDINGS = ("_values", "_scales", "_bias")


def torch_layer(form: str, config: ExpertsConfig, arrays: Arrays, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Layer:
    shard = ModelShard(rank=0, over=ONE_DEVICE, vocabulary=range(1), vocabulary_rows=1)
    kept = getattr(torch, dtype)
    options = torch_part.PartOptions(
        hidden_size=HIDDEN,
        shard=shard,
        dtype=kept,
        operations=NativeOperations(),
        parallel=SINGLE,
        encodings=encodings_of(arrays),
    )
    layer = torch_experts.Experts(config, options)

    def give(module: torch.nn.Module, name: str, array: np.ndarray) -> None:
        own = module.get_parameter(name)
        assert own.shape == array.shape
        setattr(module, name, torch.nn.Parameter(torch.from_numpy(array.copy()).to(own.dtype), requires_grad=False))

    for name in ("router", "router_bias", "correction"):
        if name in arrays:
            give(layer, name, arrays[name])
    joined = {name: [arrays.get(f"{part}{name}") for part in ("gate", "up")] for name in ("", *_ENDINGS)}
    for stack, of_stack in (
        (layer.gate_up, {name: np.concatenate(both, axis=1) for name, both in joined.items() if both[0] is not None}),
        (layer.down, {name: arrays[f"down{name}"] for name in ("", *_ENDINGS) if f"down{name}" in arrays}),
    ):
        if "_values" not in of_stack:
            give(stack, "weight", of_stack[""])
        for ending in _ENDINGS:
            if ending in of_stack:
                give(stack, ending.removeprefix("_"), of_stack[ending])
    if config.shared_size:
        both = np.concatenate([arrays["shared.gate"], arrays["shared.up"]])
        give(layer.shared.gate_up.matrix, "weight", both)
        give(layer.shared.down.matrix, "weight", arrays["shared.down"])
    if config.shared_gate:
        give(layer.shared, "router", arrays["shared.router"])
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    match form:
        case "all experts":
            monkeypatch.setattr(layer, "_sorted", lambda x, choice, multiply: layer._by_all(x, choice))
        case "sorted":
            monkeypatch.setattr(layer, "_one_by_one", layer._grouped)
        case "fused":
            monkeypatch.setattr(layer, "_fused", fused_product_on(CPU, config.activation, config.clamped))

    def call(x: np.ndarray, padding: int) -> np.ndarray:
        tokens, real = len(x), len(x) - padding
        zeros = torch.zeros(tokens, dtype=torch.int32)
        batch = torch_batch.ForwardBatch(
            tokens=zeros,
            positions=zeros,
            write_slots=zeros.long(),
            page_table=torch.zeros((2, 1), dtype=torch.int32),
            kv_lens=torch.tensor([real, 0], dtype=torch.int32),
            query_starts=torch.tensor([0, real, tokens], dtype=torch.int32),
            num_decode=0,
        )
        with torch.no_grad():
            found = layer(torch.tensor(x).to(kept), torch_part.LayerStep(batch, None, None), LayerMemory())
        return found.double().numpy()

    return call


LAYERS = {"jax": jax_layer, "torch": torch_layer}


def build(
    form: str, name: str, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32", of_8_bits: tuple[str, ...] = ()
) -> tuple[Layer, Any, Arrays]:
    config, arrays = make(name)
    arrays = in_8_bits(arrays, *of_8_bits)
    backend, _, own = form.partition(" ")
    layer = LAYERS[backend](own, config, arrays, dtype, monkeypatch)
    return layer, config, arrays


@pytest.mark.parametrize("form", JAX_FORMS + TORCH_FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_the_weighted_sum_of_its_experts(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, config, arrays = build(form, name, monkeypatch)
    for tokens in (1, 7, 40):
        x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)
        np.testing.assert_allclose(layer(x, 0), expected(config, arrays, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", JAX_FORMS + TORCH_FORMS)
@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("down",)], ids=["all", "down"])
def test_8_bit_matrices_are_multiplied_by_their_scales(
    form: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert has its own, in every product."""
    layer, config, arrays = build(form, "softmax of those chosen", monkeypatch, of_8_bits=parts)
    x = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)
    np.testing.assert_allclose(layer(x, 0), expected(config, arrays, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", JAX_FORMS + TORCH_FORMS[:2])  # interpreted kernels are slow
def test_other_tokens_and_padding_change_no_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of a fixed size. Padding may be anything, chooses no expert, and gives 0."""
    layers = [build(form, name, monkeypatch)[0] for name in ("renormalised", "softmax of those chosen")]

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        size=st.sampled_from([4, 24]),
        padding=st.integers(0, 2),
        alike=st.sampled_from([None, 0, 1]),
    )
    def check(seed: int, size: int, padding: int, alike: int | None) -> None:
        """`alike`: the token of which all others are copies, so that they choose only its experts or none of them."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((size, HIDDEN)).astype(np.float32)
        others = rng.standard_normal((size, HIDDEN)).astype(np.float32) * rng.choice([0.01, 1.0, 30.0])
        others[0] = x[0]
        if alike is not None:
            others[1:] = others[alike]
        if padding:
            others[-padding:] = np.nan
        for layer in layers:
            found = layer(others, padding)
            assert np.array_equal(layer(x, 0)[0], found[0])
            assert not found[size - padding :].any()

    check()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_each_expert_are_counted(name: str) -> None:
    """In sums of more than 32 bits, whose low words overflow. Padding is not counted."""
    config, arrays = make(name)
    logits = np.random.default_rng(1).standard_normal((40, EXPERTS)).astype(np.float32)
    padding = np.arange(40) >= 33
    correction = arrays.get("correction", np.zeros(EXPERTS, np.float32))
    chosen = [choose(config, row.astype(np.float64), correction)[0] for row in logits[~padding]]
    wanted = np.bincount(np.concatenate(chosen), minlength=EXPERTS)

    choice = jax_experts.choose_experts(config, *map(jnp.asarray, (logits, correction, padding)))
    counted = choice.tokens_of(EXPERTS)
    assert counted.tolist() == wanted.tolist()
    before = np.array([2**32 - 3, 2**32 - 1, 5, 0, 1, 2, 3, 4], np.uint64) + np.uint64(7 * 2**32)
    words = jnp.asarray(np.stack([before % 2**32, before >> np.uint64(32)]).astype(np.uint32))
    low, high = np.asarray(jax.jit(jax_experts._add_to_words)(words, counted)).astype(np.uint64)
    assert ((high << np.uint64(32)) + low).tolist() == (before.astype(np.int64) + wanted).tolist()

    found = torch_experts.choose_experts(config, *map(torch.from_numpy, (logits, correction, padding)))
    assert found.tokens_of(EXPERTS).tolist() == wanted.tolist()


@pytest.mark.parametrize("form", ["jax tiles", "torch tiles"])
def test_among_equal_scores_the_lower_expert_is_chosen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, arrays = make("softmax")
    arrays["router"][[1, 2, 5, 6]] = arrays["router"][5]
    config = ExpertsConfig(num_experts=EXPERTS, chosen=2, size=INNER)
    backend, _, own = form.partition(" ")
    layer = LAYERS[backend](own, config, arrays, "float32", monkeypatch)
    x = np.tile(arrays["router"][5] * 3, (5, 1)).astype(np.float32)
    assert choose(config, arrays["router"].astype(np.float64) @ x[0], np.zeros(EXPERTS))[0] == [1, 2]
    np.testing.assert_allclose(layer(x, 0), expected(config, arrays, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", [*JAX_FORMS, *TORCH_FORMS])
def test_bfloat16_is_within_its_rounding(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, config, arrays = build(form, "softmax of those chosen", monkeypatch, dtype="bfloat16")
    exact = {name: jnp.asarray(array, jnp.bfloat16).astype(jnp.float32) for name, array in arrays.items()}
    exact |= {name: arrays[name] for name in ("router", "router_bias")}
    x = np.random.default_rng(3).standard_normal((30, HIDDEN))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    wanted = expected(config, {name: np.asarray(array) for name, array in exact.items()}, x)
    assert np.abs(layer(x, 0) - wanted).max() < 2.0**-6 * np.abs(wanted).max()


def test_a_tpu_reads_all_experts_where_a_step_needs_nearly_all() -> None:
    def of(tokens: int, *, for_tpu: bool = True) -> products.ExpertProducts:
        config = ExpertsConfig(num_experts=128, chosen=8, size=768)
        return ExpertProducts.of(config, tokens, for_tpu=for_tpu)

    def of_widened(tokens: int) -> products.ExpertProducts:
        return ExpertProducts.of(ExpertsConfig(num_experts=128, chosen=8, size=768), tokens, for_tpu=True, widened=True)

    found = [of(tokens) for tokens in (1, 8, 64, 256, 512)]
    ragged, every = ExpertProducts.RAGGED, ExpertProducts.ALL
    assert found == [ragged, ragged, every, every, ragged]
    assert of(64, for_tpu=False) is ExpertProducts.TILES
    assert [of_widened(tokens) for tokens in (1, 512, 4096, 8192)] == [every, every, every, ragged]


def test_all_experts_of_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 7 rows at a time; the last part has two that are not needed."""
    layer, config, arrays = build("jax all experts", "renormalised", monkeypatch, of_8_bits=("down",))
    x = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)
    whole = layer(x, 1)
    monkeypatch.setattr(products, "_ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(layer(x, 0), expected(config, arrays, x), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(layer(x, 1), whole, rtol=2e-5, atol=2e-5)


def test_grouped_products_of_8_bits_equal_those_of_widened_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for chips that support them."""
    layer, *_ = build("jax ragged", "renormalised", monkeypatch, "bfloat16", of_8_bits=("gate", "up", "down"))
    x = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)
    widened = layer(x, 0)
    monkeypatch.setattr(products, "_reads", lambda kernel: True)
    assert np.array_equal(layer(x, 0), widened)

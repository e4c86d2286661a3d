"""Attention by Triton's kernels with the same bits for a token in any step, in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.int8_steps import int8_step
from helpers.torch_attention_steps import Case, Step, make_step
from helpers.triton_attention import HOPPER
from helpers.triton_interpreter import shuffled_programs

from torch_backend.attention.fixed import ChunksOnly
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.attention.triton import TritonAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kernels import extend_plan
from torch_backend.kernels.chip import Chip

LARGE = Chip(capability=90, processors=40)
"""A chip that few blocks leave idle, so that each split of their keys is a work item."""

BLOCKS, SPLITS = ChunksOnly(TritonAttention(HOPPER)), ChunksOnly(TritonAttention(LARGE))

LENGTH, NEW = 150, 40
"""Of a sequence in pages; its last tokens are computed in different steps."""

PIECES = tuple[tuple[int, int], ...]
"""Sequences of a step, as the first of the `NEW` tokens that each computes, and their number."""


@dataclass(frozen=True)
class Layer:
    """A kind of layer: what of `Case` differs, and the dtype of values next to int8 keys."""

    case: dict[str, object]
    int8_values: torch.dtype | None = None

    def step(self) -> Step:
        """The `NEW` tokens as one chunk, after a short sequence whose pages lie in between."""
        lens = {"kv_lens": (9, LENGTH), "query_lens": (1, NEW), "num_decode": 1, "kv_heads": 1, "page_size": 16}
        case = Case(**({"dtype": torch.bfloat16} | lens | self.case))  # type: ignore[arg-type]
        return int8_step(case, values=self.int8_values, bias=3.0).step if self.int8_values else make_step(case)


LAYERS = {
    "float32": Layer({"dtype": torch.float32, "group": 1}),
    "float8, sinks": Layer({"kv_dtype": torch.float8_e4m3fn, "sinks": True}),
    "int8, window, sinks": Layer({"window": 70, "sinks": True}, torch.int8),
    "soft cap": Layer({"soft_cap": 1.5, "group": 3}),
    "wide heads": Layer({"head_dim": 256, "group": 1, "window": 70}),
}

DRAFTED = tuple((token, 1) for token in range(NEW - 4, NEW))
STEPS: dict[str, PIECES] = {
    "chunks": ((0, 1), (1, 26), (27, 13)),
    "decoded": ((NEW - 1, 1),),
    "drafted": DRAFTED,
    "decoded with others": ((3, 1), (30, 1), (NEW - 1, 1), (0, 1)),
}


def of_pieces(step: Step, pieces: PIECES, padding: int = 0) -> Step:
    """A step that computes pieces of the second sequence of `step`, each by a sequence over the same pages; those of
    one token are decode rows if all are. `padding`: sequences of one token and no keys."""
    batch = step.batch
    decoded = all(count == 1 for _, count in pieces)
    tokens = torch.cat([torch.arange(1 + first, 1 + first + count) for first, count in pieces])
    tokens = torch.cat([tokens, torch.zeros(padding, dtype=torch.int64)])
    lens = [LENGTH - NEW + first + count for first, count in pieces] + [0] * padding
    starts = torch.tensor([0, *(count for _, count in pieces), *[1] * padding]).cumsum(0).int()
    table = torch.cat([batch.page_table[1:].repeat(len(pieces), 1), batch.page_table[:1].repeat(padding, 1) * 0])
    changed = ForwardBatch(
        batch.tokens[tokens],
        batch.positions[tokens],
        batch.write_slots[tokens],
        table,
        torch.tensor(lens, dtype=torch.int32),
        starts,
        len(lens) if decoded else 0,
    )
    return replace(step, queries=step.queries[tokens], batch=changed, expected=step.expected[tokens.numpy()])


def attend(step: Step, attention: AttentionImplementation) -> torch.Tensor:
    return attention.prepare(step.batch)(step.queries, step.kv, step.options)


def differing(step: Step, whole: torch.Tensor, of: AttentionImplementation) -> list[str]:
    """The steps in which a token has other bits than in one chunk, whose outputs are `whole`."""
    return [
        name
        for name, pieces in STEPS.items()
        if not torch.equal(
            attend(of_pieces(step, pieces), of),
            torch.cat([whole[1 + first : 1 + first + count] for first, count in pieces]),
        )
    ]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tile of keys or a few, so that the sequence has several."""
    monkeypatch.setattr(extend_plan, "SPLIT", 64)


@pytest.mark.parametrize(
    ("layer", "pieces_by"),
    [
        ("float32", BLOCKS),
        ("float32", SPLITS),
        ("float8, sinks", SPLITS),
        ("int8, window, sinks", SPLITS),
        ("soft cap", BLOCKS),
        ("wide heads", BLOCKS),
    ],
)
def test_a_token_has_the_same_bits_in_any_step(layer: str, pieces_by: ChunksOnly) -> None:
    """Decoded, drafted, or in chunks of any size; splits of keys in a loop or as work items, in any order."""
    step = LAYERS[layer].step()
    whole, expected = attend(step, BLOCKS), torch.from_numpy(step.expected)
    assert (whole.double() - expected).abs().max() <= 2**-6 * expected.abs().max()
    with shuffled_programs(1):
        assert differing(step, whole, pieces_by) == []


@pytest.mark.parametrize(("layer", "fixed"), [("soft cap", SPLITS), ("int8, window, sinks", BLOCKS)])
def test_padding_of_a_captured_decode_step_is_zero(layer: str, fixed: ChunksOnly) -> None:
    """The page that its table names holds NaN."""
    step = LAYERS[layer].step()
    found = attend(of_pieces(step, DRAFTED, padding=3), fixed)
    assert torch.equal(found[: len(DRAFTED)], attend(of_pieces(step, DRAFTED), BLOCKS))
    assert torch.equal(found[len(DRAFTED) :], torch.zeros_like(found[len(DRAFTED) :]))


def test_the_kernel_for_decode_rows_gives_other_bits() -> None:
    """The difference that these tests would see."""
    step = LAYERS["float32"].step()
    assert "decoded" in differing(step, attend(step, BLOCKS), TritonAttention(HOPPER))

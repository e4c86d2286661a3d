"""Messages between processes: every field survives the round trip, and invalid bytes are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from sglang_jax.architectures import CacheKind
from sglang_jax.runner.group import ORDERS, GiveUp, Leave, WarmUp
from sglang_jax.runner.group_listener import Answer, Hello
from sglang_jax.runner.plan import PoolSpec, RunnerSpec, StepPlan, StepResult
from sglang_jax.runner.wire import Codec, FrameError
from sglang_jax.sampling.params import SamplingParams

KINDS = (StepPlan, StepResult, RunnerSpec, WarmUp, Leave, GiveUp, Hello, Answer)
PLANS = Codec(StepPlan)

PLAIN: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    str: st.text(),
    bool: st.booleans(),
    type(None): st.none(),
}

PAGES = st.sampled_from([1, 2, 8])

POOLS = st.one_of(
    st.builds(PoolSpec, st.text(), st.just(CacheKind.FULL), st.integers(1, 2**31 - 1), PAGES, draft=st.booleans()),
    st.builds(PoolSpec, st.text(), st.just(CacheKind.WINDOW), st.integers(1, 9), PAGES, window=st.integers(1, 9)),
    st.builds(PoolSpec, st.text(), st.just(CacheKind.STATE), st.integers(1, 9), PAGES),
)

# Types that validate their values, with values that they accept.
CHECKED: dict[type, st.SearchStrategy[Any]] = {
    SamplingParams: st.builds(
        SamplingParams,
        max_new_tokens=st.none() | st.integers(10, 2**31 - 1),
        min_new_tokens=st.integers(0, 10),
        temperature=st.floats(0, 100),
        top_k=st.just(-1) | st.integers(1, 2**31 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
        stop=st.lists(st.text(min_size=1), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
        ignore_eos=st.booleans(),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    ),
    tuple[PoolSpec, ...]: st.lists(POOLS, max_size=2, unique_by=lambda pool: pool.name).map(tuple),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in CHECKED:
        return CHECKED[kind]
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return st.builds(kind, **{name: values(one) for name, one in get_type_hints(kind).items()})
    if origin is np.ndarray:
        shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3)
        return arrays.arrays(get_args(inner[1])[0], shapes)
    if origin in (Union, UnionType):
        return st.one_of([values(one) for one in inner])
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    return PLAIN[kind]


def full(kind: Any) -> Any:
    """A small value of an annotated type with every field set."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is SamplingParams:
        return SamplingParams(stop=("a",), logit_bias={7: 1.0}, stop_token_ids=(3,), seed=2**62)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**{name: full(one) for name, one in get_type_hints(kind).items()})
    if origin is np.ndarray:
        return np.ones(2, get_args(inner[1])[0])
    if origin in (Union, UnionType):
        return full(inner[0])
    if origin is tuple:
        return tuple(full(one) for one in inner if one is not Ellipsis)
    return kind(1)


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, and of equal types; sequences and mappings element by element."""
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, str):
        return type(one) is type(other) and one == other
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return same(list(one.items()), list(other.items()))
    return type(one) is type(other) and np.array_equal(one, other, equal_nan=isinstance(one, float))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_field_survives_the_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    codec = ORDERS if kind in (StepPlan, WarmUp, Leave, GiveUp) else Codec(kind)
    assert same(codec.decode(codec.encode(message)), message)


@dataclass(frozen=True)
class Inner:
    words: NDArray[np.uint8] | None


@dataclass(frozen=True)
class Later:
    """A future field of a plan: nothing in the codec names fields."""

    masks: tuple[Inner, ...]
    table: Mapping[int, float]
    shapes: tuple[tuple[int, int], ...] = ()


def test_future_fields_are_sent_too() -> None:
    codec = Codec(Later)
    message = Later((Inner(np.arange(6, dtype=np.uint8).reshape(2, 3)), Inner(None)), {7: 0.5}, ((1, 2),))
    assert same(codec.decode(codec.encode(message)), message)


def test_numpy_numbers_are_sent_as_numbers() -> None:
    spec = RunnerSpec((), np.int32(4), np.int64(5), 6, 7)  # type: ignore[arg-type]
    codec = Codec(RunnerSpec)
    assert codec.decode(codec.encode(spec)) == RunnerSpec((), 4, 5, 6, 7)


def test_decoded_arrays_own_their_memory_and_are_read_only() -> None:
    codec = Codec(Inner)
    sent = np.arange(4, dtype=np.uint8)
    data = bytearray(codec.encode(Inner(sent)))
    words = codec.decode(data).words
    assert words is not None
    sent[:] = 9
    data[:] = bytes(len(data))
    assert words.tolist() == [0, 1, 2, 3]
    assert not words.flags.writeable


def test_other_objects_are_not_sent() -> None:
    with pytest.raises(NotImplementedError, match="a object cannot be sent"):
        Codec(GiveUp).encode(GiveUp(object()))  # type: ignore[arg-type]


def test_a_frame_that_is_too_short_or_too_long_is_refused() -> None:
    data = PLANS.encode(full(StepPlan))
    for length in range(len(data)):
        with pytest.raises(FrameError, match=f"^{length} bytes that are not a message of StepPlan: "):
            PLANS.decode(data[:length])
    with pytest.raises(FrameError, match="trailing characters"):
        PLANS.decode(data + b"\0")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(message=values(StepPlan), data=st.data())
def test_corrupted_bytes_decode_to_a_plan_or_are_refused(message: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(PLANS.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = PLANS.decode(bytes(frame))
    except FrameError:
        return
    assert type(found) is StepPlan
    assert found.rows.dtype == np.int32


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        PLANS.decode(data)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (["<i8", [1], bytes(8)], "an array of '<i8', expected '<i4'"),
        (["|O", [1], bytes(8)], "an array of '|O', expected '<i4'"),
        (["<i4", [3], bytes(8)], "buffer is too small"),
        (["<i4", [1], bytes(8)], r"an array of shape \[1\] in 8 bytes"),
        (["<i4", [-2, -1], bytes(8)], "negative dimensions"),
        (["<i4", [2**63], b""], "dimension"),
        (["<i4", 2, bytes(8)], "its dtype, its shape and its bytes"),
        (["<i4", [2], "12345678"], "its dtype, its shape and its bytes"),
        (["<i4", [2]], "not enough values"),
        ([1, 2], "not enough values"),
        (7, "cannot unpack"),
    ],
)
def test_an_array_has_the_type_and_shape_of_its_field(array: object, reason: str) -> None:
    kind = dataclasses.make_dataclass("One", [("one", NDArray[np.int32])])
    liar = dataclasses.make_dataclass("One", [("one", object)])
    with pytest.raises(FrameError, match=rf"{reason}.* - at `\$\.one`"):
        Codec(kind).decode(Codec(liar).encode(liar(array)))


def test_only_expected_kinds_of_messages_are_accepted() -> None:
    with pytest.raises(FrameError, match="a message named 'Leave', expected one of StepPlan"):
        PLANS.decode(ORDERS.encode(Leave()))
    missing = dataclasses.make_dataclass("GiveUp", [("cause", str)])
    with pytest.raises(FrameError, match="missing required field `reason`"):
        ORDERS.decode(Codec(missing).encode(missing("no memory")))


def test_forms_differ_where_fields_do() -> None:
    """Including fields of elements of a tuple in a field."""
    assert Codec(Later).form == Codec(Later).form
    grown = dataclasses.make_dataclass("Inner", [("words", NDArray[np.uint8]), ("bits", int)])
    later = dataclasses.make_dataclass("Later", [("masks", tuple[grown, ...]), ("table", int), ("shapes", int)])
    assert Codec(later).form != Codec(Later).form
    assert Codec(WarmUp, Leave).form != Codec(WarmUp).form

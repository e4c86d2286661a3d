"""Exact ranges of integers. The grammar library reads their bounds as floating-point numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

EXACT = 2**53
"""Floating-point numbers represent all integers up to this absolute value."""

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def has_wide_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is for integers and has a bound beyond `EXACT`."""
    types = schema.get("type")
    several = types if isinstance(types, list) else [types]
    if "integer" not in several or "number" in several:
        return False
    bounds = [schema[name] for name in BOUNDS if name in schema]
    return all(is_number(one) and abs(one) < math.inf for one in bounds) and any(abs(one) > EXACT for one in bounds)


def range_of(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the smallest and the largest integer that a schema's bounds allow; None for no bound."""
    exact = {
        name: Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))
        for name, value in schema.items()
        if name in BOUNDS
    }
    least = [math.ceil(exact["minimum"])] if "minimum" in exact else []
    least += [math.floor(exact["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in exact else []
    most = [math.floor(exact["maximum"])] if "maximum" in exact else []
    most += [math.ceil(exact["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in exact else []
    return max(least, default=None), min(most, default=None)


def round_to_float(number: float, *, up: bool) -> float:
    try:
        nearest = float(number)
    except OverflowError:
        return number
    if isinstance(number, float) or abs(number) <= EXACT or math.isinf(nearest):
        return number
    if int(nearest) != number and (nearest < number) == up:
        nearest = math.nextafter(nearest, math.inf if up else -math.inf)
    return int(nearest)


def range_regex(least: int | None, most: int | None) -> str:
    """Returns a regular expression of JSON's integers from `least` to `most` (None: unbounded), at least one."""
    parts = []
    if least is None or least < 0:
        nearest = 1 if most is None or most >= 0 else -most
        parts.append(f"-({_naturals(nearest, None if least is None else -least)})")
    if most is None or most >= 0:
        parts.append(_naturals(max(least or 0, 0), most))
    return "|".join(parts)


def _naturals(least: int, most: int | None) -> str:
    digits = len(str(least))
    if most is None:
        return f"{_same_length(str(least), '9' * digits)}|[1-9][0-9]{{{digits},}}"
    longest = len(str(most))
    if digits == longest:
        return _same_length(str(least), str(most))
    parts = [_same_length(str(least), "9" * digits)]
    if longest - digits > 1:
        parts.append(f"[1-9][0-9]{{{digits},{longest - 2}}}")
    return "|".join([*parts, _same_length("1" + "0" * (longest - 1), str(most))])


def _same_length(least: str, most: str) -> str:
    return "|".join(_branches(least, most))


def _branches(least: str, most: str) -> Iterator[str]:
    """Yields alternatives for the numbers between two texts of digits of the same length."""
    if not least:
        yield ""
        return
    first, last = int(least[0]), int(most[0])
    if first == last:
        rest = _same_length(least[1:], most[1:])
        yield f"{first}({rest})" if "|" in rest else f"{first}{rest}"
        return
    if least[1:].strip("0"):
        yield f"{first}({_same_length(least[1:], '9' * len(least[1:]))})"
        first += 1
    whole_last = not most[1:].strip("9")
    highest = last if whole_last else last - 1
    if first <= highest:
        yield f"[{first}-{highest}]" + (f"[0-9]{{{len(least) - 1}}}" if len(least) > 1 else "")
    if not whole_last:
        yield f"{last}({_same_length('0' * len(most[1:]), most[1:])})"

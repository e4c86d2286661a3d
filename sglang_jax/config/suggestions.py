"""Hints for unknown options and values: the nearest name, and what replaces it here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

from pydantic import BaseModel

from sglang_jax.config.choices import Choice
from sglang_jax.spellings import NEEDLESS, REFUSED, refused_value

MIN_SIMILARITY = 0.72
"""Minimum similarity of a suggested name, by `difflib`: one or two letters differ, or a word is missing."""

_MISSPELT = 0.85
"""Minimum similarity of another engine's name: higher, since the hint explains that name, and helps only if it was
meant."""

_AS_NEAR = 0.05
"""Names are suggested together if their similarities differ by at most this."""

_NEGATIONS = ("no_", "disable_")


def did_you_mean(
    wanted: str, known: Iterable[str], *, others: Iterable[str] = (), show: Callable[[str], str] = str
) -> str:
    """The hint that follows "there is no option `wanted`"; empty if no name is similar. If a name of another engine is
    the most similar, the hint says what replaces it here. A name that means the opposite is never suggested. `wanted`,
    `known`: names with underscores; `others`: keys of `NEEDLESS` and `REFUSED` that may be meant; `show`: formats a
    name in the hint."""
    ours = set(known)
    ratios = {
        name: SequenceMatcher(None, wanted, name).ratio()
        for name in {*ours, *others}
        if _is_negated(name) == _is_negated(wanted)
    }
    near = [name for name, ratio in ratios.items() if ratio >= (MIN_SIMILARITY if name in ours else _MISSPELT)]
    near.sort(key=lambda name: (-ratios[name], name not in ours, name))
    if not near:
        return ""
    if near[0] not in ours:
        became = f"has no effect: {NEEDLESS[near[0]].note}" if near[0] in NEEDLESS else f"is {REFUSED[near[0]].note}"
        return f"did you mean {show(near[0])}? That {became}"
    nearest = [show(name) for name in near if name in ours and ratios[name] >= ratios[near[0]] - _AS_NEAR]
    return f"did you mean {' or '.join(nearest)}?"


def value_not_implemented(model: type[BaseModel], field: str, value: object) -> str | None:
    """What replaces a value that other engines have for the option `field`; None for any other value."""
    kind = model.model_fields[field].annotation if field in model.model_fields else None
    if not isinstance(kind, type) or not issubclass(kind, Choice):
        return None
    return refused_value(kind.__name__, str(value))


def _is_negated(name: str) -> bool:
    negated = False
    while prefix := next((each for each in _NEGATIONS if name.startswith(each)), None):
        name, negated = name.removeprefix(prefix), not negated
    return negated

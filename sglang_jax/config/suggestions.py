"""What to say to somebody whose option or value there is not: the nearest name, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

from pydantic import BaseModel

from sglang_jax.config.choices import Choice
from sglang_jax.spellings import NEEDLESS, REFUSED
from sglang_jax.value_spellings import refused_value

LEAST_ALIKE = 0.72
"""Of a name that is suggested in place of another, by `difflib`: a letter or two apart, or a word shorter."""

_MISSPELT = 0.85
"""Of a name of other engines: what became of it answers nobody who did not mean it."""

_AS_NEAR = 0.05
"""A name that is less near than the nearest by more than this is not suggested with it."""

_NEGATIONS = ("no_", "disable_")


def did_you_mean(
    wanted: str, known: Iterable[str], *, others: Iterable[str] = (), show: Callable[[str], str] = str
) -> str:
    """The question that follows "there is no option `wanted`", or nothing where no name is near.

    Where one of `others` is nearest it is named with what became of it: a name of ours that is less near would answer
    something else. A name that means the opposite is never suggested.

    - `wanted`, `known`: names with underscores. `others`: those of `NEEDLESS` and `REFUSED` that may be meant.
    - `show`: how the answer writes a name.
    """
    ours = set(known)
    ratios = {
        name: SequenceMatcher(None, wanted, name).ratio()
        for name in {*ours, *others}
        if _is_negated(name) == _is_negated(wanted)
    }
    near = [name for name, ratio in ratios.items() if ratio >= (LEAST_ALIKE if name in ours else _MISSPELT)]
    near.sort(key=lambda name: (-ratios[name], name not in ours, name))
    if not near:
        return ""
    if near[0] not in ours:
        became = f"has no effect: {NEEDLESS[near[0]].note}" if near[0] in NEEDLESS else f"is {REFUSED[near[0]].note}"
        return f"did you mean {show(near[0])}? That {became}"
    nearest = [show(name) for name in near if name in ours and ratios[name] >= ratios[near[0]] - _AS_NEAR]
    return f"did you mean {' or '.join(nearest)}?"


def value_not_implemented(model: type[BaseModel], field: str, value: object) -> str | None:
    """What became of a value that other engines have for the option `field`, if it is one."""
    kind = model.model_fields[field].annotation if field in model.model_fields else None
    if not isinstance(kind, type) or not issubclass(kind, Choice):
        return None
    return refused_value(kind.__name__, str(value))


def _is_negated(name: str) -> bool:
    negated = False
    while prefix := next((each for each in _NEGATIONS if name.startswith(each)), None):
        name, negated = name.removeprefix(prefix), not negated
    return negated

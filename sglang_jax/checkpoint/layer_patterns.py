"""Layers as quantisers name them: by name, by class, by `re:` pattern, or by a name with `*`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.errors import CheckpointError, shown

_PREFIX = "re:"
_MOST_PATTERNS = 64
_MOST_WILDCARDS = 1024
_MOST_CHARACTERS = 512
_MOST_REPEATS = 5
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"[*+{]")


@dataclass(frozen=True, slots=True)
class LayerPatterns:
    """Layers by `names`, among which may be classes, by `modules` that have layers in them or are layers, and by
    patterns that match the beginning of a name."""

    names: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def match(self, layer: str, layer_class: str) -> bool:
        """Whether a layer of a class of torch is one of them."""
        if layer in self.names or layer_class in self.names:
            return True
        if self.modules and not self.modules.isdisjoint(accumulate(layer.split("."), "{}.{}".format)):
            return True
        return any(each.match(layer) for each in self.patterns)


NO_LAYERS = LayerPatterns()


def is_pattern(text: str) -> bool:
    """Whether compressed-tensors takes a text for a pattern, and not for a name or a class."""
    return text.startswith(_PREFIX)


def compiled(fields: JsonFields, name: str, texts: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """The `re:` patterns among the texts of a field, in the order of texts.

    **Raises:** `CheckpointError` for one that is not a regular expression, and for ones that could take very long: a
    checkpoint's files may come from anywhere.
    """
    found = {text: text.removeprefix(_PREFIX) for text in texts if is_pattern(text)}
    if len(found) > _MOST_PATTERNS:
        raise CheckpointError(
            f"{fields.file}: {fields.within}{name} has {len(found)} patterns, it may have {_MOST_PATTERNS}"
        )
    return {text: _compile(fields, name, pattern) for text, pattern in found.items()}


def wildcards(fields: JsonFields, name: str) -> LayerPatterns:
    """The modules in a field, in whose names `*` stands for anything: as ModelOpt has them.

    **Raises:** `CheckpointError` for very many with a `*`.
    """
    texts = fields.strings(name) or ()
    with_star = [text for text in texts if "*" in text]
    if len(with_star) > _MOST_WILDCARDS:
        raise CheckpointError(
            f"{fields.file}: {fields.within}{name} has {len(with_star)} names with *, it may have {_MOST_WILDCARDS}"
        )
    patterns = (re.compile(fnmatch.translate(each)) for text in with_star for each in (text, f"{text}.*"))
    return LayerPatterns(modules=frozenset(text for text in texts if "*" not in text), patterns=tuple(patterns))


def _compile(fields: JsonFields, name: str, pattern: str) -> re.Pattern[str]:
    where = f"{fields.file}: {fields.within}{name} has the pattern {shown(pattern)}"
    if len(pattern) > _MOST_CHARACTERS or len(_REPEAT.findall(pattern)) > _MOST_REPEATS:
        raise CheckpointError(
            f"{where}; patterns may have {_MOST_CHARACTERS} characters and {_MOST_REPEATS} repetitions"
        )
    if _REPEATED_GROUP.search(pattern):
        raise CheckpointError(f"{where}, which repeats a group; write it without")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}, which is not a regular expression: {error}") from error

"""Sets of layers as quantisation tools write them: names, torch classes, `re:` patterns, and names with `*`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.errors import CheckpointError, quote

_PREFIX = "re:"
_MAX_PATTERNS = 64
_MAX_WILDCARDS = 1024
_MAX_CHARACTERS = 512
_MAX_REPEATS = 5
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"[*+{]")


@dataclass(frozen=True, slots=True)
class LayerPatterns:
    """A set of layers: `names` of layers or classes, `modules` (layers, or modules that contain layers), and
    `patterns`, which match at the start of a name."""

    names: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def match(self, layer: str, layer_class: str) -> bool:
        if layer in self.names or layer_class in self.names:
            return True
        if self.modules and not self.modules.isdisjoint(accumulate(layer.split("."), "{}.{}".format)):
            return True
        return any(each.match(layer) for each in self.patterns)


NO_LAYERS = LayerPatterns()


def is_pattern(text: str) -> bool:
    """Whether compressed-tensors reads a text as a pattern, not as a name or class."""
    return text.startswith(_PREFIX)


def compiled(fields: JsonFields, name: str, texts: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Compiles the `re:` patterns among the texts of a field, in order. Raises `CheckpointError` for an invalid
    pattern, or one that could take very long to match, because checkpoints may come from anyone."""
    found = {text: text.removeprefix(_PREFIX) for text in texts if is_pattern(text)}
    if len(found) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{fields.file}: {fields.within}{name} has {len(found)} patterns, it may have {_MAX_PATTERNS}"
        )
    return {text: _compile(fields, name, pattern) for text, pattern in found.items()}


def wildcards(fields: JsonFields, name: str) -> LayerPatterns:
    """The modules in a field of ModelOpt, in which `*` matches any text. Raises `CheckpointError` for more than
    `_MAX_WILDCARDS` with a `*`."""
    texts = fields.strings(name) or ()
    with_star = [text for text in texts if "*" in text]
    if len(with_star) > _MAX_WILDCARDS:
        raise CheckpointError(
            f"{fields.file}: {fields.within}{name} has {len(with_star)} names with *, it may have {_MAX_WILDCARDS}"
        )
    patterns = (re.compile(fnmatch.translate(each)) for text in with_star for each in (text, f"{text}.*"))
    return LayerPatterns(modules=frozenset(text for text in texts if "*" not in text), patterns=tuple(patterns))


def _compile(fields: JsonFields, name: str, pattern: str) -> re.Pattern[str]:
    where = f"{fields.file}: {fields.within}{name} has the pattern {quote(pattern)}"
    if len(pattern) > _MAX_CHARACTERS or len(_REPEAT.findall(pattern)) > _MAX_REPEATS:
        raise CheckpointError(f"{where}; patterns may have {_MAX_CHARACTERS} characters and {_MAX_REPEATS} repetitions")
    if _REPEATED_GROUP.search(pattern):
        raise CheckpointError(f"{where}, which repeats a group; write it without")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}, which is not a regular expression: {error}") from error

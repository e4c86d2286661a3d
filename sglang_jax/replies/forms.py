"""The words of the table of families: how calls of tools and reasoning are written.

A call is an opening, by which it is known, and parts that follow one another. What is read is a little more than what
is enforced (`Written`): models put blanks elsewhere and change the order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """This text.

    - `optional`: it may be missing, as what ends an output is no part of its text.
    - `ends`: it may be missing where the output ends.
    - `spaced`: white space may stand before it.
    """

    text: str
    optional: bool = False
    ends: bool = False
    spaced: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """White space of any length, none too."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tool."""


@dataclass(frozen=True, slots=True)
class UpTo:
    """What does not matter here, of `most` characters, and this text behind it."""

    text: str
    most: int = 64


@dataclass(frozen=True, slots=True)
class Arguments:
    """A JSON object: the arguments of the call whose name came before."""


@dataclass(frozen=True, slots=True)
class Calls:
    """A JSON object with `name`, and `arguments` or `parameters`; or a list of such objects."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments one by one: `begin`, a name, `named`, the value as bare text, `end`."""

    begin: str
    named: str
    end: str


Part = Literal | Space | Name | UpTo | Arguments | Calls | Parameters


@dataclass(frozen=True, slots=True)
class Written:
    """How a call is enforced: `begin`, in which `{name}` stands for the tool's name, the arguments, `end`.

    - `separator`: between two calls.
    - `before`, `after`: around all of them.
    - `single`: a reply of this family has one call at most.
    """

    begin: str
    end: str
    separator: str = ""
    before: str = ""
    after: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to write a call.

    - `opening`: what it is known by. Empty: a call may be the whole reply, or stand behind another and a `separator`
      of its family.
    - `begins`: what a call without an opening begins with.
    - `written`: None for what is read and never enforced.
    - `sign`: text that a chat template, or a special token, has if this is the form that its model was taught, where a
      family has several.
    """

    opening: str
    parts: tuple[Part, ...]
    written: Written | None = None
    sign: str = ""
    begins: tuple[str, ...] = ("{", "[")


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning stands between `begin` and `end`, before the answer.

    - `first`: the model reasons first, whether its prompt says so or not.
    - `anywhere`: it may also reason between two parts of its answer.
    - `then`: what stands between the reasoning and the answer; `answer`: what an answer of text begins with.
    - `silent`: further markers, which are nobody's text; `headers`: those of which only the ends are known.
    - `stops`: what ends the reasoning where its end is forgotten, and is not a part of it.
    """

    begin: str
    end: str
    first: bool = False
    anywhere: bool = False
    then: str = ""
    answer: str = ""
    silent: tuple[str, ...] = ()
    headers: tuple[CallForm, ...] = ()
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFamily:
    """How a family of models writes calls.

    - `separator`: may stand between calls whose opening is empty.
    - `silent`: markers around calls, which are nobody's text.
    - `starts_reply`: a call is the whole reply: no text stands before it.
    - `reasoning`: belongs to the family, whatever else is asked for.
    - `short_ids`: its chat template demands ids of nine letters and digits.
    """

    forms: tuple[CallForm, ...]
    separator: str = ""
    silent: tuple[str, ...] = ()
    starts_reply: bool = False
    reasoning: ReasoningForm | None = None
    short_ids: bool = False

    def enforced(self, signs: str) -> CallForm:
        """The form that a model writes whose chat template and special tokens, joined, are `signs`."""
        writable = [form for form in self.forms if form.written is not None]
        return next((form for form in writable if form.sign and form.sign in signs), writable[0])


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    - `parameters`: the JSON schema of its arguments; None where the client gave none.
    - `strict`: its arguments follow the schema to the letter.
    - `field`: where the client wrote the schema, for errors.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    field: str = "tools"


@dataclass(frozen=True, slots=True)
class ReplyLayout:
    """What one reply may be made of.

    - `tools`: those that may be called, by name; a call of another is text.
    - `silent`: markers that are shown to nobody.
    - `separate`: reasoning is told from the answer. Otherwise it is a part of the text, markers and all, and no call
      is looked for in it.
    - `most_calls`: what is called beyond is left out; None for all.
    - `required`: a call is demanded, so that, where calls are enforced, the arguments of each follow their schema.
    """

    reasoning: ReasoningForm | None = None
    forms: tuple[CallForm, ...] = ()
    separator: str = ""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    separate: bool = True
    most_calls: int | None = None
    required: bool = False

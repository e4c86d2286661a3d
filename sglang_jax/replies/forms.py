"""The vocabulary of the table of families: formats of tool calls and reasoning. A call is an opening that identifies
it, and a sequence of parts. The parser accepts a little more than the grammar enforces (`Written`), because models
change white space and the order of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """A fixed text. `optional`: it may be missing, because a token that ends an output is not a part of its text;
    `ends`: it may be missing at the end of the output; `spaced`: white space may precede it."""

    text: str
    optional: bool = False
    ends: bool = False
    spaced: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """White space of any length, or none."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tool."""


@dataclass(frozen=True, slots=True)
class UpTo:
    """At most `most` ignored characters, then this text."""

    text: str
    most: int = 64


@dataclass(frozen=True, slots=True)
class Arguments:
    """A JSON object: the arguments of the call whose name precedes it."""


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
    """The enforced format of a call: `begin`, with `{name}` for the tool's name; the arguments; `end`. `separator`:
    between two calls; `before`, `after`: around all calls; `single`: a reply has at most one call."""

    begin: str
    end: str
    separator: str = ""
    before: str = ""
    after: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to write a call.

    - `opening`: the text that identifies it. If empty, a call may be the whole reply, or follow another call and the
      family's `separator`; `begins`: possible starts of such a call.
    - `written`: None for a form that is only read, never enforced.
    - `sign`: if a family has several forms, a text in the chat template or special tokens of models that use this one.
    """

    opening: str
    parts: tuple[Part, ...]
    written: Written | None = None
    sign: str = ""
    begins: tuple[str, ...] = ("{", "[")


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning between `begin` and `end`, before the answer.

    - `first`: the model always reasons first, even if the prompt does not open the reasoning.
    - `anywhere`: it may also reason between two parts of its answer.
    - `then`: text between the reasoning and the answer; `answer`: the marker before a text answer.
    - `hidden`: further markers, which are not part of any text; `headers`: markers with variable text in them.
    - `stops`: texts that end the reasoning if its `end` is missing, and that are not a part of it.
    """

    begin: str
    end: str
    first: bool = False
    anywhere: bool = False
    then: str = ""
    answer: str = ""
    hidden: tuple[str, ...] = ()
    headers: tuple[CallForm, ...] = ()
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFamily:
    """The formats of a family of models for calls.

    - `separator`: may be between calls whose opening is empty.
    - `hidden`: markers around calls, which are not part of any text; `starts_reply`: no text precedes a call.
    - `reasoning`: the family's format of reasoning, if it always has the same.
    - `short_ids`: its chat template requires ids of nine letters and digits.
    """

    forms: tuple[CallForm, ...]
    separator: str = ""
    hidden: tuple[str, ...] = ()
    starts_reply: bool = False
    reasoning: ReasoningForm | None = None
    short_ids: bool = False

    def enforced(self, signs: str) -> CallForm:
        """Returns the form to enforce for a model. `signs`: its chat template and special tokens, joined."""
        writable = [form for form in self.forms if form.written is not None]
        return next((form for form in writable if form.sign and form.sign in signs), writable[0])


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters`: the JSON schema of its arguments, if any; `strict`: they must
    follow the schema exactly; `field`: the place of the schema in the client's request, for errors."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    field: str = "tools"


@dataclass(frozen=True, slots=True)
class ReplyLayout:
    """What one reply may contain.

    - `tools`: tools that may be called, by name; a call of another one is text.
    - `hidden`: markers that are not shown to clients.
    - `separate`: reasoning is separated from the answer. Otherwise it is a part of the text, with its markers, and is
      not searched for calls.
    - `max_calls`: maximum calls, further ones are dropped; None for no limit.
    - `required`: a call is required, so that, if calls are enforced, the arguments of each follow their schema.
    """

    reasoning: ReasoningForm | None = None
    forms: tuple[CallForm, ...] = ()
    separator: str = ""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    separate: bool = True
    max_calls: int | None = None
    required: bool = False

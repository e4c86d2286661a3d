"""Renders conversations with a checkpoint's chat template, as transformers' `apply_chat_template` does.

Which roles, tools and kinds of content a template supports is found out by trial renderings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from sglang_jax.checkpoint.chat_contents import ContentForms, in_parts, learn_contents
from sglang_jax.checkpoint.chat_roles import ChatRoles, learn_roles
from sglang_jax.checkpoint.chat_tools import PROBE, ToolSupport, learn_tools
from sglang_jax.checkpoint.control_tokens import ControlTokens
from sglang_jax.checkpoint.template_process import TEMPLATES, Rendering
from sglang_jax.errors import RequestError

Message = dict[str, object]
Tools = Sequence[Mapping[str, object]]


class TemplateFiles(Protocol):
    """The parts of a tokenizer that chats need, under transformers' names.

    - `chat_template`: the template, or several by name.
    - `special_tokens_map`: the tokens with a role, such as `bos_token`.
    """

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template for chats with these tools. Raises `ValueError` if there is none."""
        ...


class ChatTemplate:
    """A chat template and what it supports. Thread-safe; support of tools is found out at their first use.

    **Arguments:** `control`: tokens that messages cannot produce; `others`: special tokens that may stand for a role;
    `seconds`: time limit for rendering a conversation.
    """

    def __init__(
        self, files: TemplateFiles, control: ControlTokens, others: Sequence[str] = (), *, seconds: float
    ) -> None:
        self._files = files
        self._control = control
        self._seconds = seconds
        self._contents = {True: ContentForms(), False: ContentForms()}
        """By whether there are tools: these may have a separate template."""
        self._roles: ChatRoles | None = None
        self._tool_support: ToolSupport | None = None
        if files.chat_template is not None:
            self._learn(others)

    @property
    def text(self) -> str:
        """The template (the one for tools if there are two); empty if there is none."""
        return "" if self._files.chat_template is None else self._template(tools=True)

    def check_roles(self, roles: Sequence[object]) -> None:
        """Raises `ParameterError` for the first role that the template does not know, with the list of known ones."""
        if self._roles is not None:
            self._roles.check(roles)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Tools = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the text of a conversation. Control tokens spelt in messages, tools and variables are marked (see
        `ControlTokens`). If the template does not name the role `developer`, it is rendered as `system`.

        **Arguments:** `tools`: in OpenAI's format; if the template does not support tools, they are described in the
        system message. In `messages`, arguments of calls are objects or JSON text, and contents are texts or lists of
        parts; both are converted to what the template takes. `variables`: further variables of the template, with
        names accepted by `is_variable`.

        **Raises:** `RequestError` if there is no template, or it refuses the messages; `ParameterError` for an unknown
        role.
        """
        if self._roles is None:
            raise RequestError(
                "this model has no chat template; use the completions route, or start the server with --chat-template",
                param="messages",
            )
        self._roles.check([message.get("role") for message in messages])
        support = None
        if tools or any(message.get("tool_calls") for message in messages):
            support = self._tool_support = self._tool_support or learn_tools(self.render_probe)
        messages = [in_parts(message) for message in messages]
        conversation: list[dict[str, Any]] = [
            {
                **self._control.mark(dict(message) if support is None else support.decoded(message)),
                "role": self._roles.rendered_as(message["role"]),
            }
            for message in messages
        ]
        offered: Tools = [self._control.mark(dict(tool)) for tool in tools]
        if support is not None:
            conversation, offered = support.prepared(conversation, offered, has_system="system" in self._roles.known)
        return self._rendered(
            self._formed(conversation, offered),
            offered,
            add_generation_prompt=add_generation_prompt,
            variables=self._control.mark(dict(variables or {})),
        )

    def render_probe(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Renders messages with only their contents converted. Raises `RequestError` if the template refuses them."""
        return self._rendered(self._formed(messages, tools), tools)

    def _learn(self, others: Sequence[str]) -> None:
        try:
            template, with_tools = self._template(), self._template(tools=True)
        except RequestError:  # several templates, none for chats: each chat request gets the error
            template = with_tools = ""
        self._contents[False] = self._contents[True] = learn_contents(self._rendered)
        if with_tools != template:
            self._contents[True] = learn_contents(partial(self._rendered, tools=[PROBE]))
        self._roles = learn_roles(template, self.render_probe, others)

    def _formed(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        return [self._contents[bool(tools)].formed(message) for message in messages]

    def _template(self, *, tools: bool = False) -> str:
        """The template for chats, or for chats with tools if there are two. Raises `RequestError` if there is none."""
        try:
            # Only whether `tools` is empty matters.
            return self._files.get_chat_template(tools=[{}] if tools else None)
        except ValueError as error:  # several templates and none for chats
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        template = self._template(tools=bool(tools))
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message", param="messages")
        # As in transformers, None values are left out: templates would print them.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        names: dict[str, object] = {**(variables or {}), **self._files.special_tokens_map}
        return TEMPLATES.render(
            Rendering(template, given, names, list(tools) or None, add_generation_prompt, self._seconds)
        )

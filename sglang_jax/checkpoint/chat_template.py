"""The chat template of a checkpoint: from a conversation to a text, as transformers' `apply_chat_template` renders it.

A template does not say which roles, tools and forms of contents it takes, so each is found out by trying.
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
    """What is read of a tokenizer's files for chats, by the names that transformers has.

    - `chat_template`: the template, or several by their names.
    - `special_tokens_map`: the tokens that have a role, such as `bos_token`.
    """

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template of chats with these tools. Raises `ValueError` if there is none."""
        ...


class ChatTemplate:
    """Thread-safe: nothing changes after construction but what is known of tools, which is found out at their first
    use.

    **Arguments:** `control`: the tokens that messages cannot write; `others`: special tokens that may stand for a role;
    `seconds`: what a conversation may take to render.
    """

    def __init__(
        self, files: TemplateFiles, control: ControlTokens, others: Sequence[str] = (), *, seconds: float
    ) -> None:
        self._files = files
        self._control = control
        self._seconds = seconds
        self._contents = {True: ContentForms(), False: ContentForms()}
        """By whether there are tools: those may have a template of their own."""
        self._roles: ChatRoles | None = None
        self._tool_support: ToolSupport | None = None
        if files.chat_template is not None:
            self._learn(others)

    @property
    def text(self) -> str:
        """The template, that of chats with tools if there are two; empty if there is none."""
        return "" if self._files.chat_template is None else self._template(tools=True)

    def check_roles(self, roles: Sequence[object]) -> None:
        """Raises `ParameterError` for the first role of a conversation's messages that the template does not know,
        naming those that it knows."""
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
        """The text of a conversation. Control tokens that messages, tools and variables spell out are marked (see
        `ControlTokens`). Where the template does not name the role `developer`, such messages are rendered as the
        system's.

        **Arguments:** `tools`: in OpenAI's form; a template that shows none gets them in the system's words. Calls in
        `messages` have their arguments as objects or as JSON text, and contents are texts or lists of parts; the
        template gets them as it takes them.
        `variables`: what else the template is given, by names that `is_variable` lets pass.

        **Raises:** `RequestError` if there is no template, or it refuses the messages; `ParameterError` for a role
        that it does not know.
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
        """The text of messages with contents in the form that the template takes, and otherwise as they are. Raises
        `RequestError` if the template refuses them."""
        return self._rendered(self._formed(messages, tools), tools)

    def _learn(self, others: Sequence[str]) -> None:
        try:
            template, with_tools = self._template(), self._template(tools=True)
        except RequestError:  # several templates and none for chats, of which whoever sends one is told
            template = with_tools = ""
        self._contents[False] = self._contents[True] = learn_contents(self._rendered)
        if with_tools != template:
            self._contents[True] = learn_contents(partial(self._rendered, tools=[PROBE]))
        self._roles = learn_roles(template, self.render_probe, others)

    def _formed(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        return [self._contents[bool(tools)].formed(message) for message in messages]

    def _template(self, *, tools: bool = False) -> str:
        """The template of chats, or the one of chats with tools where there are two. Raises `RequestError`."""
        try:
            # Of `tools` it looks only whether there are any.
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
        # transformers leaves out what is None, which templates would write as it is.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        names: dict[str, object] = {**(variables or {}), **self._files.special_tokens_map}
        return TEMPLATES.render(
            Rendering(template, given, names, list(tools) or None, add_generation_prompt, self._seconds)
        )

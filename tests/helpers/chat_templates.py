"""Chat templates like those of common models, each reduced to its treatment of roles."""

from __future__ import annotations

from pathlib import Path

from helpers.engine_fakes import VOCAB_SIZE
from helpers.tiny_models import make_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint.tokenizer import Tokenizer

PRINTS_ANY = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
"""As ChatML: prints the role of any speaker."""

LLAMA = (
    "{% if messages[0]['role'] == 'system' %}{{ '<system>' + messages[0]['content'] }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'ipython' or m.role == 'tool' %}{{ '<ipython>' + m.content | tojson }}"
    "{% elif 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}"
    "{% endfor %}"
)
"""Prints any role as well, and has a separate name for tool messages."""

GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<' + role + '>' + m['content'] | trim }}"
    "{% endfor %}"
)
"""Refuses a system message, requires that roles alternate, and prints any other role in the assistant's place."""

MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{% set ns = namespace(index=0) %}"
    "{% for m in messages %}{% if not (m.role == 'tool' or m.tool_calls is defined) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (system if loop.last and system is defined else '') + m.content }}"
    "{% elif m.tool_calls is defined %}{{ '[CALLS]' + m.tool_calls[0].id }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs have length 9') }}{% endif %}"
    "{{ '[RESULTS]' + m.content }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
"""Shows the system message only with the last question of the user."""

DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ 'A:' + m.content }}{% endif %}{% endfor %}"
)
"""Leaves out all other roles silently."""

AFTER_CALL = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].tool_calls is not defined %}{{ raise_exception('no call before') }}{% endif %}"
    "{{ '<result>' + m.content }}"
    "{% elif m.role in ['developer', 'system', 'user', 'assistant'] %}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.arguments }}{% endfor %}"
    "{{ '<' + m.role + '>' + m.content }}"
    "{% endif %}{% endfor %}"
)
"""Takes a tool message only after a call, whose arguments are text; accepts a developer next to the system."""

AFTER_OBJECT_CALL = AFTER_CALL.replace(
    "{{ '<call>' + call.function.arguments }}",
    "{% for name, value in call.function.arguments.items() %}{{ name + value }}{% endfor %}",
)
"""The same, with arguments that are an object."""

SPELLED = (
    "{% for m in messages %}{% if m.role|lower == 'chatbot' or m['role'] not in [\"user\", 'narrator'] %}"
    "{{ m.content }}{% else %}{{ m.content + '...' }}{% endif %}{% endfor %}"
)
"""Has its own roles, named behind a filter and in a list."""

SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('First message must be system') }}{% endif %}"
    "{% if messages|length < 2 or messages[1].role != 'user' %}{{ raise_exception('second must be user') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
"""Requires a system message and then a user message."""

ANSWERED = (
    "{% if messages | map(attribute='role') | join != 'systemuserassistant' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
"""Takes only one conversation: a system, a user, an answer."""

RECURSES = (
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'tool' or m.content == 'loop' %}{{ f(1) }}"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
)
"""Never ends for a tool message, or for a message `loop`."""

TOKEN_OF_ROLE = (
    "{{ '<|im_start|>' }}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)
"""Prints the role as a token, as GLM-4 and Phi-3 do, between tokens for other purposes."""

TOKEN_BEFORE_ROLE = (
    "{{ '<|endoftext|>' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)
"""ChatML behind the BOS token."""

PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
"""Shows nothing of contents that are text."""


def byte_tokenizer(folder: Path, template: str | dict[str, str], special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """A token for each byte, few enough for the engine that echoes, with this chat template, and further special tokens
    that the engine does not know."""
    hugging_face: PreTrainedTokenizerFast = make_tiny_tokenizer(folder, VOCAB_SIZE - 1)
    hugging_face.chat_template = template
    hugging_face.add_tokens(list(special_tokens), special_tokens=True)
    return Tokenizer(hugging_face, "test")

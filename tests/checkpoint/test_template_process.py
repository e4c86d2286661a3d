"""Chat templates run in a process with limits: none exceeds them, and the next one is rendered."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sglang_jax.checkpoint.template_process import Rendering, TemplateProcess, TemplateProcesses
from sglang_jax.errors import RequestError

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def rendering(template: str, **more: Any) -> Rendering:
    return Rendering(template, MESSAGES, {}, **more)


CONVERSATION: list[dict[str, object]] = [
    {"role": "user", "content": "<b>é</b> & 'x'"},
    {"role": "assistant", "content": "yes", "reasoning": "why not"},
    {"role": "assistant", "content": "no", "thinking": "since", "reasoning_content": "so"},
    {"role": "user", "content": "bye"},
]
TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": None}}}]
ALIKE = {
    "messages": "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}",
    "blocks are trimmed": "a\n    {% if add_generation_prompt %}\n    b\n    {% endif %}\nc",
    "json": "{{ tools | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools[0] | tojson(sort_keys=true) }}",
    "json separators": "{{ tools | tojson(separators=(',', ':'), ensure_ascii=true) }}{{ messages[0] | tojson(true) }}",
    "reasoning": "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}]{% endfor %}",
    "variables": "{{ bos_token }}{{ enable_thinking }}{{ undefined_name }}{{ documents is none }}{{ tools is none }}",
    "namespaces": "{% set n = namespace(i=0, self=2) %}{% for _ in tools %}{% set n.i = 3 %}{% endfor %}{{ n.i }}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "dates": "{{ strftime_now('%Y') }}",
    "dicts": "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | list }}",
    "an exception": "{{ raise_exception('only ' ~ messages[0].role) }}",
    "a name in a namespace": "{% set n = namespace(_x=1) %}",
    "an attribute of Python": "{{ ''.__class__.__mro__ }}{{ messages.append.__self__ }}",
    "the class of dict": "{{ dict.__init__ }}{{ dict.mro() }}",
    "a change of what is given": "{{ messages.append(1) }}",
    "syntax": "{% for m in messages %}",
}
SEEN_BY_BOTH = {"a name in a namespace": "underscore", "the class of dict": "has no attribute 'mro'"}
"""Error texts that transformers and this project word differently: the words they share."""


def transformers_rendering(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    """The text, or the words of the error."""
    try:
        rendered: Any = render_jinja_template(
            conversations=[CONVERSATION], tools=TOOLS, chat_template=template, add_generation_prompt=True, **variables
        )
    except Exception as refused:  # any exception: ours must give the same words
        return "", str(refused)
    return rendered[0][0], ""


@pytest.mark.parametrize("name", ALIKE)
def test_templates_find_what_transformers_gives_them(templates: TemplateProcess, name: str) -> None:
    template, variables = ALIKE[name], {"bos_token": "<s>", "enable_thinking": False}
    theirs, refused = transformers_rendering(template, variables)
    if not refused:
        assert templates.render(Rendering(template, CONVERSATION, variables, TOOLS)) == theirs
        return
    said = SEEN_BY_BOTH.get(name, refused[:100])
    assert said in refused
    with pytest.raises(RequestError) as caught:
        templates.render(Rendering(template, CONVERSATION, variables, TOOLS))
    assert said in caught.value.message


def test_the_process_has_no_transformers() -> None:
    """Importing it would dominate the process's start time."""
    worker = Path(sys.modules[TemplateProcess.__module__].__file__ or "").with_name("template_worker.py")
    program = f"import runpy, sys; runpy.run_path({str(worker)!r}, run_name='x'); print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "False\n"


LARGE = (
    "{{ 'a' * 3000000000 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a' | indent(9999999999) }}",
    "{{ [1] | batch(9999999999, 'x') | list }}",
    "{{ (1).to_bytes(9999999999, 'big') }}",
    "{{ {} | tojson(indent=9999999999) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 100000) }}",
    "{% set all = namespace(text='a') %}{% for i in range(99) %}{% set all.text = all.text ~ all.text %}{% endfor %}",
)


@pytest.mark.parametrize("template", LARGE)
def test_an_instruction_that_takes_gigabytes_is_refused(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template exceeded its memory limit on 1 messages") as caught:
        templates.render(rendering(template))
    assert (caught.value.status, caught.value.param) == (400, "messages")


ENDLESS = ("{{ 7 ** 99999999 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_computation_is_refused(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match=r"took more than 0\.2 s of processor time on 1 messages, and was stopped"):
        templates.render(rendering(template, seconds=0.2))
    assert templates.render(rendering("{{ messages[0].content }}!")) == "hi!"


def test_a_text_of_too_many_characters_is_refused(templates: TemplateProcess) -> None:
    with pytest.raises(RequestError, match=r"produced 17000000 characters \(the limit is 16777216\)"):
        templates.render(rendering("{{ 'a' * 17000000 }}"))


def test_the_templates_own_error_is_reported(templates: TemplateProcess) -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages: no such thing"):
        templates.render(rendering("{{ raise_exception('no such thing') }}"))
    with pytest.raises(RequestError, match="a value that JSON cannot express"):
        templates.render(Rendering("a", [{"role": object()}], {}))


def test_any_text_round_trips(templates: TemplateProcess) -> None:
    odd = "東京 \ud800 \x00 \ufdd0 🙂" + "x" * 1_000_000
    number = 10**400
    made = Rendering("{{ messages[0].content }}{{ n }}", [{"role": "user", "content": odd}], {"n": number})
    assert templates.render(made) == odd + str(number)


def new_worker(templates: TemplateProcess) -> psutil.Process:
    """The process of `templates`: others of this process may have their own, or have left a dead one."""
    templates.close()
    before = {one.pid for one in psutil.Process().children()}
    templates.render(rendering("a"))
    (worker,) = [one for one in psutil.Process().children() if one.pid not in before]
    assert "template_worker" in " ".join(worker.cmdline())
    return worker


def test_a_dead_process_is_started_again(templates: TemplateProcess) -> None:
    new_worker(templates).kill()
    with pytest.raises(RequestError, match="crashed its process"):
        templates.render(rendering("a"))
    assert templates.render(rendering("b")) == "b"


def test_concurrent_threads_get_their_own_results(templates: TemplateProcess) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(20):
            said = templates.render(Rendering("{{ x }}", MESSAGES, {"x": f"{number}-{turn}"}))
            if said != f"{number}-{turn}":
                wrong.append(said)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_short_conversation_does_not_wait_for_a_long_one() -> None:
    templates = TemplateProcesses(2)
    try:
        for _ in range(3):  # one after the other: one process
            templates.render(rendering("a"))
        assert [one._process is not None for one in templates._all] == [True, False]
        with templates._all[0]._lock:  # it is rendering
            waiting = threading.Thread(target=templates.render, args=(rendering("a"),))
            waiting.start()
            until = time.monotonic() + 20
            while templates._free.qsize() == 2 and time.monotonic() < until:
                time.sleep(0.001)
            assert templates.render(rendering("b")) == "b"
        waiting.join(20)
        assert templates._free.qsize() == 2
        with pytest.raises(RequestError):
            templates.render(rendering("{{ raise_exception('no') }}"))
        assert templates._free.qsize() == 2
    finally:
        templates.close()


PARENT = """
import os, signal, psutil
from sglang_jax.checkpoint.template_process import TEMPLATES, Rendering
TEMPLATES.render(Rendering("a", [{}], {}))
print(psutil.Process().children()[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_its_parent() -> None:
    """Not by SIGTERM, which goes to all processes of a service: requests in flight must finish."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    end = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != "zombie" and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"


def test_the_process_ignores_sigterm(templates: TemplateProcess) -> None:
    worker = new_worker(templates)
    worker.send_signal(signal.SIGTERM)
    worker.send_signal(signal.SIGINT)
    assert templates.render(rendering("b")) == "b"
    assert worker.is_running()

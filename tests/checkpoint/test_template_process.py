"""Chat templates have a process with limits: no template takes more than it may, and each next one is rendered."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from sglang_jax.checkpoint.template_process import Rendering, TemplateProcess
from sglang_jax.errors import RequestError

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def rendering(template: str, **more: Any) -> Rendering:
    return Rendering(template, MESSAGES, {}, **more)


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
def test_one_instruction_that_takes_gigabytes(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template took more memory than it may on 1 messages") as caught:
        templates.render(rendering(template))
    assert (caught.value.status, caught.value.param) == (400, "messages")


ENDLESS = ("{{ 7 ** 99999999 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize("template", ENDLESS)
def test_one_that_computes_for_ever(templates: TemplateProcess, template: str) -> None:
    with pytest.raises(RequestError, match=r"computed for more than 0\.2 s on 1 messages, and was stopped"):
        templates.render(rendering(template, seconds=0.2))
    assert templates.render(rendering("{{ messages[0].content }}!")) == "hi!"


def test_a_text_of_too_many_characters(templates: TemplateProcess) -> None:
    with pytest.raises(RequestError, match="made 17000000 characters, of which 16777216 are the limit"):
        templates.render(rendering("{{ 'a' * 17000000 }}"))


def test_what_a_template_refuses(templates: TemplateProcess) -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages: no such thing"):
        templates.render(rendering("{{ raise_exception('no such thing') }}"))
    with pytest.raises(RequestError, match="a value that JSON cannot express"):
        templates.render(Rendering("a", [{"role": object()}], {}))


def test_any_text_comes_back(templates: TemplateProcess) -> None:
    odd = "東京 \ud800 \x00 \ufdd0 🙂" + "x" * 1_000_000
    number = 10**400
    made = Rendering("{{ messages[0].content }}{{ n }}", [{"role": "user", "content": odd}], {"n": number})
    assert templates.render(made) == odd + str(number)


def test_a_process_that_is_gone_is_started_again(templates: TemplateProcess) -> None:
    templates.render(rendering("a"))
    [worker] = [one for one in psutil.Process().children() if "template_worker" in " ".join(one.cmdline())][-1:]
    worker.kill()
    with pytest.raises(RequestError, match="ended its process"):
        templates.render(rendering("a"))
    assert templates.render(rendering("b")) == "b"


def test_threads_get_what_they_asked_for(templates: TemplateProcess) -> None:
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


PARENT = """
import os, signal, psutil
from sglang_jax.checkpoint.template_process import TEMPLATES, Rendering
TEMPLATES.render(Rendering("a", [{}], {}))
print(psutil.Process().children()[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_the_one_that_it_works_for() -> None:
    """Not by SIGTERM, which goes to all processes of a service: what is in flight is to be finished."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    end = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != "zombie" and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"


def test_a_signal_for_all_processes_is_not_its(templates: TemplateProcess) -> None:
    templates.render(rendering("a"))
    for one in psutil.Process().children():
        if "template_worker" in " ".join(one.cmdline()):
            one.send_signal(signal.SIGTERM)
            one.send_signal(signal.SIGINT)
    assert templates.render(rendering("b")) == "b"

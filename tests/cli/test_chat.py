"""`chat` on an engine that echoes its prompt byte by byte, and on one with scripted answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_jax.cli.chat import Conversation, Step, chat, lines_of_terminal
from sglang_jax.cli.main import run
from sglang_jax.errors import RequestError


@dataclass
class Script:
    """Scripted answers; an exception is raised after the answer's first word."""

    answers: list[str | BaseException]
    asked: list[list[dict[str, object]]]

    def __call__(self, messages: list[dict[str, object]]) -> Iterator[Any]:
        self.asked.append([dict(message) for message in messages])
        answer = self.answers.pop(0)
        text = ""
        for delta in ("well, ", answer):
            if isinstance(delta, BaseException):
                raise delta
            text += delta
            yield SimpleNamespace(text=text, delta_text=delta)


def converse(*answers: str | BaseException, system: str | None = None) -> tuple[Conversation, Script]:
    script = Script(list(answers), [])
    return Conversation(script, system), script


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def test_an_answer_is_part_of_the_next_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse("yes", "no", system="be brief")
    assert conversation.take("Is it?") is Step.NEXT
    assert conversation.take("Sure?") is Step.NEXT
    assert capsys.readouterr().out == "well, yes\nwell, no\n"
    system = {"role": "system", "content": "be brief"}
    assert script.asked == [[system, user("Is it?")], [system, user("Is it?"), assistant("well, yes"), user("Sure?")]]


def test_reset_and_a_new_system_message_start_over(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse("a", "b", "c", "d")
    conversation.take("one")
    for command, told, message in (
        ("/reset", "(a new conversation)\n", "two"),
        ("/system be kind", "(a new conversation, with this system message)\n", "three"),
        ("/system", "(a new conversation, without a system message)\n", "four"),
    ):
        capsys.readouterr()
        conversation.take(command)
        assert capsys.readouterr() == ("", told)
        conversation.take(message)
    kind = {"role": "system", "content": "be kind"}
    assert script.asked == [[user("one")], [user("two")], [kind, user("three")], [user("four")]]


def test_the_printed_part_of_an_interrupted_answer_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse(KeyboardInterrupt(), "b")
    conversation.take("one")
    conversation.take("two")
    assert capsys.readouterr().out == "well,  [stopped]\nwell, b\n"
    assert script.asked[1] == [user("one"), assistant("well, "), user("two")]


def test_a_message_interrupted_before_its_answer_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse("b")

    def stopped(messages: object) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    conversation.answer, answer = stopped, conversation.answer
    conversation.take("one")
    conversation.answer = answer
    conversation.take("two")
    assert capsys.readouterr().out == " [stopped]\nwell, b\n"
    assert script.asked == [[user("two")]]


def test_a_message_that_fails_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse(RequestError("the prompt is too long"), "b")
    conversation.take("one")
    conversation.take("two")
    captured = capsys.readouterr()
    assert captured.err == "Error: the prompt is too long (/reset starts a new conversation)\n"
    assert script.asked[1] == [user("two")]


def test_other_exceptions_are_raised() -> None:
    conversation, _ = converse(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        conversation.take("one")


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_words_that_end_the_chat(word: str) -> None:
    assert converse()[0].take(word) is Step.LEAVE


def test_unknown_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, script = converse()
    conversation.take("/rset")
    conversation.take("/help")
    captured = capsys.readouterr()
    assert captured.err.startswith("Unknown command /rset:")
    assert "/reset" in captured.out
    assert not script.asked


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        ("one\n two \n", ["one", "two"]),
        ('"""one\n two\n\nthree"""\nfour\n', ["one\n two\n\nthree", "four"]),
        ('"""\none\n"""\n', ["one"]),
        ('"""begun and not ended\n', []),
        ("", []),
    ],
)
def test_messages_of_one_and_of_several_lines(monkeypatch: pytest.MonkeyPatch, typed: str, lines: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert list(lines_of_terminal()) == lines


@pytest.mark.usefixtures("echo_engine")
def test_the_command_answers_piped_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\nnever\n"))
    assert run(chat, "chat", ["echo", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "system: be brief\nuser: hello\n\n"


@pytest.mark.usefixtures("echo_engine")
def test_bad_options_are_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(chat, "chat", ["--temperature", "-1"]) == 2
    assert "--temperature" in capsys.readouterr().err

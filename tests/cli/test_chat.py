"""fovea chat: later messages know the earlier ones, but not those that failed."""

from __future__ import annotations

import os
import pty
import re
import select
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image
from tests.cli.support import TIMEOUT_S, Caller
from tests.support.forks import Fork

FEW = ("--max-tokens", "5")
IN_A_TERMINAL = """
import os, sys
os.setsid()
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
sys.stdin = open(0, closefd=False)
from fovea.cli.main import main
sys.exit(main())
"""
"""Runs the command in a session whose terminal is the first argument, so that Ctrl-C reaches it."""


class Conversation:
    """A conversation with the engine itself, for comparison."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._messages: list[Message] = []

    def system(self, text: str) -> None:
        self._messages.append(Message("system", (TextPart(text),)))

    def say(self, text: str, *images: str) -> str:
        parts = [ImagePart(to_image(self._folder / name)) for name in images]
        self._messages.append(Message("user", (*parts, TextPart(text))))
        answer = self._engine.generate(ChatPrompt(tuple(self._messages)), max_tokens=5).text
        self._messages.append(Message("assistant", (TextPart(answer),)))
        return answer


@pytest.fixture
def talk(engine: Engine, folder: Path) -> Conversation:
    return Conversation(engine, folder)


@pytest.fixture
def chat(fovea: Caller, tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return chat(lines, words...), which runs a whole conversation in the folder of the images."""
    monkeypatch.chdir(folder)
    return lambda lines, *words: fovea("chat", *words, "--model", tiny, *FEW, stdin="\n".join(lines) + "\n")


def test_later_messages_know_the_earlier_ones(chat: Any, talk: Conversation) -> None:
    outcome = chat(["what is it?", "and now?", "", "why?"])
    answers = [talk.say(text) for text in ("what is it?", "and now?", "why?")]
    assert outcome.out == "".join(answer + "\n" for answer in answers)
    assert (outcome.code, outcome.err) == (0, "")


def test_images_go_with_the_next_message_only(chat: Any, talk: Conversation) -> None:
    outcome = chat(["first", "/image b.png", "second", "third"], "a.png")
    answers = [talk.say("first", "a.png"), talk.say("second", "b.png"), talk.say("third")]
    assert outcome.out == "".join(answer + "\n" for answer in answers)
    assert outcome.err.splitlines() == [
        "  a.png: 96x64, goes with the next message",
        "  b.png: 96x64, goes with the next message",
    ]


def test_several_images_at_once_and_quoted_names(chat: Any, folder: Path, talk: Conversation) -> None:
    (folder / "a.png").rename(folder / "my cat.png")
    (folder / "b.png").rename(folder / "it's.png")
    outcome = chat(["/image 'my cat.png' \"it's.png\"", "what?"])
    assert outcome.out == talk.say("what?", "my cat.png", "it's.png") + "\n"
    assert chat(["/image it's.png", "what?"]).err == "  it's.png: 96x64, goes with the next message\n"


def test_a_system_message_outlives_clear(chat: Any, talk: Conversation) -> None:
    talk.system("Be brief.")
    first = talk.say("what?")
    outcome = chat(["what?", "/image a.png", "/clear", "what?"], "--system", "Be brief.")
    assert outcome.out == f"{first}\n{first}\n"
    assert outcome.err.splitlines()[-1] == "  a new conversation"
    assert chat(["what?"]).out != first + "\n"


def test_a_failed_message_is_removed(chat: Any, talk: Conversation) -> None:
    first, second = talk.say("what?"), talk.say("and now?")
    for bad, message in (
        ("the red circle " * 2000, "fovea: the prompt has "),
        ("\udcff", "fovea: the question is not UTF-8 text"),
        ("/image none.png", "fovea: none.png cannot be read: No such file or directory"),
        ("/image no.png", "fovea: the data is not an image of an accepted type"),
        ("/image", "  /image needs a file"),
        ("/imag a.png", "/image FILE...  add images"),
    ):
        outcome = chat(["what?", bad, "and now?"])
        assert outcome.out == f"{first}\n{second}\n"
        assert outcome.err.startswith(message)
        assert len(outcome.err.splitlines()) == 1
        assert outcome.code == 0


def test_an_unreadable_first_image_does_not_end_the_chat(chat: Any, talk: Conversation) -> None:
    outcome = chat(["what?"], "none.png", "a.png")
    assert outcome.out == talk.say("what?", "a.png") + "\n"
    assert outcome.err.startswith("fovea: none.png cannot be read")


def test_figures_on_and_off(chat: Any) -> None:
    outcome = chat(["/stats", "what?", "/stats", "what?"])
    assert [line.split()[0] for line in outcome.err.splitlines()] == ["figures", "ms:", "tokens:", "figures"]
    assert len(outcome.out.splitlines()) >= 2


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_quitting(word: str, chat: Any, talk: Conversation) -> None:
    assert chat(["what?", word, "what?"]).out == talk.say("what?") + "\n"


def test_a_wrong_flag_is_an_error_before_a_model_is_loaded(fovea: Caller) -> None:
    outcome = fovea("chat", "--model", "./none", "--temperature", "-1")
    assert (outcome.code, outcome.error_line) == (2, "fovea: temperature must be in [0, 2], got -1.0")


class Terminal:
    """A process behind a terminal, whose output is read until it matches a pattern."""

    def __init__(self, *words: object) -> None:
        self._fd, other = pty.openpty()
        arguments = [os.ttyname(other), *map(str, words)]
        self.process = Fork(IN_A_TERMINAL, arguments, os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"})
        self._other = other
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str) -> str:
        """Return the output since the last call, up to a match."""
        while not (match := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self._fd], [], [], TIMEOUT_S)
            assert ready, self.shown
            self.shown += os.read(self._fd, 4096).decode(errors="replace")
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._other)


def test_in_a_terminal(tiny: Path, folder: Path) -> None:
    terminal = Terminal("chat", folder / "a.png", "--model", tiny, "--max-tokens", "3000")
    try:
        opening = terminal.read_until("> ")
        assert "/image FILE...  add images" in opening
        terminal.type("what is it?\r")
        terminal.read_until(r"what is it\?\r\n[^\r\n]{8}")
        terminal.type("\x03")
        terminal.read_until(r"\(stopped\)")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(TIMEOUT_S) == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.process.kill()
        terminal.process.communicate()
        terminal.close()

"""fovea completion: the real shells complete commands, flags, accepted values, models and files.

A line is typed into an interactive shell on a terminal, with a TAB at its end; then `echo ` is put before it
and Enter sends it, so that the shell prints the line that it has completed.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fovea.cli.completion import SHELLS, command_of, local_models
from tests.cli.support import Caller
from tests.support.programs import program

SHELL_COMMANDS = {"bash": ("bash", "--norc", "--noprofile", "-i"), "zsh": ("zsh", "-f", "-i")}
START = {
    "bash": "bind 'set enable-bracketed-paste off'; source <(fovea completion bash); PS1=; echo loa''ded\n",
    "zsh": "unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -d none; "
    "source <(fovea completion zsh); PS1=; echo loa''ded\n",
}
LINES = [
    ("fovea qua", "fovea quantize"),
    ("fovea caches --clear enc", "fovea caches --clear encoder"),
    ("fovea serve --dtype bf", "fovea serve --dtype bfloat16"),
    ("fovea serve hub/", "fovea serve hub/model"),
    ("fovea keys rev", "fovea keys revoke"),
    ("fovea caches --cl", "fovea caches --clear"),
    ("fovea keys new --file cat-p", "fovea keys new --file cat-picture.png"),
]
"""Lines, and what becomes of them. The last three are tried in bash alone; all shells ask the program."""
EVERYWHERE = LINES[:4]
TIMEOUT_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with `fovea` in bin, a picture, and a cache of the hub with one model."""
    script = tmp_path / "bin" / "fovea"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m fovea.cli.main "$@"\n')
    script.chmod(0o755)
    (tmp_path / "cat-picture.png").write_bytes(b"")
    (tmp_path / "cache" / "models--hub--model" / "snapshots").mkdir(parents=True)
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "TERM": "dumb",
        "HF_HUB_CACHE": str(place / "cache"), "XDG_CONFIG_HOME": str(place), "XDG_DATA_HOME": str(place),
        "PYTHONPATH": os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each),
    }  # fmt: skip


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, shell: str, place: Path) -> None:
        self.end, inner = pty.openpty()
        self.process = subprocess.Popen(
            SHELL_COMMANDS[shell], stdin=inner, stdout=inner, stderr=inner, cwd=place, env=environment(place),
            start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self.text = ""
        self.send(START[shell])
        self.until(r"loaded\r?\n")

    def send(self, text: str) -> None:
        os.write(self.end, text.encode())

    def until(self, pattern: str) -> str:
        """Read until the pattern occurs, and return the text of its first group."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, self.text
            if select.select([self.end], [], [], 0.1)[0]:
                self.text += os.read(self.end, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found[1] if found.lastindex else ""

    def completed(self, line: str) -> str:
        """Return what the shell makes of a line."""
        self.send(f"{line}\t\x01echo 'line<'\x05'>'\n")
        return self.until(r"line<\s*([^<>']*?) ?>\r?\n").strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, place: Path) -> None:
    program(shell)
    terminal = Terminal(shell, place)
    try:
        lines = LINES if shell == "bash" else EVERYWHERE
        assert [terminal.completed(line) for line, _ in lines] == [whole for _, whole in lines]
    finally:
        terminal.close()


def test_fish_completes(place: Path) -> None:
    """fish has a command of its own that prints completions. It shows the help of flags beside them."""
    program("fish")
    asked = "; ".join(f"complete -C {line!r}; echo end" for line, _ in EVERYWHERE)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"fovea completion fish | source; {asked}"],
        cwd=place, env=environment(place), capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = [part.strip().splitlines() for part in done.stdout.split("end\n")[:-1]]
    assert [answer[0].split("\t")[0] for answer in answers] == [
        whole.rpartition(" ")[2] for _, whole in EVERYWHERE
    ]
    assert "\twrite a quantized copy" in answers[0][0]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_calls_the_program(shell: str, fovea: Caller) -> None:
    outcome = fovea("completion", shell)
    assert (outcome.code, outcome.err) == (0, "")
    assert "_ARGCOMPLETE" in outcome.out


def test_an_unknown_shell(fovea: Caller) -> None:
    outcome = fovea("completion", "tcsh")
    assert outcome.code == 2
    assert "invalid choice: 'tcsh'" in outcome.err
    assert all(shell in outcome.err for shell in SHELLS)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("fovea", []), ("fovea ser", []), ("fovea serve", []), ("fovea serve ", ["serve"]), ("fovea --", []),
        ("fovea serve --max-queue 3 --d", ["serve"]),
    ],
)  # fmt: skip
def test_the_command_of_a_line(line: str, command: list[str]) -> None:
    assert command_of(line) == command


def test_local_models(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "cache"))
    (place / "cache" / "models--half--loaded").mkdir()
    assert local_models() == ["fovea-tiny", "hub/model"]

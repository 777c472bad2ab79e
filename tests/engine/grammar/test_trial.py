"""Forms that cost too much are refused by a process that the system ends, and others go on."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest, Unavailable
from fovea.engine.grammar.compiler import GrammarCompiler
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.trial import Trial, byte_vocabulary

EXPLODING = "start: A\nA: " + " & ".join(
    f"/(.|\\n){{0,{i}}}[a-{chr(98 + i % 20)}](.|\\n){{{i}}}/" for i in range(1, 40)
)
"""An intersection of expressions that takes the library more than a minute."""


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial()
    yield made
    made.close()


def test_a_form_that_takes_minutes_is_refused(trial: Trial) -> None:
    trial.check(AnswerFormat.regex("a"))
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="more than 0.2 seconds or 512 MiB"):
        trial.check(AnswerFormat.grammar(EXPLODING))
    assert time.process_time() - started < 0.1, "the work is not done here"
    helper = trial._process
    trial.check(AnswerFormat.json_object())
    assert trial._process is helper, "only the attempt was ended"


def test_the_reason_of_a_refusal_comes_back(trial: Trial) -> None:
    with pytest.raises(InvalidRequest, match="json at /items: .*not") as caught:
        trial.check(AnswerFormat.json_schema({"items": {"not": {}}}))
    assert caught.value.code == "unsupported_format"


def test_a_helper_that_died_is_replaced(trial: Trial) -> None:
    trial.check(AnswerFormat.regex("b"))
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    trial.check(AnswerFormat.regex("c"))


def test_a_server_with_many_connections_compiles_forms() -> None:
    """Forms failed with a 500 while a thousand connections were open: select() takes files up to 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this process may not open 1,200 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    trial = Trial()
    try:
        trial.check(AnswerFormat.choice(["yes", "no"]))
    finally:
        trial.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_process_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial()
    monkeypatch.setattr("sys.executable", "/none/python")
    with pytest.raises(Unavailable, match="cannot be checked"):
        trial.check(AnswerFormat.regex("a"))


def test_a_form_is_tried_again_after_a_failure_that_was_not_its_own() -> None:
    """Otherwise every later request with this form would get the old error."""
    calls = 0

    def vocabulary() -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("no memory")
        return byte_vocabulary()

    compiler = GrammarCompiler(vocabulary)  # type: ignore[arg-type]
    form = AnswerFormat.regex("[ab]+")
    with pytest.raises(OSError, match="no memory"):
        compiler.compile(form).result()
    assert compiler.compile(form).result() is compiler.compile(form).result()
    wrong = AnswerFormat.regex("(")
    assert compiler.compile(wrong) is compiler.compile(wrong), "a refusal is kept"
    compiler.close()
    with pytest.raises(Unavailable, match="stopped"):
        compiler.compile(AnswerFormat.regex("c"))


def test_the_helper_imports_nothing_from_the_folder_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file llguidance.py in the folder in which the server was started would have been executed."""
    (tmp_path / "llguidance.py").write_text("raise SystemExit('from the folder')")
    monkeypatch.chdir(tmp_path)
    trial = Trial()
    trial.check(AnswerFormat.regex("a"))
    trial.close()


def test_a_helper_that_ends_while_it_is_asked_is_asked_again(trial: Trial) -> None:
    """In the past the form was refused as too expensive, and the refusal kept."""
    trial.check(AnswerFormat.regex("d"))
    process = trial._process
    assert process is not None
    assert process.stdout is not None
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.2, process.kill).start()
    trial.check(AnswerFormat.regex("e"))
    assert trial._process is not process


@pytest.mark.parametrize("schema", [{"required": [{}]}, {"properties": 3}, {"enum": []}, {"items": [1]}])
def test_schemas_of_wrong_types_get_a_reason(trial: Trial, schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        trial.check(AnswerFormat.json_schema(schema))
    assert "seconds" not in caught.value.message


def test_many_optional_properties(trial: Trial) -> None:
    """260 were accepted, and every answer failed at its first token."""
    names = {f"p{i}": {"type": "string"} for i in range(600)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    form = AnswerFormat.json_schema(schema)
    trial.check(form)
    matcher = compile_format(form, byte_vocabulary())
    matcher.consume_tokens(list(b'{"p17":"x","p599":"y"}'))
    assert not matcher.get_error()
    assert matcher.is_accepting()

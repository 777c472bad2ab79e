"""fovea ask: the engine's answer on stdout, everything else on stderr, and one line for every error."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from fovea import Engine, VideoBudget
from fovea.cli.ask import stats_table, write_text
from fovea.core.types import Completion, StageTimings, Usage
from tests.cli.support import FORKED, SHORT, Caller, finish, interrupt, start
from tests.support.clips import clip
from tests.support.forks import Fork

pytestmark = pytest.mark.kernels

FEW = ("--max-tokens", "6")
LONG = ("--max-tokens", "3500")
IN_ASCII = "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
"""Gives standard output the encoding that it has with PYTHONIOENCODING=ascii."""


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_the_answer_is_that_of_the_engine(fovea: Caller, tiny: Path, engine: Engine, here: Path) -> None:
    for images in ([], ["a.png"], ["a.png", "b.png"], ["b.png", "a.png"]):
        outcome = fovea("ask", *images, "what is it?", "--model", tiny, *FEW)
        assert outcome.out == engine.generate("what is it?", images=images, max_tokens=6).text + "\n"
        assert (outcome.code, outcome.err) == (0, "")


def test_videos_and_images_are_distinguished_by_their_bytes(
    fovea: Caller, tiny: Path, engine: Engine, here: Path
) -> None:
    (here / "clip.bin").write_bytes(clip())
    outcome = fovea("ask", "clip.bin", "a.png", "what moved?", "--fps", "6", "--json", "--model", tiny, *FEW)
    parts = [{"type": "video", "video": "clip.bin"}, {"type": "image", "image": "a.png"}]
    asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "what moved?"}]}]
    whole = engine.generate(asked, max_tokens=6, video_budget=VideoBudget(fps=6))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["text"] == whole.text
    assert outcome.json["usage"]["prompt_tokens_details"]["image_tokens"] == whole.usage.image
    pruned = fovea(
        "ask",
        "clip.bin",
        "what?",
        "--fps",
        "6",
        "--video-pruning-rate",
        "0.5",
        "--json",
        "--model",
        tiny,
        *FEW,
    )
    assert pruned.json["usage"]["prompt_tokens_details"]["image_tokens"] == (whole.usage.image - 6) // 2
    cut = fovea("ask", "no.mp4", "what?", "--model", tiny, *FEW)
    assert cut.code != 0
    assert "no.mp4" in cut.err


def test_flags_are_accepted_anywhere(fovea: Caller, tiny: Path, here: Path) -> None:
    plain = fovea("ask", "a.png", "b.png", "what?", "--model", tiny, *FEW)
    assert plain.code == 0
    assert fovea("ask", "--model", tiny, "a.png", *FEW, "b.png", "what?") == plain
    assert fovea("ask", "a.png", "--model", tiny, "b.png", *FEW, "what?") == plain


def test_stats(fovea: Caller, tiny: Path, here: Path) -> None:
    outcome = fovea("ask", "a.png", "what?", "--stats", "--model", tiny, *FEW)
    milliseconds, tokens = outcome.err.splitlines()
    assert all(f"{stage} " in milliseconds for stage in ("preprocess", "encode", "prefill", "decode"))
    assert "first token after " in milliseconds
    assert "visual 6, cached 0), answer 6" in tokens
    assert outcome.out.endswith("\n")


def test_stats_tell_how_many_tokens_a_step_gave(capsys: pytest.CaptureFixture[str]) -> None:
    def last_line(usage: Usage) -> str:
        stats_table(Completion(("a",), ((1,),), ("stop",), ((),), usage, StageTimings(decode=0.5)))
        return capsys.readouterr().err.splitlines()[-1]

    usage = Usage(9, 44, drafts=31, accepted_drafts=23)
    assert last_line(usage) == "  tokens per step 2.1 (accepted 23 of 31 drafts)"
    assert "per step" not in last_line(Usage(9, 44))


def test_json(fovea: Caller, tiny: Path, engine: Engine, here: Path) -> None:
    outcome = fovea("ask", "a.png", "what?", "--json", "--model", tiny, *FEW)
    whole = engine.generate("what?", images=["a.png"], max_tokens=6)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["text"] == whole.text
    assert outcome.json["finish_reason"] == "length"
    usage = outcome.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (whole.usage.prompt, 6)
    assert usage["prompt_tokens_details"]["image_tokens"] == 6
    assert outcome.json["timings_ms"]["ttft"] > 0


def test_detail_and_pixels_limit_the_visual_tokens(fovea: Caller, tiny: Path, here: Path) -> None:
    def visual(*flags: str) -> int:
        body = fovea("ask", "a.png", "what?", "--json", "--model", tiny, *FEW, *flags).json
        return int(body["usage"]["prompt_tokens_details"]["image_tokens"])

    assert visual() == visual("--detail", "high") == 6
    assert visual("--max-pixels", "4096") == 2


def test_sampling_flags(fovea: Caller, tiny: Path, here: Path) -> None:
    def text(*flags: str) -> str:
        return fovea("ask", "a.png", "what?", "--model", tiny, *FEW, *flags).out

    hot = ("--temperature", "1.5", "--seed")
    assert text(*hot, "1") == text(*hot, "1")
    assert len({text(*hot, str(seed)) for seed in range(4)}) > 1
    assert text(*hot, "1", "--top-p", "1e-6") == text()


def test_the_answer_has_the_form_that_a_flag_prescribes(fovea: Caller, tiny: Path, here: Path) -> None:
    (here / "schema.json").write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}')
    (here / "digits.lark").write_text("start: /[0-9]{4}/")
    for words, pattern in (
        (("--schema", "schema.json"), r"\[((true|false)(, ?(true|false)){0,2})?\]"),
        (("--choice", "yes, no"), "yes|no"),
        (("--regex", "[a-c]{5}"), "[a-c]{5}"),
        (("--grammar", "digits.lark"), "[0-9]{4}"),
    ):
        outcome = fovea("ask", "a.png", "what?", *words, "--max-tokens", "90", "--model", tiny)
        assert (outcome.code, outcome.err) == (0, "")
        assert re.fullmatch(pattern, outcome.out.rstrip("\n")), outcome.out


def test_wrong_forms_are_named_by_their_flag(fovea: Caller, tiny: Path, here: Path) -> None:
    (here / "wrong.json").write_text('{"items": {"not": {}}}')
    (here / "prose.json").write_text("no JSON")
    for words, message in (
        (("--schema", "none.json"), "--schema: none.json cannot be read: No such file or directory"),
        (("--schema", "prose.json"), "--schema: the schema is not JSON"),
        (("--schema", "wrong.json"), '--schema: json at /items: Unimplemented keys: ["not"]'),
        (("--regex", "("), "--regex: regex: .*unclosed group"),
        (("--choice", "yes,"), "--choice: accepted: 1 to 1024 non-empty texts"),
    ):
        outcome = fovea("ask", "what?", *words, "--model", tiny)
        assert outcome.code == 2, words
        assert re.search(message.replace("[", r"\["), outcome.error_line), outcome.error_line


def test_the_model_may_come_from_any_source(
    fovea: Caller, tiny: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = fovea("ask", "what?", "--model", tiny, *FEW)
    (here / "fovea.toml").write_text(f'model = "{tiny}"')
    assert fovea("ask", "what?", "--config", "fovea.toml", *FEW) == outcome
    monkeypatch.setenv("FOVEA_MODEL", str(tiny))
    assert fovea("ask", "what?", *FEW) == outcome


def test_a_chat_template_from_a_file(fovea: Caller, tiny: Path, engine: Engine, here: Path) -> None:
    (here / "plain.jinja").write_text("{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}")
    outcome = fovea("ask", "what?", "--model", tiny, "--chat-template", "plain.jinja", "--json", *FEW)
    assert outcome.json["usage"]["prompt_tokens"] == len(engine.tokenizer.encode("what?"))


WRONG = [
    (("missing.png", "what?"), "image 0: missing.png cannot be read: No such file or directory"),
    (("a.png", "no.png", "what?"), "image 1: the data is not an image of an accepted type"),
    (("cut.png", "what?"), "image 0: "),
    ((".", "what?"), "image 0: . cannot be read: Is a directory"),
    (("a.png",), "the question comes last, but a.png is a file"),
    (("what?", "a.png"), "the question comes last, but a.png is a file"),
    (
        ("what?", "--model", "nothere"),
        "'nothere' is neither a folder, a GGUF file (*.gguf), a hub id (owner/name) nor 'fovea-tiny'",
    ),
    (("what?", "--model", "./nothere"), "'./nothere' is neither a folder"),
    (("what?", "--model", "own/er"), "'own/er' could not be downloaded: "),
    (("what?", "--model", "empty"), "empty has no config.json"),
    (("what?", "--model", "bert"), "model_type 'bert' is not supported; supported: qwen3_5, "),
    (("what?", "--model", "broken"), "broken/config.json is not JSON"),
    (("what?", "--config", "bad.toml"), "bad.toml is not TOML: "),
    (("what?", "--config", "none.toml"), "none.toml cannot be read: No such file or directory"),
    (("what?", "--temperature", "3"), "temperature must be in [0, 2], got 3.0"),
    (("what?", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
    (("what?", "--dtype", "int4"), "--dtype: dtype is 'int4'; accepted: auto, "),
    (("what?", "--device", "cuda:99"), "device is 'cuda:99', but torch finds no CUDA device"),
    (("what?", "--chat-template", "none.jinja"), "--chat-template: none.jinja cannot be read: No such file"),
    (("what\udcff",), "the question is not UTF-8 text"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"), WRONG, ids=[" ".join(ascii(w) for w in words) for words, _ in WRONG]
)
def test_an_error_is_one_line(
    words: tuple[str, ...],
    message: str,
    fovea: Caller,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: Path,
) -> None:
    if "--device" in words:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (here / "cut.png").write_bytes((here / "a.png").read_bytes()[:200])
    (here / "bad.toml").write_text("model = = 1")
    for name, config in (("bert", '{"model_type": "bert"}'), ("broken", "{"), ("empty", None)):
        (here / name).mkdir()
        if config:
            (here / name / "config.json").write_text(config)
    outcome = fovea("ask", *words, *(() if "--model" in words else ("--model", tiny)))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line.startswith(f"fovea: {message}")


def test_a_truncated_checkpoint(fovea: Caller, tiny: Path, here: Path) -> None:
    cut = here / "cut"
    cut.mkdir()
    for file in tiny.iterdir():
        (cut / file.name).write_bytes(file.read_bytes()[: 5000 if file.suffix == ".safetensors" else None])
    outcome = fovea("ask", "what?", "--model", cut)
    assert outcome.code == 2
    assert "model.safetensors is not a safetensors file, or is truncated" in outcome.error_line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: FILE ... QUESTION"),
        (("what?", "--max-tokens", "0"), "argument --max-tokens: 0 is below 1"),
        (("what?", "--max-tokens", "few"), "argument --max-tokens: invalid count value: 'few'"),
        (("what?", "--max-pixels", "-5"), "argument --max-pixels: -5 is below 1"),
        (("what?", "--detail", "ultra"), "argument --detail: invalid choice: 'ultra'"),
        (("what?", "--bogus"), "unrecognized arguments: --bogus"),
        (("what?", "--max-queue", "3"), "unrecognized arguments: --max-queue 3"),
    ],
)
def test_a_wrong_call_shows_the_usage(words: tuple[str, ...], message: str, fovea: Caller) -> None:
    outcome = fovea("ask", *words)
    assert (outcome.code, outcome.out) == (2, "")
    usage, error = outcome.err.splitlines()
    assert usage.startswith("usage: fovea ")
    assert message in error


def test_a_prompt_longer_than_the_context(fovea: Caller, tiny: Path) -> None:
    line = fovea("ask", "the red circle " * 2000, "--model", tiny).error_line
    assert line.startswith("fovea: the prompt has ")
    assert line.endswith("the context holds 4096, answer included")


def test_the_answer_streams_and_control_c_stops_it(tiny: Path, folder: Path) -> None:
    process = start("ask", folder / "a.png", "what?", "--model", tiny, *LONG)
    assert process.stdout is not None
    first = process.stdout.read(4)
    assert len(first) == 4
    stopped = interrupt(process)
    assert (stopped.code, stopped.error_line) == (130, "fovea: interrupted")


def test_a_closed_pipe_is_no_error(tiny: Path, folder: Path) -> None:
    process = start("ask", folder / "a.png", "what?", "--model", tiny, *LONG)
    assert process.stdout is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()


def test_characters_that_the_locale_cannot_write_are_escaped(tiny: Path, folder: Path) -> None:
    words = ("ask", folder / "a.png", "what?", "--model", tiny, "--max-tokens", 100, "--json")
    outcome = finish(Fork(IN_ASCII + FORKED, [str(word) for word in words], os.environ | SHORT))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.isascii()
    assert json.loads(outcome.out)["usage"]["completion_tokens"] == 100


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "a\tred\ncircle \x1b]0;title\x07 \x9b2J back\r\x08 über"
    for stream, shown in (
        (_Terminal(), "a\tred\ncircle \ufffd]0;title\ufffd \ufffd2J back\ufffd\ufffd über"),
        (io.StringIO(), words),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        write_text(words)
        assert stream.getvalue() == shown

"""fovea batch: every line is answered in its place, in one run or in several."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from fovea import Engine
from fovea.cli.batch import ImageFolder
from fovea.core.errors import FoveaError
from tests.cli.support import Caller, interrupt, read_lines, start, until, write_lines

FEW = ("--max-tokens", "5")


@pytest.fixture
def batch(fovea: Caller, tiny: Path, folder: Path) -> Any:
    """batch(words...) answers in.jsonl of the folder into out.jsonl."""
    return lambda *words: fovea(
        "batch", folder / "in.jsonl", folder / "out.jsonl", "--model", tiny, *FEW, *words
    )


@pytest.fixture
def here(folder: Path) -> Path:
    return folder


def texts(folder: Path) -> list[str]:
    return [body["text"] for body in read_lines(folder / "out.jsonl")]


def test_line_n_answers_line_n(batch: Any, engine: Engine, here: Path) -> None:
    """Long answers first, so that later lines are ready before earlier ones."""
    requests = [
        {
            "image": ("a.png", "b.png")[n % 2],
            "question": f"what is {n}?",
            "params": {"max_tokens": 24 - 2 * n},
        }
        for n in range(12)
    ]
    write_lines(here / "in.jsonl", *requests)
    outcome = batch("--concurrency", 5)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    bodies = read_lines(here / "out.jsonl")
    assert [body["line"] for body in bodies] == [body["id"] for body in bodies] == list(range(1, 13))
    for body, line in zip(bodies, requests, strict=True):
        whole = engine.generate(line["question"], images=[here / line["image"]], **line["params"])
        assert body["text"] == whole.text
        assert body["usage"]["completion_tokens"] == line["params"]["max_tokens"]
        assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 6
        assert body["finish_reason"] == "length"


def test_every_form_of_a_line(batch: Any, engine: Engine, here: Path) -> None:
    content = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "what?"}]
    talk = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "sure?"},
    ]
    write_lines(
        here / "in.jsonl",
        {"question": "what?"},
        {"id": "two", "images": ["a.png", "b.png"], "question": "what?"},
        {"id": {"page": 3}, "messages": talk},
        {"image": str(here / "a.png"), "question": "absolute"},
        {"question": "one\u2028two", "id": "\u2028"},
        {"question": "hot", "params": {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 3}},
    )  # fmt: skip
    assert batch().code == 0
    plain, two, messages, absolute, lines, several = read_lines(here / "out.jsonl")
    images = [here / "a.png", here / "b.png"]
    assert plain["text"] == engine.generate("what?", max_tokens=5).text
    assert two["text"] == engine.generate("what?", images=images, max_tokens=5).text
    rebased = [{"role": "user", "content": [{"type": "image", "image": images[1]}, content[1]]}, *talk[1:]]
    assert messages["text"] == engine.generate(rebased, max_tokens=5).text
    assert absolute["text"] == engine.generate("absolute", images=images[:1], max_tokens=5).text
    assert lines["text"] == engine.generate("one\u2028two", max_tokens=5).text
    assert (two["id"], messages["id"], lines["id"]) == ("two", {"page": 3}, "\u2028")
    hot = engine.generate("hot", temperature=1.0, seed=3, n=2, max_tokens=3)
    assert several["texts"] == list(hot.texts)
    assert several["finish_reasons"] == ["length", "length"]


def test_raw_line_separators_do_not_end_a_line(batch: Any, engine: Engine, here: Path) -> None:
    line = json.dumps({"question": "one\u2028two\x85three"}, ensure_ascii=False).encode()
    write_lines(here / "in.jsonl", b"\xef\xbb\xbf" + line + b"\r")
    assert batch().code == 0
    assert texts(here) == [engine.generate("one\u2028two\x85three", max_tokens=5).text]


def test_params_of_a_line_override_flags(batch: Any, engine: Engine, here: Path) -> None:
    write_lines(
        here / "in.jsonl",
        {"question": "q"},
        {"question": "q", "params": {"max_tokens": 9}},
        {"question": "q", "params": {"max_tokens": 9, "stop_token_ids": [3], "logit_bias": {"3": 100}}},
    )
    assert batch().code == 0
    bodies = read_lines(here / "out.jsonl")
    assert [body["usage"]["completion_tokens"] for body in bodies] == [5, 9, 1]
    assert [body["finish_reason"] for body in bodies] == ["length", "length", "stop"]


def test_stop_is_a_string_or_strings(batch: Any, engine: Engine, here: Path) -> None:
    """`"stop": "xy"` stops at xy, not at x."""
    whole = engine.generate("what is it?", max_tokens=20).text
    at = next(i for i in range(1, len(whole) - 2) if whole[i : i + 2].isascii())
    end = whole[at : at + 2]
    for stop in (end, [end], [end, "never said"]):
        line = {"question": "what is it?", "params": {"stop": stop, "max_tokens": 20}}
        (here / "out.jsonl").unlink(missing_ok=True)
        write_lines(here / "in.jsonl", line)
        assert batch().code == 0
        assert texts(here) == [whole[: whole.index(end)]]


BAD = {
    "not JSON": (b'{"question": ', "not JSON: "),
    "not UTF-8": (b'{"question": "\xff"}', "not JSON: 'utf-8' codec can\x27t decode"),
    "deep": (b"[" * 100_000, "not JSON: maximum recursion depth"),
    "no object": (["question"], "not a JSON object"),
    "nothing asked": ({"image": "a.png"}, "question or messages is required"),
    "no messages": ({"messages": []}, "question or messages is required"),
    "asked twice": ({"question": "q", "messages": []}, "either question or messages, not both"),
    "images twice": ({"question": "q", "image": "a.png", "images": []}, "either image or images, not both"),
    "image beside messages": ({"messages": ["m"], "image": "a.png"}, "either image or messages, not both"),
    "unknown field": ({"question": "q", "img": "a.png"}, "unknown field 'img'; known: id, image, "),
    "question no text": ({"question": 5}, "question takes text"),
    "image no path": ({"question": "q", "image": 5}, "image takes a path"),
    "images no list": ({"question": "q", "images": "a.png"}, "images takes a list of paths"),
    "images no paths": ({"question": "q", "images": [None]}, "an image is None; accepted: the path"),
    "missing image": ({"question": "q", "image": "none.png"}, "cannot be read: No such file or directory"),
    "a NUL in its path": ({"question": "q", "image": "a\0.png"}, "null byte"),
    "not an image": ({"question": "q", "images": ["a.png", "no.png"]}, "image 1: the data is not an image"),
    "no message": (
        {"messages": ["hello"]},
        "a message needs a role, and content or tool_calls; got a value of type str",
    ),
    "no such part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "part of type 'image_url'; accepted: parts of type text, image",
    ),
    "a message's image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]},
        "image 0: the data is not an image",
    ),
    "params no object": ({"question": "q", "params": [1]}, "params takes an object of sampling parameters"),
    "unknown parameter": ({"question": "q", "params": {"temp": 1}}, "unknown parameter 'temp'; known: "),
    "parameter out of range": (
        {"question": "q", "params": {"temperature": 9}},
        "temperature must be in [0, 2]",
    ),
    "stop no strings": ({"question": "q", "params": {"stop": [1]}}, "stop takes a list of str"),
    "no token ids": (
        {"question": "q", "params": {"stop_token_ids": "x"}},
        "stop_token_ids takes a list of int",
    ),
    "no logit bias": ({"question": "q", "params": {"logit_bias": {"x": 1}}}, "logit_bias takes an object of"),
    "no such token": (
        {"question": "q", "params": {"logit_bias": {"9999": 1}}},
        "logit_bias: token 9999 is outside",
    ),
    "too long": ({"question": "red circle " * 3000}, "the prompt has "),
    "too many tokens": (
        {"question": "q", "params": {"max_tokens": 5000}},
        "max_tokens is 5000, but after the ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_blank_lines_are_no_questions(batch: Any, here: Path, end: str) -> None:
    """A blank last line became an error, and so did the mark that Windows' editors put before UTF-8."""
    one, two = (json.dumps({"question": text, "params": {"max_tokens": 2}}) for text in ("a", "b"))
    text = end.join(("\ufeff", one, "", "  ", two, "", ""))
    (here / "in.jsonl").write_bytes(text.encode())
    assert batch().code == 0
    first = (here / "out.jsonl").read_bytes()
    assert [json.loads(line)["line"] for line in first.splitlines()] == [1, 2]
    assert batch().code == 0
    assert (here / "out.jsonl").read_bytes() == first


def test_bad_lines_do_not_stop_the_rest(batch: Any, engine: Engine, here: Path) -> None:
    good = {"question": "what is it?", "image": "a.png"}
    write_lines(here / "in.jsonl", *(line for value, _ in BAD.values() for line in (value, good)), good)
    outcome = batch()
    assert outcome.code == 1
    assert outcome.error_line == (
        f"fovea: {len(BAD)} of {2 * len(BAD) + 1} lines could not be answered; "
        f"see their error in {here / 'out.jsonl'}"
    )
    bodies = read_lines(here / "out.jsonl")
    assert [body["line"] for body in bodies] == list(range(1, 2 * len(BAD) + 2))
    answer = engine.generate("what is it?", images=[here / "a.png"], max_tokens=5).text
    assert {body["text"] for body in (*bodies[1::2], bodies[-1])} == {answer}
    for (kind, (_, message)), body in zip(BAD.items(), bodies[::2], strict=False):
        assert set(body) == {"line", "id", "error"}, kind
        assert message in body["error"]["message"], kind
        assert body["error"]["type"] == "invalid_request_error"


def test_a_bad_line_keeps_its_id(batch: Any, here: Path) -> None:
    write_lines(here / "in.jsonl", {"id": "first", "question": 5}, {"id": "\ud800", "question": "q"}, b"?")
    assert batch().code == 1
    assert [body["id"] for body in read_lines(here / "out.jsonl")] == ["first", "\ud800", 3]


def test_more_in_flight_than_an_engine_queues(
    batch: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of waiting requests is for servers. A batch limits itself."""
    monkeypatch.setenv("FOVEA_MAX_RUNNING", "2")
    monkeypatch.setenv("FOVEA_MAX_QUEUE", "1")
    write_lines(here / "in.jsonl", *({"question": f"{n}?"} for n in range(20)))
    assert batch("--concurrency", 20).code == 0
    assert len(texts(here)) == 20


@pytest.fixture
def finished(batch: Any, here: Path) -> bytes:
    """Write in.jsonl with six lines, the third one bad, and return the bytes of the whole out.jsonl."""
    lines = [{"id": f"n{n}", "question": f"what is {n}?", "image": "a.png"} for n in range(6)]
    lines[2]["image"] = "none.png"
    write_lines(here / "in.jsonl", *lines)
    assert batch("--concurrency", 1).code == 1
    return (here / "out.jsonl").read_bytes()


def without_usage(data: bytes) -> list[Any]:
    """Return the lines without usage, because cached tokens depend on earlier requests of the same run."""
    return [{k: v for k, v in json.loads(line).items() if k != "usage"} for line in data.split(b"\n") if line]


@pytest.mark.parametrize(
    ("kept", "rest"),
    [
        pytest.param(kept, rest, marks=[] if (kept == 2) != (rest in (0, 9)) else pytest.mark.slow)
        for kept in (0, 1, 2, 5)
        for rest in (0, 1, 9, 10, 11, -1)
    ],
)
def test_a_second_run_continues_after_the_last_whole_line(
    kept: int, rest: int, batch: Any, here: Path, finished: bytes
) -> None:
    """The last line is cut off after `rest` bytes; -1: only its line feed is missing."""
    lines = finished.split(b"\n")
    cut = lines[kept] if rest == -1 else lines[kept][:rest]
    (here / "out.jsonl").write_bytes(b"".join(line + b"\n" for line in lines[:kept]) + cut)
    outcome = batch()
    assert outcome.code == 1
    assert without_usage((here / "out.jsonl").read_bytes()) == without_usage(finished)
    lines_of_stderr = outcome.err.splitlines()
    assert lines_of_stderr[-1].startswith("fovea: 1 of 6 lines could not be answered")
    again = "; asking again what failed: 1" if kept > 2 else ""
    answered = kept - (kept > 2)
    assert lines_of_stderr[:-1] == (
        [f"fovea: {answered} of 6 lines are answered already{again}"] if kept else []
    )


def test_a_finished_batch_does_nothing(fovea: Caller, batch: Any, here: Path) -> None:
    """No model is loaded."""
    write_lines(here / "in.jsonl", {"question": "one?"}, {"question": "two?"})
    assert batch().code == 0
    finished = (here / "out.jsonl").read_bytes()
    outcome = fovea("batch", here / "in.jsonl", here / "out.jsonl", "--model", "./none")
    assert outcome.code == 0
    assert outcome.err.splitlines() == ["fovea: 2 of 2 lines are answered already"]
    assert (here / "out.jsonl").read_bytes() == finished


def test_a_second_run_asks_again_what_failed(batch: Any, here: Path, finished: bytes) -> None:
    """In the past a failed line counted as answered, and had to be copied into another file."""
    outcome = batch()
    assert outcome.code == 1
    assert outcome.err.splitlines()[0] == (
        "fovea: 5 of 6 lines are answered already; asking again what failed: 1"
    )
    assert without_usage((here / "out.jsonl").read_bytes()) == without_usage(finished)
    (here / "none.png").write_bytes((here / "a.png").read_bytes())
    assert batch().code == 0
    before, after = without_usage(finished), without_usage((here / "out.jsonl").read_bytes())
    assert [body for body in before if "error" not in body] == [*after[:2], *after[3:]]
    assert (after[2]["line"], after[2]["id"], "text" in after[2]) == (3, "n2", True)
    assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []


def test_a_folder_of_images_with_one_question(fovea: Caller, tiny: Path, engine: Engine, here: Path) -> None:
    pictures = here / "pictures"
    (pictures / "deep").mkdir(parents=True)
    for name in ("b.PNG", "deep/c.png", ".hidden.png", "a.png"):
        (pictures / name).write_bytes((here / "a.png").read_bytes())
    (pictures / "notes.txt").write_text("no image")
    (pictures / "broken.png").write_text("no image")
    out = here / "out.jsonl"
    outcome = fovea("batch", pictures, out, "--prompt", "what is it?", "--model", tiny, *FEW)
    assert outcome.code == 1
    bodies = read_lines(out)
    assert [body["id"] for body in bodies] == ["a.png", "b.PNG", "broken.png", "deep/c.png"]
    assert "error" in bodies[2]
    whole = engine.generate("what is it?", images=[pictures / "a.png"], max_tokens=5)
    assert bodies[0]["text"] == bodies[3]["text"] == whole.text


def test_pages_of_pdf_files_are_images(fovea: Caller, tiny: Path, engine: Engine, here: Path) -> None:
    pages = [Pillow.new("RGB", (200, 100), colour) for colour in ("red", "blue")]
    (here / "paper").mkdir()
    pages[0].save(here / "paper" / "two.PDF", save_all=True, append_images=pages[1:], resolution=72.0)
    (here / "paper" / "broken.pdf").write_text("no file")
    out = here / "out.jsonl"
    outcome = fovea("batch", here / "paper", out, "--prompt", "what is it?", "--model", tiny, *FEW)
    broken, *answers = read_lines(out)
    assert outcome.code == 1
    assert [body["id"] for body in answers] == ["two.PDF#page=1", "two.PDF#page=2"]
    assert [broken["id"], broken["error"]["code"]] == ["broken.pdf#page=1", "not_a_pdf"]
    for page, body in enumerate(answers, 1):
        picture = ImageFolder(here / "paper").open(f"two.PDF#page={page}")
        assert isinstance(picture, bytes)
        assert Pillow.open(io.BytesIO(picture)).size == (1112, 556)
        assert body["text"] == engine.generate("what is it?", images=[picture], max_tokens=5).text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.pdf", "accepted: one of its pages, such as none.pdf#page=1"),
        ("none.pdf#page=1", "none.pdf cannot be read: No such file"),
        ("one.pdf#page=2", "the PDF has 1 pages"),
    ],
)
def test_a_page_that_cannot_be_read_is_named(tmp_path: Path, name: str, words: str) -> None:
    Pillow.new("RGB", (20, 20)).save(tmp_path / "one.pdf")
    with pytest.raises(FoveaError, match=words):
        ImageFolder(tmp_path).open(name)


def test_a_folder_needs_a_question_and_images(fovea: Caller, here: Path) -> None:
    outcome = fovea("batch", here, here / "out.jsonl")
    assert (outcome.code, outcome.error_line.endswith("--prompt has to say what is asked")) == (2, True)
    empty = here / "empty"
    empty.mkdir()
    outcome = fovea("batch", empty, here / "out.jsonl", "--prompt", "what?")
    assert outcome.code == 2
    assert "has no image; accepted are files that end in .png" in outcome.error_line


def test_lines_may_prescribe_the_form_of_their_answers(batch: Any, here: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9}}}
    write_lines(
        here / "in.jsonl",
        {"question": "how many?", "params": {"response_format": form}},
        {"question": "yes?", "params": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"question": "no flag?"},
        {"question": "wrong?", "params": {"guided_regex": "("}},
        {"question": "misspelt?", "params": {"response_format": {"type": "json_object", "schemas": {}}}},
        {"question": "plain?", "params": {"response_format": {"type": "text"}}},
    )
    assert batch("--regex", "[ab]{3}").code == 1
    number, word, flag, wrong, misspelt, plain = read_lines(here / "out.jsonl")
    assert int(number["text"]) <= 9
    assert word["text"] in ("yes", "no")
    assert set(flag["text"]) <= set("ab")
    assert "unclosed group" in wrong["error"]["message"]
    assert misspelt["error"]["code"] == "unknown_field"
    assert not set(plain["text"]) <= set("ab"), "it asks for text, against the flag"


def test_questions_may_be_appended(batch: Any, here: Path, finished: bytes) -> None:
    with (here / "in.jsonl").open("ab") as file:
        file.write(b'{"question": "one more?"}')
    assert batch().code == 1
    bodies = (here / "out.jsonl").read_bytes()
    assert bodies.startswith(finished)
    assert len(bodies.splitlines()) == 7


FOREIGN = {
    "prose": b"Dear diary,\ntoday",
    "a word without a line feed": b"precious",
    "other JSON": b'{"line": 2, "id": "n1", "text": ""}\n',
    "no object": b"[1]\n",
    "another id": b'{"line": 1, "id": "m0", "text": ""}\n',
    "an unfinished other line": b'{"line": 3, "id"',
    "too many lines": b"".join(b'{"line": %d, "id": "n%d"}\n' % (n + 1, n) for n in range(7)),
    "a seventh begun": b"".join(b'{"line": %d, "id": "n%d"}\n' % (n + 1, n) for n in range(6))
    + b'{"line": 7,',
    "not text": bytes(range(256)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_its_output_stays_as_it_is(
    kind: str, batch: Any, here: Path, finished: bytes
) -> None:
    (here / "out.jsonl").write_bytes(FOREIGN[kind])
    outcome = batch()
    assert outcome.code == 2
    assert outcome.error_line.endswith("not its output")
    assert (here / "out.jsonl").read_bytes() == FOREIGN[kind]


def test_in_and_out_must_differ(fovea: Caller, here: Path) -> None:
    path = write_lines(here / "in.jsonl", {"question": "q"})
    before = path.read_bytes()
    (here / "link.jsonl").symlink_to(path)
    (here / "hard.jsonl").hardlink_to(path)
    for other in (path, here / "." / "in.jsonl", here / "link.jsonl", here / "hard.jsonl"):
        outcome = fovea("batch", path, other)
        assert (outcome.code, outcome.error_line) == (2, "fovea: IN and OUT are the same file")
    assert path.read_bytes() == before


def test_files_that_cannot_be_used(fovea: Caller, here: Path) -> None:
    source_file = write_lines(here / "in.jsonl", {"question": "q"})
    for source, output, message in (
        (here / "none.jsonl", here / "out.jsonl", "none.jsonl cannot be read: No such file or directory"),
        (source_file, here, "cannot be written: Is a directory"),
        (source_file, here / "none" / "out.jsonl", "out.jsonl cannot be written: No such file or directory"),
    ):
        outcome = fovea("batch", source, output)
        assert outcome.code == 2
        assert message in outcome.error_line


def test_wrong_flags_are_errors_before_anything_is_written(fovea: Caller, here: Path) -> None:
    source_file = write_lines(here / "in.jsonl", {"question": "q"})
    for words, message in (
        (("--concurrency", "0"), "argument --concurrency: 0 is below 1"),
        (("--temperature", "9"), "temperature must be in [0, 2]"),
        ((), "the following arguments are required: OUT.jsonl"),
    ):
        outcome = fovea("batch", source_file, *((here / "out.jsonl",) if words else ()), *words)
        assert outcome.code == 2
        assert message in outcome.err
    assert not (here / "out.jsonl").exists()


def test_no_questions_give_no_answers(fovea: Caller, here: Path) -> None:
    (here / "in.jsonl").touch()
    assert fovea("batch", here / "in.jsonl", here / "out.jsonl", "--model", "./none").code == 0
    assert (here / "out.jsonl").read_bytes() == b""


def test_control_c_and_a_second_run(batch: Any, tiny: Path, here: Path) -> None:
    """A batch that is interrupted between two lines continues there, and the result is the same."""
    lines = [{"question": f"what is {n}?", "params": {"max_tokens": 90}} for n in range(8)]
    write_lines(here / "in.jsonl", *lines)
    out = here / "out.jsonl"
    process = start("batch", here / "in.jsonl", out, "--model", tiny, "--concurrency", 1)
    until(lambda: process.poll() is not None or (out.exists() and b"\n" in out.read_bytes()))
    stopped = interrupt(process)
    assert (stopped.code, stopped.error_line) == (130, "fovea: interrupted")
    first = out.read_bytes()
    assert 1 <= len(first.splitlines()) < 8
    assert batch().code == 0
    assert out.read_bytes().startswith(first)
    assert [body["line"] for body in read_lines(out)] == list(range(1, 9))
    whole = texts(here)
    out.unlink()
    assert batch().code == 0
    assert texts(here) == whole

"""The reader divides answers into content, reasoning and calls, in whatever chunks the text arrives."""

from __future__ import annotations

import json
import warnings
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.dialects.dialect import FORMATS, THINK, Dialect
from fovea.dialects.reader import AnswerReader
from tests.dialects.support import SCHEMAS, Call, Parts, join, tool, write
from tests.support.thorough import examples

PARIS = Call("get_weather", {"city": "Paris"})
RICH = Call(
    "get_weather",
    {
        "city": 'Zoë\'s "Köln", 北京 </tool_call> ]) <|tool_call_end|> \\ {[',
        "days": 3,
        "exact": True,
        "where": {"near": [1.5, -2, {"a": None}], "text": "}]"},
    },
)
ROCKET = Call("launch_rocket", {"city": "Paris"})
BROKEN = {
    "hermes": '<tool_call>\n{name: "get_weather"}\n</tool_call>',
    "llama": '{"name": get_weather}',
    "pythonic": "<|python_start|>[get_weather{}]<|python_end|>",
    "lfm2": "<|tool_call_start|>get_weather()<|tool_call_end|>",
    "qwen_xml": "<tool_call>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
}
forms = pytest.mark.parametrize("form", FORMATS)


def reader(form: str, *, reasons: bool = True, thinking: bool = False, tools: Any = SCHEMAS) -> AnswerReader:
    return AnswerReader(Dialect(FORMATS[form], THINK if reasons else None), tools, thinking=thinking)


def read(form: str, text: str, **options: Any) -> Parts:
    whole = reader(form, **options)
    return join([*whole.push(text), *whole.finish()])


def read_in_chunks(form: str, chunks: list[str], **options: Any) -> Parts:
    each = reader(form, **options)
    return join([piece for chunk in chunks for piece in each.push(chunk)] + each.finish())


def marked(form: str, call: Call) -> str:
    """Return a call with its mark, also in formats in which it may stand without one."""
    text, begin = write(form, call), FORMATS[form].begin
    return text if text.startswith(begin) else begin + text


@forms
def test_one_call(form: str) -> None:
    parts = read(form, write(form, PARIS))
    assert parts.values == [PARIS]
    assert (parts.content, parts.reasoning) == ("", "")


@forms
def test_several_calls(form: str) -> None:
    calls = [PARIS, Call("stop", {}), RICH, PARIS]
    parts = read(form, write(form, *calls))
    assert parts.values == calls
    assert parts.content == ""


@forms
def test_empty_arguments_are_an_empty_object(form: str) -> None:
    assert read(form, write(form, Call("stop", {}))).calls == (("stop", "{}"),)


@forms
def test_marks_and_brackets_inside_strings_are_text(form: str) -> None:
    """The end mark, quotes, backslashes and brackets in an argument do not end the call."""
    assert read(form, write(form, RICH)).values == [RICH]


@forms
def test_text_and_reasoning_around_a_call(form: str) -> None:
    text = f"<think>\nSo what?\n</think>\n\nI will look.\n\n{marked(form, PARIS)}\nThere."
    parts = read(form, text)
    assert parts.reasoning == "So what?"
    assert parts.values == [PARIS]
    assert parts.content == "I will look.There.", "white space beside calls belongs to neither"


@forms
def test_a_call_right_after_the_reasoning(form: str) -> None:
    """Also where a call has no mark, so that only its place tells that it is one."""
    parts = read(form, f"<think>hm</think>\n\n{write(form, PARIS)}")
    assert (parts.reasoning, parts.content, parts.values) == ("hm", "", [PARIS])


@forms
def test_reasoning_that_the_prompt_began(form: str) -> None:
    parts = read(form, f"\nSo what?\n</think>\n\n{write(form, PARIS)}", thinking=True)
    assert (parts.reasoning, parts.content, parts.values) == ("So what?", "", [PARIS])


@forms
def test_calls_inside_reasoning_are_reasoning(form: str) -> None:
    """The model considers a call and decides against it."""
    thought = f"I could write {write(form, PARIS)} but no."
    parts = read(form, f"<think>{thought}</think>No.")
    assert parts == Parts("No.", thought, ())


@forms
def test_reasoning_that_was_cut_off(form: str) -> None:
    assert read(form, "<think>\nand then", reasons=True) == Parts("", "and then", ())
    assert read(form, "and then </thi", thinking=True) == Parts("", "and then </thi", ())


@forms
def test_an_unfinished_call_keeps_what_is_known(form: str) -> None:
    """The length limit cut the answer. The client gets the beginning of the arguments."""
    call = Call("get_weather", {"city": "Paris", "where": {"text": "a very long one"}})
    text = write(form, call)
    parts = read(form, text[: text.index("very")])
    [(name, arguments)] = parts.calls
    assert (name, parts.content) == ("get_weather", "")
    whole = json.dumps(call.values)
    assert whole.startswith(arguments)


@forms
def test_a_call_that_was_cut_before_its_name_is_content(form: str) -> None:
    text = write(form, PARIS)
    cut = text[: text.index("weather")]
    assert read(form, cut) == Parts(cut, "", ())


@forms
def test_an_unknown_tool_is_content(form: str) -> None:
    """Nobody could run it. The client sees what the model wrote."""
    for text in (write(form, ROCKET), f"So: {marked(form, ROCKET)}"):
        assert read(form, text) == Parts(text, "", ())


@forms
def test_a_malformed_call_is_content(form: str) -> None:
    assert read(form, BROKEN[form]) == Parts(BROKEN[form], "", ())


@forms
def test_a_call_after_a_malformed_one(form: str) -> None:
    parts = read(form, f"{BROKEN[form]}\n{marked(form, PARIS)}")
    assert parts.values == [PARIS]
    assert parts.content == BROKEN[form]


@forms
def test_calls_are_not_looked_for_without_tools(form: str) -> None:
    """A client that offered no tools may ask about tool calls."""
    text = f"Write {write(form, PARIS)} then."
    assert read(form, text, tools=None) == Parts(text, "", ())


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_arguments_before_the_name(form: str) -> None:
    key = FORMATS[form].arguments
    text = f'{{"{key}": {{"city": "Paris", "name": "x"}}, "type": "function", "name": "get_weather"}}'
    begin, end = ("<tool_call>\n", "\n</tool_call>") if form == "hermes" else ("", "")
    parts = read(form, f"{begin}{text}{end}")
    assert parts.values == [Call("get_weather", {"city": "Paris", "name": "x"})]
    assert parts.content == ""


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "a\\"b\\\\"}', '{"city": "\\u00e9\\n"}', ' {\n  "city" : "x" ,\n "where":{"a":[ ]}}', "{ }"],
)
def test_arguments_in_json_are_passed_on_as_written(arguments: str) -> None:
    parts = read("hermes", f'<tool_call>{{"name":"get_weather","arguments":{arguments}}}</tool_call>')
    assert parts.calls == (("get_weather", arguments.strip()),)


def test_arguments_as_text_of_json() -> None:
    """Some models write the arguments as a string, as OpenAI's API has them."""
    text = json.dumps({"name": "get_weather", "arguments": json.dumps({"city": 'a "b"'})})
    assert read("hermes", f"<tool_call>{text}</tool_call>").values == [Call("get_weather", {"city": 'a "b"'})]


@pytest.mark.parametrize("written", ["null", '""', "{}"])
def test_models_write_several_things_for_no_arguments(written: str) -> None:
    """A call of a tool without parameters is a call, not its name and the rest as content."""
    parts = read("hermes", f'<tool_call>\n{{"name": "stop", "arguments": {written}}}\n</tool_call>')
    assert parts.content == ""
    assert parts.values == [Call("stop", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "stop", "arguments": {}, "arguments": {"a": 1}}',
        '{"name": "stop", "arguments": {}, "name": "stop"}',
        '{"name": "stop", "name": "get_weather", "arguments": {"city": "x"}}',
    ],
)
def test_a_key_that_is_repeated_leaves_arguments_that_are_json(text: str) -> None:
    """Clients parse the arguments of every call. A complete call has arguments that they can parse."""
    for _, arguments in read("hermes", f"<tool_call>{text}</tool_call>").calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a, b) ]"', "a, b) ]"),
        ("'\\u00e9\\n'", "é\n"),
        ("{'a': [1, (2, 3)], \"b\": None}", {"a": [1, [2, 3]], "b": None}),
        ('{"a": true, "b": null}', {"a": True, "b": None}),
        ("-1.5e3", -1500.0),
        ("True", True),
        ("false", False),
        (" None ", None),
    ],
)
def test_python_literals_become_json(source: str, value: Any) -> None:
    parts = read("lfm2", f"<|tool_call_start|>[get_weather(where={source})]<|tool_call_end|>")
    assert parts.values == [Call("get_weather", {"where": value})]


def test_escapes_that_python_does_not_know_are_text() -> None:
    """Models write regular expressions in plain strings. Python warns of them, and the log gets no line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = read("lfm2", r'<|tool_call_start|>[get_weather(city="\d+")]<|tool_call_end|>')
    assert parts.values == [Call("get_weather", {"city": r"\d+"})]
    assert not caught


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("lfm2", 'get_weather(city="%s")'),
        ("hermes", '{"name": "get_weather", "arguments": {"city": "%s"}}'),
        ("hermes", '{"name": "get_weather", "arguments": "{\\"city\\": \\"%s\\"}"}'),
    ],
)
@pytest.mark.parametrize("escape", [r"\ud83d\ude00", r"\ud83d"])
def test_escaped_halves_of_characters_can_be_sent(form: str, call: str, escape: str) -> None:
    """A model that escapes half of an emoji must not end the stream by an error of the encoder."""
    begin, end = FORMATS[form].begin, FORMATS[form].end
    text = call % escape
    parts = read(form, f"{begin}{f'[{text}]' if form == 'lfm2' else text}{end}")
    [(_, arguments)] = parts.calls
    arguments.encode()
    if escape.endswith("ude00"):
        assert json.loads(arguments) == {"city": "\U0001f600"}


@pytest.mark.parametrize("source", ["open('x')", "[x for x in y]", "1 +", "nan", "float('inf')", "1j"])
def test_python_that_is_no_literal_is_never_run(source: str) -> None:
    parts = read("lfm2", f"<|tool_call_start|>[get_weather(where={source})]<|tool_call_end|>")
    assert all(not text or text == "{" for _, text in parts.calls)


XML = tool(
    "f",
    text={"type": "string"},
    number={"type": "integer"},
    ratio={"type": "number"},
    flag={"type": "boolean"},
    maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
    either={"type": ["string", "integer"]},
    colour={"enum": ["red", "blue"]},
    many={"type": "array"},
    free={},
)


def read_xml(name: str, value: str) -> Any:
    text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    [call] = read("qwen_xml", text, tools={"f": XML.parameters}).values
    assert list(call.values) == [name]
    return call.values[name]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "null", "null"),
        ("text", "", ""),
        ("text", " two\n\nlines \n", " two\n\nlines \n"),
        ("text", 'say "é" \\ 北\t', 'say "é" \\ 北\t'),
        ("text", "</para </parameter", "</para </parameter"),
        ("number", "5", 5),
        ("number", "five", "five"),
        ("ratio", "-1.5", -1.5),
        ("flag", "true", True),
        ("flag", "false", False),
        ("maybe", "5", "5"),
        ("maybe", "text", "text"),
        ("maybe", "null", None),
        ("either", "5", 5),
        ("either", "x", "x"),
        ("colour", "red", "red"),
        ("many", '[1, "a"]', [1, "a"]),
        ("free", "12", 12),
        ("free", "some text", "some text"),
        ("free", '{"a": [true]}', {"a": [True]}),
        ("unknown", "x", "x"),
    ],
)
def test_the_schema_tells_the_type_of_a_value_in_tags(name: str, written: str, value: Any) -> None:
    assert read_xml(name, written) == value


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("flag", "True", True),
        ("flag", "False", False),
        ("text", "True", "True"),
        ("text", "None", "None"),
    ],
)
def test_booleans_in_tags_are_written_as_python_writes_them(name: str, written: str, value: Any) -> None:
    """The templates of Qwen3-Coder and Qwen3.5 write booleans of earlier calls by Jinja's `string`.

    So their models have learnt `True`, not `true`.
    """
    assert read_xml(name, written) == value


def test_numbers_that_json_lacks_are_strings() -> None:
    assert read_xml("ratio", "NaN") == "NaN"


TEXTS = {
    form: [
        f"<think>\nMm <tool_ [ {{ </thi \n</think>\n\n{write(form, RICH, PARIS, Call('stop', {}))}\n",
        f"  Text <tool_c <|tool_call <| </think>\n\n {FORMATS[form].begin}{write(form, RICH)} and {{[ after ",
        f"{BROKEN[form]} {write(form, Call('nothing', {'a': 1}))} {FORMATS[form].begin}",
        write(form, RICH)[:-30],
        f" \n {write(form, PARIS)} ; \n {write(form, PARIS)}",
        " \n <thin [1] {2} only text, é北🙂 \n ",
    ]
    for form in FORMATS
}


@pytest.mark.parametrize("divisions", [100, pytest.param(500, marks=pytest.mark.slow)])
@forms
def test_the_chunks_do_not_matter(form: str, divisions: int) -> None:
    """Random divisions of each text give equal pieces, joined, as the whole text at once."""
    rng = Random(form)
    for text in TEXTS[form]:
        for thinking in (False, True):
            expected = read(form, text, thinking=thinking)
            for _ in range(divisions):
                share = rng.choice((0.02, 0.2, 0.7))
                cuts = [0, *(at for at in range(1, len(text)) if rng.random() < share), len(text)]
                chunks = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
                assert read_in_chunks(form, chunks, thinking=thinking) == expected, chunks


@forms
def test_arguments_arrive_while_they_are_written(form: str) -> None:
    """A client sees a long string of JSON or of tags grow. Python's literals arrive one by one."""
    text, each = write(form, Call("get_weather", {"city": "x" * 500, "days": 2})), reader(form)
    growing = [sum(len(p.text) for p in each.push(char) if p.kind == "arguments") for char in text]
    assert max(growing) <= (530 if FORMATS[form].notation == "python" else 20)


FRAGMENTS = st.sampled_from(
    [
        "<",
        "tool_call",
        ">",
        "</tool_call>",
        "<|",
        "python_tag|>",
        "[",
        "]",
        "{",
        "}",
        '"name"',
        ":",
        " ",
        "\n",
    ]
    + ["<think", "(", ")", "é", ";", '"', "\\", "<function=", "f>"]
)


@forms
@settings(max_examples=examples(150), deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=12))
def test_no_character_of_text_without_calls_is_lost(form: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    assert read_in_chunks(form, fragments, reasons=False) == Parts(text, "", ())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@forms
@settings(max_examples=examples(100), deadline=None)
@given(city=st.text(max_size=20), where=st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_any_arguments_are_read_as_they_were_written(form: str, city: str, where: dict[str, Any]) -> None:
    call = Call("get_weather", {"city": city.replace("</parameter>", ""), "where": where})
    assert read(form, write(form, call, call)).values == [call, call]

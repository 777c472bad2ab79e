"""Grammars of tool calls: what they allow is what the reader reads, and nothing that a tool refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fovea.core.constraints import AnswerFormat, ChoiceMode, Tool, ToolUse
from fovea.core.errors import InvalidRequest
from fovea.dialects.calls import types_of
from fovea.dialects.dialect import FORMATS, Dialect, ToolFormat
from fovea.dialects.grammar import request_format
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.trial import byte_vocabulary
from tests.dialects.support import STOP, WEATHER, Call, join, tool, write
from tests.dialects.test_reader import reader

PARIS = Call("get_weather", {"city": "Paris"})
FULL = Call("get_weather", {"city": 'Zoë\'s "北京"\n\\ {[', "days": 3, "exact": True, "where": {"a": [1.5]}})
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
forms = pytest.mark.parametrize("form", FORMATS)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    tokens: LLTokenizer = byte_vocabulary()
    return tokens


class Grammar:
    """The grammar of the answers to a request."""

    def __init__(
        self,
        vocabulary: LLTokenizer,
        form: str,
        tools: Sequence[Tool] = (WEATHER, STOP),
        mode: ChoiceMode = "required",
        answer: AnswerFormat | None = None,
        **use: Any,
    ) -> None:
        self.form, self.tools = form, tools
        definition = request_format(ToolUse(tuple(tools), mode, **use), answer, Dialect(FORMATS[form]))
        assert definition is not None
        self.matcher: LLMatcher = compile_format(definition, vocabulary)

    def accepts(self, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher, tokens = self.matcher.deep_copy(), list(text.encode())
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def begins(self, text: str) -> bool:
        """Whether an answer may begin with a text."""
        tokens = list(text.encode())
        return bool(self.matcher.deep_copy().try_consume_tokens(tokens) == len(tokens))

    def read(self, text: str) -> list[Call]:
        """Return the calls of an answer, as the client gets them. The answer has to have nothing else."""
        each = reader(self.form, tools={each.name: each.parameters for each in self.tools})
        parts = join([*each.push(text), *each.finish()])
        assert parts.content == ""
        return parts.values


def written(form: str, *calls: Call) -> str:
    """Return calls as a grammar wants them: JSON's strings also in Python's notation."""
    if FORMATS[form].notation != "python":
        return write(form, *calls)
    texts = [
        f"{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in call.values.items())})"
        for call in calls
    ]
    return f"{'' if form == 'pythonic' else FORMATS[form].begin}[{', '.join(texts)}]{FORMATS[form].end}"


def _literal(value: Any) -> str:
    return repr(value) if isinstance(value, bool | None) else json.dumps(value, ensure_ascii=False)


@forms
@pytest.mark.parametrize("call", [PARIS, FULL, Call("stop", {})])
def test_a_required_call_as_its_format_writes_it(vocabulary: LLTokenizer, form: str, call: Call) -> None:
    grammar, text = Grammar(vocabulary, form), marked(form, call)
    assert grammar.accepts(text)
    assert grammar.read(text) == [call]


def marked(form: str, *calls: Call) -> str:
    """Return calls with their marks as the grammar of required calls wants them."""
    text = written(form, *calls)
    return text.removesuffix(FORMATS[form].end) if form == "pythonic" else text


@forms
def test_several_required_calls(vocabulary: LLTokenizer, form: str) -> None:
    calls = [PARIS, Call("stop", {}), FULL]
    text = marked(form, *calls)
    grammar = Grammar(vocabulary, form)
    assert grammar.accepts(text)
    assert grammar.read(text) == calls
    assert not Grammar(vocabulary, form, several=False).accepts(text)
    assert Grammar(vocabulary, form, several=False).accepts(marked(form, PARIS))


@forms
@pytest.mark.parametrize(
    "call",
    [
        Call("get_wether", {"city": "Paris"}),
        Call("get_weather", {"city": 5}),
        Call("get_weather", {"city": "Paris", "days": "x"}),
        Call("get_weather", {"city": "Paris", "days": 1.5}),
        Call("get_weather", {"city": "Paris", "exact": 1}),
        Call("get_weather", {"city": "Paris", "where": [1]}),
        Call("get_weather", {"days": 1}),
        Call("get_weather", {}),
    ],
)
def test_wrong_names_and_arguments_are_refused(vocabulary: LLTokenizer, form: str, call: Call) -> None:
    if form == "qwen_xml" and call.values == {"city": 5}:
        pytest.skip("all text between tags is a string there")
    assert not Grammar(vocabulary, form).accepts(marked(form, call))


@forms
@pytest.mark.parametrize("text", ["", "Hello", "I will call: ", "\n\n"])
def test_a_required_call_has_no_text_before_it(vocabulary: LLTokenizer, form: str, text: str) -> None:
    grammar = Grammar(vocabulary, form)
    assert not grammar.accepts(text)
    assert not grammar.accepts(text + marked(form, PARIS) if text else "")


@forms
def test_a_named_tool_is_the_only_one(vocabulary: LLTokenizer, form: str) -> None:
    grammar = Grammar(vocabulary, form, only="stop", several=False)
    assert grammar.accepts(marked(form, Call("stop", {})))
    assert not grammar.accepts(marked(form, PARIS))


@forms
def test_optional_arguments_in_any_selection(vocabulary: LLTokenizer, form: str) -> None:
    grammar = Grammar(vocabulary, form)
    for names in (["days"], ["exact"], ["where"], ["days", "where"], ["exact", "where"]):
        values = {"city": "Paris", **{name: FULL.values[name] for name in names}}
        text = marked(form, Call("get_weather", values))
        assert grammar.accepts(text), text
        assert grammar.read(text) == [Call("get_weather", values)]


OPTIONAL = tool("f", a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"})


@forms
def test_a_tool_without_required_arguments(vocabulary: LLTokenizer, form: str) -> None:
    grammar = Grammar(vocabulary, form, [OPTIONAL])
    for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        call = Call("f", dict.fromkeys(names, 7))
        text = marked(form, call)
        assert grammar.accepts(text), text
        assert grammar.read(text) == [call]


@forms
@pytest.mark.parametrize("text", ["", "It is sunny.", "a < b | <tool [x] {y}\n\n", "<tool_cal", "[", "{}"])
def test_free_answers_may_be_text(vocabulary: LLTokenizer, form: str, text: str) -> None:
    """Where calls need no mark, text must not begin like one: it could be a call that is not strict."""
    accepted = Grammar(vocabulary, form, [STRICT, STOP], "auto").accepts(text)
    assert accepted == (not FORMATS[form].bare or text not in ("[", "{}"))


STRICT = tool(
    "get_weather", strict=True, required=("city",), city={"type": "string"}, days={"type": "integer"}
)


def after_text(form: str, *calls: Call) -> str:
    """Return calls with the mark that they have after text."""
    begin, end = FORMATS[form].begin, FORMATS[form].end
    text = written(form, *calls)
    text = text if text.startswith(begin) else begin + text
    return text if text.endswith(end) else text + end


@forms
def test_free_answers_may_call_after_text(vocabulary: LLTokenizer, form: str) -> None:
    grammar = Grammar(vocabulary, form, [STRICT], "auto")
    call = Call("get_weather", {"city": "Paris", "days": 2})
    for text in ("", "I will look.\n\n", "a <tool_cal < b "):
        assert grammar.accepts(text + after_text(form, call)), text
    assert grammar.accepts("Both:\n" + after_text(form, call, call))


@forms
def test_free_answers_cannot_break_the_schema_of_a_strict_tool(vocabulary: LLTokenizer, form: str) -> None:
    grammar = Grammar(vocabulary, form, [STRICT], "auto")
    for values in ({"days": 2}, {"city": "Paris", "days": "two"}, {}):
        assert not grammar.accepts("So: " + after_text(form, Call("get_weather", values)))
    assert not grammar.accepts(after_text(form, Call("launch_rocket", {})))


@pytest.mark.parametrize("form", [name for name in FORMATS if FORMATS[name].bare])
def test_a_strict_tool_is_strict_without_a_mark_too(vocabulary: LLTokenizer, form: str) -> None:
    """Llama writes calls without a mark, and the reader reads them. They follow the schema all the same."""
    grammar = Grammar(vocabulary, form, [STRICT], "auto")
    good = Call("get_weather", {"city": "Paris", "days": 2})
    assert grammar.accepts(marked(form, good))
    bad = marked(form, Call("get_weather", {"city": "Paris", "days": "two"}))
    assert not (grammar.accepts(bad) and grammar.read(bad))


@forms
def test_tools_that_are_not_strict_may_get_any_arguments(vocabulary: LLTokenizer, form: str) -> None:
    """They stand beside a strict one, which is why there is a grammar."""
    grammar = Grammar(vocabulary, form, [STRICT, tool("look", place={"type": "string"})], "auto")
    assert grammar.accepts(after_text(form, Call("look", {"place": "here"})))


@forms
def test_the_answer_is_a_call_or_of_the_form_of_the_request(vocabulary: LLTokenizer, form: str) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    answer = AnswerFormat.json_schema(schema, param="response_format")
    if form == "llama":
        with pytest.raises(InvalidRequest, match="without a mark"):
            Grammar(vocabulary, form, (WEATHER, STOP), "auto", answer)
        return
    grammar = Grammar(vocabulary, form, (WEATHER, STOP), "auto", answer)
    assert grammar.accepts('{"sum": 3}')
    assert grammar.accepts(marked(form, Call("stop", {})))
    assert grammar.accepts(marked(form, PARIS)), "the tool is not strict, so any arguments will do"
    assert not grammar.accepts("text")
    assert not grammar.accepts('{"sum": "x"}')


@forms
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (NULLABLE, ["Paris", None]),
        ({"type": ["string", "null"]}, ["Paris", None]),
        ({"enum": ["red", "blue"]}, ["red"]),
        ({"type": "string", "enum": ["red", "a \"b\" \\"]}, ['a "b" \\']),
        ({"const": "red"}, ["red"]),
        ({"type": "string", "const": "red"}, ["red"]),
        ({"enum": ["red", 1, None]}, ["red", 1, None]),
        ({"type": ["boolean", "null"]}, [True, False, None]),
        ({"type": ["integer", "null"]}, [5, None]),
        ({"type": "number"}, [1.5, -2, 1e30]),
        ({"type": "array", "items": {"type": "string"}}, [["a", "b]"], []]),
        ({"$ref": "#/$defs/colour"}, ["red"]),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}}, [{"a": True}]),
    ],
)  # fmt: skip
def test_values_of_all_types_come_back(
    vocabulary: LLTokenizer, form: str, schema: Mapping[str, Any], values: list[Any]
) -> None:
    """The client gets what a grammar forces the model to write, with the type of the schema."""
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"colour": {"type": "string", "enum": ["red"]}},
    }
    grammar = Grammar(vocabulary, form, [Tool("f", parameters, {})])
    for value in values:
        spellings = {marked(form, Call("f", {"x": value}))}
        if form == "qwen_xml" and not types_of(schema) & {"string"}:
            spellings.add(marked(form, Call("f", {"x": 0})).replace("\n0\n", f"\n{json.dumps(value)}\n"))
        if FORMATS[form].notation == "python":
            spellings.add(marked(form, Call("f", {"x": 0})).replace("=0", f"={json.dumps(value)}"))
        accepted = [text for text in spellings if grammar.accepts(text)]
        assert accepted, f"no spelling of {value!r} is accepted"
        for text in accepted:
            assert grammar.read(text) == [Call("f", {"x": value})], text


@forms
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "const": "red"}, "blue"),
        ({"type": "string", "enum": ["red"]}, "blue"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "BLUE"),
        ({"type": "string", "maxLength": 3}, "blue"),
        ({"type": "string", "format": "date"}, "blue"),
        ({"type": "integer", "minimum": 5}, 3),
        ({"type": "boolean", "const": True}, False),
    ],
)
def test_the_keywords_of_a_schema_hold(
    vocabulary: LLTokenizer, form: str, schema: Mapping[str, Any], value: Any
) -> None:
    """A required call always follows the schema; where a dialect cannot do that, the schema is refused."""
    try:
        grammar = Grammar(vocabulary, form, [tool("f", required=("x",), x=schema)])
    except InvalidRequest:
        return
    assert not grammar.accepts(marked(form, Call("f", {"x": value})))


@forms
@pytest.mark.parametrize("name", ["get_weather", "a.b", "mcp-server", "fs:read", "files/read", "9lives"])
def test_a_tool_may_have_any_name_that_the_api_accepts(vocabulary: LLTokenizer, form: str, name: str) -> None:
    grammar, call = Grammar(vocabulary, form, [tool(name, a={"type": "integer"})]), Call(name, {"a": 1})
    assert grammar.accepts(marked(form, call))
    assert grammar.read(marked(form, call)) == [call]


@forms
@pytest.mark.parametrize("name", ["größe", "user-id", "a.b", "$filter", "@type", "first name", "x[]"])
def test_a_parameter_may_have_any_name(vocabulary: LLTokenizer, form: str, name: str) -> None:
    """Tools of MCP servers have parameters such as $filter. A grammar that cannot be read helps nobody."""
    call = Call("f", {name: 1})
    parameters = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    try:
        grammar = Grammar(vocabulary, form, [Tool("f", parameters, {})])
    except InvalidRequest:
        return
    assert grammar.accepts(marked(form, call))
    assert grammar.read(marked(form, call)) == [call]


@forms
def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(
    vocabulary: LLTokenizer, form: str
) -> None:
    """`type` may be left out. In JSON Schema, a number is valid against `properties` then."""
    parameters = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = Grammar(vocabulary, form, [Tool("f", parameters, {})])
    assert grammar.accepts(marked(form, Call("f", {"a": 1})))
    if FORMATS[form].notation == "json":
        whole = marked(form, Call("f", {"a": 1}))
        assert not grammar.accepts(whole.replace('{"a": 1}', "5"))
        assert not grammar.accepts(whole.replace('{"a": 1}', '"text"'))


def letters(form: ToolFormat, *, special: bool) -> Tokenizer:
    """Return a tokenizer of single bytes, an end token, and two tokens for the marks of a format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    marks = [AddedToken(mark, special=special, normalized=False) for mark in (form.begin, form.end)]
    if special:
        raw.add_special_tokens(marks)
    else:
        raw.add_tokens(marks)
    return raw


@pytest.mark.parametrize("form", [name for name in FORMATS if FORMATS[name].special])
def test_marks_that_are_special_tokens_are_written_as_such(form: str) -> None:
    """The model has learnt the one token, not its letters. A grammar has to allow it."""
    raw = letters(FORMATS[form], special=True)
    grammar = Grammar(LLTokenizer(raw.to_str(), eos_token=256), form, [STRICT], "auto")
    ids = raw.encode("Yes. " + after_text(form, PARIS)).ids
    assert {257, 258} < set(ids)
    assert grammar.matcher.try_consume_tokens(ids) == len(ids)
    assert grammar.matcher.is_accepting()


def test_marks_that_are_tokens_but_not_special() -> None:
    """In the vocabularies of Qwen, <tool_call> is one token with a text."""
    raw = letters(FORMATS["hermes"], special=False)
    grammar = Grammar(LLTokenizer(raw.to_str(), eos_token=256), "hermes")
    ids = raw.encode(marked("hermes", PARIS)).ids
    assert {257, 258} < set(ids)
    assert grammar.matcher.try_consume_tokens(ids) == len(ids)


@forms
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_an_unsupported_keyword_is_named_with_its_place(
    vocabulary: LLTokenizer, form: str, mode: ChoiceMode
) -> None:
    bad = tool("f", strict=True, x={"type": "array", "items": {"not": {}}})
    with pytest.raises(InvalidRequest) as caught:
        Grammar(vocabulary, form, [STOP, bad], mode)
    message = caught.value.message
    assert message.startswith("tools[1].function.parameters")
    if FORMATS[form].notation == "json":
        assert message.startswith("tools[1].function.parameters at /properties/x/items: ")
    assert '"not"' in message


def test_tools_that_need_no_grammar() -> None:
    hermes = Dialect(FORMATS["hermes"])
    assert request_format(ToolUse((WEATHER,)), None, hermes) is None
    form = AnswerFormat.json_object()
    assert request_format(ToolUse((WEATHER,), "none"), form, hermes) is form
    assert request_format(ToolUse(), None, Dialect()) is None


@pytest.mark.parametrize(
    ("use", "answer", "dialect", "param"),
    [
        (ToolUse((WEATHER,)), None, Dialect(), "tools"),
        (ToolUse((WEATHER,), "required"), AnswerFormat.json_object(), None, "tool_choice"),
        (ToolUse((WEATHER,)), AnswerFormat.regex("a", param="guided_regex"), None, "guided_regex"),
    ],
)
def test_requests_that_contradict_themselves(
    use: ToolUse, answer: AnswerFormat | None, dialect: Dialect | None, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_format(use, answer, Dialect(FORMATS["hermes"]) if dialect is None else dialect)
    assert caught.value.param == param

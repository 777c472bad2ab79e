"""Which dialect a chat template teaches. The snippets are the parts of real templates that tell it."""

from __future__ import annotations

import pytest

from fovea.dialects.dialect import FORMATS, THINK, Dialect, detect, dialect_of

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object within <tool_call></tool_call>:\\n" }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>' }}
{%- endif %}
{%- for message in messages %}{{- message.content }}{%- endfor %}"""
QWEN3 = (
    HERMES
    + """{%- if message.reasoning_content is string %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"""
)
QWEN_XML = """{%- if tools %}
    {{- "If you choose to call a function ONLY reply in the following format:\\n\\n<tool_call>\\n" }}
    {{- "<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n" }}
    {{- "</function>\\n</tool_call>" }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
{%- set content = content.split('</think>')[-1] %}"""
LLAMA3 = """{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its' }}
    {{- ' value}. Do not use variables.\\n\\n' }}
{%- endif %}
{%- for message in messages %}{%- if 'tool_calls' in message %}
    {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}
    {%- if builtin_tools is defined %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}{%- endif %}
{%- endif %}{%- endfor %}"""
LLAMA3_2 = LLAMA3.replace('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "")
LLAMA4 = """{%- if tools is not none %}
    {{- "If you decide to invoke any function(s), put them in the format of "}}
    {{- "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]" }}
{%- endif %}
{%- if 'tool_calls' in message %}{{- '<|python_start|>' }}{{- message.content }}{{- '<|python_end|>' }}
{%- for tool_call in message.tool_calls %}{{- '{"name": "' + tool_call.function.name + '", ' }}
{{- '"parameters": ' }}{{- tool_call.function.arguments | tojson }}{%- endfor %}{%- endif %}"""
LFM2 = """{%- if tools %}{%- set ns.system_prompt = "List of tools: <|tool_list_start|>[" %}
    {%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{- "]<|tool_list_end|>" }}{%- endif %}
{%- for call in message.tool_calls %}{{- '<|tool_call_start|>[' + calls | join(', ') + ']' }}
{{- '<|tool_call_end|>' }}{%- endfor %}"""
GLM = """[gMASK]<sop>{%- if tools %}
    {{- "For each function call, output the function name and arguments within the following XML format:" }}
    {{- "\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n" }}
    {{- "<arg_value>{arg-value-1}</arg_value>\\n</tool_call>" }}
{%- endif %}
{%- for m in messages %}{{- '<think>' + reasoning_content + '</think>' }}{{- m.content }}{%- endfor %}"""
PLAIN = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
THINKING = PLAIN + "{% if enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasons"),
    [
        (HERMES, "hermes", False),
        (QWEN3, "hermes", True),
        (QWEN_XML, "qwen_xml", True),
        (GLM, None, True),
        (LLAMA3, "llama", False),
        (LLAMA3_2, "llama", False),
        (LLAMA4, "pythonic", False),
        (LFM2, "lfm2", False),
        (PLAIN, None, False),
        (THINKING, None, True),
        ("", None, False),
        (None, None, False),
    ],
)
def test_the_template_tells_the_dialect(template: str | None, tools: str | None, reasons: bool) -> None:
    assert detect(template) == Dialect(FORMATS[tools] if tools else None, THINK if reasons else None)


def test_marks_alone_are_no_tools() -> None:
    """A template that writes earlier calls, but has no place for definitions, teaches nothing."""
    assert detect("{{ '<tool_call>' + message.content + '</tool_call>' }}").tools is None


@pytest.mark.parametrize("name", FORMATS)
def test_the_name_of_a_dialect_says_all(name: str) -> None:
    """The server knows the dialect by the two fields of `ModelInfo` alone."""
    assert dialect_of(name, True) == Dialect(FORMATS[name], THINK)
    assert dialect_of(name, False) == Dialect(FORMATS[name])


def test_a_model_without_tools_and_reasoning() -> None:
    assert dialect_of("", False) == Dialect()

"""The dialects of models: which marks enclose reasoning and tool calls, and how calls look.

A model learns its dialect from its chat template, so the template tells which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Notation = Literal["json", "python", "xml"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls.

    name: name of the format in settings.
    notation: how calls are written inside their marks: as JSON objects, as a list of Python calls, or as
        tags.
    begin, end: the mark before the calls, and the one after them; "": none.
    bare: calls may also come without a mark, if the answer begins with them.
    arguments: key of the arguments in JSON.
    newline: whether there is a line break between the marks and the calls, as the template writes it.
    separator: text between two calls, outside of marks.
    special: the marks are special tokens, so they are missing from a text without special tokens.
    """

    name: str
    notation: Notation
    begin: str = ""
    end: str = ""
    bare: bool = False
    arguments: str = "arguments"
    newline: bool = False
    separator: str = "\n"
    special: bool = False


FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat("hermes", "json", "<tool_call>", "</tool_call>", newline=True),
        ToolFormat("llama", "json", "<|python_tag|>", bare=True, arguments="parameters", separator="; "),
        ToolFormat("pythonic", "python", "<|python_start|>", "<|python_end|>", bare=True, special=True),
        ToolFormat("lfm2", "python", "<|tool_call_start|>", "<|tool_call_end|>", special=True),
        ToolFormat("qwen_xml", "xml", "<tool_call>", "</tool_call>", newline=True),
    )
}
"""hermes: Qwen2.5 and Qwen3. llama: Llama 3. pythonic: Llama 4. lfm2: LFM2. qwen_xml: Qwen3.5."""
THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes.

    tools: format of its tool calls; None: calls are not read, because the template or a setting says so.
    reasoning: marks before and after its reasoning; None: it writes none.
    """

    tools: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None


def dialect_of(tool_format: str, reasons: bool) -> Dialect:
    """Return the dialect of a model by what its `ModelInfo` says."""
    return Dialect(FORMATS.get(tool_format), THINK if reasons else None)


def detect(template: str | None) -> Dialect:
    """Return the dialect that a chat template teaches.

    template: its Jinja source; None: the model has none.
    """
    source = template or ""
    return Dialect(_tool_format(source), THINK if THINK[1] in source else None)


def _tool_format(source: str) -> ToolFormat | None:
    if "tools" not in source or "<arg_key>" in source:  # GLM writes arguments as tags, which are not read
        return None
    if "<tool_call>" in source:
        return FORMATS["qwen_xml" if "<function=" in source else "hermes"]
    for name in ("lfm2", "pythonic"):
        if FORMATS[name].begin in source:
            return FORMATS[name]
    return FORMATS["llama"] if "<|python_tag|>" in source or '"parameters"' in source else None

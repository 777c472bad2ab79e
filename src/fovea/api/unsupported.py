"""Fields of OpenAI's API that this server cannot carry out."""

from __future__ import annotations

UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "tools": ("tool calls are not supported", (None, [])),
    "tool_choice": ("tool calls are not supported", (None, "none", "auto")),
    "parallel_tool_calls": ("tool calls are not supported", (None, True, False)),
    "functions": ("tool calls are not supported", (None, [])),
    "function_call": ("tool calls are not supported", (None, "none", "auto")),
    "tool_calls": ("tool calls are not supported", (None, [])),
    "tool_call_id": ("tool calls are not supported", (None,)),
    "audio": ("audio is not supported", (None,)),
    "modalities": ("only text is produced", (None, ["text"])),
    "reasoning_effort": ("reasoning effort is not supported", (None, "none")),
    "web_search_options": ("web search is not supported", (None,)),
    "echo": ("echo is not supported", (None, False)),
    "suffix": ("suffix is not supported", (None, "")),
    "best_of": ("best_of (use n) is not supported", (None, 1)),
}
"""The reason of each refusal, and the values that ask for nothing and are accepted, by the field's name."""

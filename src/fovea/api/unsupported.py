"""Fields of OpenAI's API that this server cannot carry out."""

from __future__ import annotations

UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "functions": ("the older form of tools is not supported; send tools", (None, [])),
    "function_call": ("the older form of tools is not supported; send tool_choice", (None, "none", "auto")),
    "audio": ("audio is not supported", (None,)),
    "modalities": ("only text is produced", (None, ["text"])),
    "web_search_options": ("web search is not supported", (None,)),
    "suffix": ("suffix is not supported", (None, "")),
}
"""The reason of each refusal, and the values that ask for nothing and are accepted, by the field's name."""

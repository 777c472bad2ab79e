"""Tools that a model may call, the calls that it has made, and what a request allows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ChoiceMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run.

    name: the model calls it by this name.
    parameters: JSON Schema of the arguments, an object.
    definition: the whole definition in OpenAI's form, as chat templates get it.
    strict: whether arguments must follow the schema also where the model is free to call or not.
    """

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has made earlier in a conversation.

    arguments: JSON text as the model wrote it, whole or not.
    id: names the call; the message with its result repeats it.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and which calls it allows.

    tools: in the client's order.
    mode: auto: the model decides; none: no call; required: after its reasoning, the answer is calls alone.
    several: whether one answer may make more than one call.
    only: name of the one tool that may be called; "": any.
    """

    tools: tuple[Tool, ...] = ()
    mode: ChoiceMode = "auto"
    several: bool = True
    only: str = ""

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model gets to see."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[tuple[Tool, int], ...]:
        """The tools that the answer may call, each with its number in the request."""
        numbered = ((tool, number) for number, tool in enumerate(self.offered))
        return tuple(pair for pair in numbered if self.only in ("", pair[0].name))


NO_TOOLS = ToolUse()

"""Tool calls about a scene: requests that the model answers by calling one of the tools that it is offered.

A call is written as hermes models write it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from fovea.evaluation.scenes.focus import boxes_around, evidence
from fovea.evaluation.scenes.phrasing import by_colour, by_name, by_shape, pick
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.vocabulary import CELLS, SHAPES, plural

Tool = Mapping[str, Any]


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> Tool:
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


SAVE_COUNT = _tool(
    "save_count",
    "Saves how many objects of a shape there are.",
    {"shape": {"type": "string", "enum": list(SHAPES)}, "count": {"type": "integer", "minimum": 0}},
)
LOOK_UP = _tool("look_up", "Looks up what is known about a code.", {"code": {"type": "string"}})
POINT_AT = _tool(
    "point_at", "Points at a place in the image.", {"position": {"type": "string", "enum": list(CELLS)}}
)
TOOLS: tuple[Tool, ...] = (SAVE_COUNT, LOOK_UP, POINT_AT)
"""The tools that fovea-tiny has learnt to call."""
_DONE = {"ok": True}


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tool_use(rng: Random, scene: Scene) -> tuple[Turn, ...] | None:
    """A request that needs a tool, and what the tool returns; None: the scene does not suit the chosen tool.

    The answer to the first turn is a call. The second turn has the role `tool` and brings the result.
    """
    return rng.choice((_save_count, _look_up, _point_at))(rng, scene)


def _save_count(rng: Random, scene: Scene) -> tuple[Turn, ...]:
    present = [item.shape for item in scene.items]
    shape = rng.choice([*present, rng.choice(SHAPES)])
    forms = ("Save the number of {}.", "Save how many {} there are.", "Count the {} and save the number.")
    arguments = {"shape": shape, "count": len(scene.matching(shape=shape))}
    answer = call_text("save_count", arguments)
    question = rng.choice(forms).format(plural(shape))
    return Turn(question, answer, (answer,), evidence(scene, None, shape)), _result(_DONE, "Done.")


def _look_up(rng: Random, scene: Scene) -> tuple[Turn, ...] | None:
    if len(scene.labels) != 1:
        return None
    [label] = scene.labels
    forms = ("Look up the code.", "Look up the text in the image.", "Read the code and look it up.")
    answer = call_text("look_up", {"code": label.text})
    name, value = rng.choice(("price", "number")), rng.randint(1, 99)
    first = Turn(rng.choice(forms), answer, (answer,), boxes_around(scene, label))
    return first, _result({name: value}, f"The {name} is {value}.")


def _point_at(rng: Random, scene: Scene) -> tuple[Turn, ...] | None:
    reference = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if reference is None:
        return None
    item, noun = reference
    answer = call_text("point_at", {"position": item.place})
    forms = ("Point at the {}.", "Point to the {}.", "Show me the {}.")
    first = Turn(rng.choice(forms).format(noun), answer, (answer,), boxes_around(scene, item))
    return first, _result(_DONE, "Done.")


def _result(value: Mapping[str, Any], answer: str) -> Turn:
    return Turn(json.dumps(value), answer, (answer,), role="tool")

"""Questions whose answer is JSON or a tool call.

`structured` states the schema in the question; the answer is compact JSON with keys in the schema's order.
`form` does not name the properties: the schema of the request names them, any of them in any order, so the
answer is only right if the engine holds the model to the schema. `tool_use` is answered by calling one of the
tools on offer, written as hermes models do: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from fovea.evaluation.scenes.phrasing import boxes_around, by_colour, by_name, by_shape, evidence, pick
from fovea.evaluation.scenes.questions import counting_of, noun_of
from fovea.evaluation.scenes.scene import CELLS, COLOUR_NAMES, SHAPES, Box, Item, Scene, Turn, article, plural

Value = dict[str, object]


def _turn(rng: Random, schema: str, question: str, value: Value, focus: tuple[Box, ...]) -> Turn:
    answer = json.dumps(value, separators=(",", ":"))
    forms = ("Reply as JSON {}: {}", "Answer as JSON {}. {}", "{1} Reply as JSON {0}")
    return Turn(rng.choice(forms).format(schema, question), answer, (answer,), focus)


def _at_place(rng: Random, scene: Scene) -> Turn | None:
    if not scene.items:
        return None
    item = rng.choice(scene.items)
    question = f"What is in the {item.place}?"
    if rng.random() < 0.5:
        schema = '{"shape": string, "color": string}'
        value: Value = {"shape": item.shape, "color": item.colour}
    else:
        schema = '{"color": string, "shape": string}'
        value = {"color": item.colour, "shape": item.shape}
    return _turn(rng, schema, question, value, boxes_around(scene, item))


def _position(rng: Random, scene: Scene) -> Turn | None:
    reference = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if reference is None:
        return None
    item, noun = reference
    value: Value = {"position": item.place}
    return _turn(rng, '{"position": string}', f"Where is the {noun}?", value, boxes_around(scene, item))


def _count(rng: Random, scene: Scene) -> Turn | None:
    shade = rng.choice([*(item.colour for item in scene.items), rng.choice(COLOUR_NAMES)])
    form = rng.choice([*(item.shape for item in scene.items), rng.choice(SHAPES)])
    predicate = rng.choice(((shade, None), (None, form), (None, None)))
    question = f"How many {plural(noun_of(predicate))} are there?"
    value: Value = {"count": len(scene.matching(*predicate))}
    return _turn(rng, '{"count": integer}', question, value, evidence(scene, *predicate))


def _exists(rng: Random, scene: Scene) -> Turn | None:
    countable = counting_of(rng, scene)
    shade, form = rng.choice(COLOUR_NAMES), rng.choice(SHAPES)
    if countable is not None and scene.items and rng.random() < 0.6:
        item = rng.choice(scene.items)
        shade, form = item.colour, item.shape
    question = f"Is there {article(noun_of((shade, form)))}?"
    value: Value = {"present": bool(scene.matching(shade, form))}
    return _turn(rng, '{"present": boolean}', question, value, evidence(scene, shade, form))


def _text(rng: Random, scene: Scene) -> Turn | None:
    if len(scene.labels) != 1:
        return None
    [label] = scene.labels
    value: Value = {"text": label.text}
    return _turn(rng, '{"text": string}', "What does the text say?", value, boxes_around(scene, label))


def _objects(rng: Random, scene: Scene) -> Turn | None:
    if len(scene.items) > 5:
        return None
    schema = '{"objects": [{"shape": string, "color": string}]}'
    objects = [{"shape": item.shape, "color": item.colour} for item in scene.items]
    return _turn(rng, schema, "List the objects.", {"objects": objects}, boxes_around(scene, *scene.items))


_FAMILIES = (_at_place, _at_place, _position, _count, _exists, _text, _objects)


def structured(rng: Random, scene: Scene) -> Turn | None:
    """A question whose answer is JSON of one of six schemas; None: the scene does not suit the chosen schema.

    The schemas are: item at a place, place of an item, number, existence, text, all objects.
    """
    return rng.choice(_FAMILIES)(rng, scene)


Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_WORDS: Mapping[str, Schema] = {
    "shape": {"type": "string", "enum": list(SHAPES)},
    "color": {"type": "string", "enum": list(COLOUR_NAMES)},
    "position": {"type": "string", "enum": list(CELLS)},
}
MOST_LISTED = 4


def form(rng: Random, scene: Scene) -> Turn | None:
    """A request for an object of some properties; None: the scene does not suit the chosen request."""
    return rng.choice((_item, _whole))(rng, scene)


def _item(rng: Random, scene: Scene) -> Turn | None:
    """One item: its shape, colour and place."""
    reference = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if reference is None:
        return None
    item, noun = reference
    names = rng.sample(list(_WORDS), rng.randint(2, 3))
    question = rng.choice(("Describe the {} as JSON.", "Reply as JSON. What is the {}?")).format(noun)
    schema = _object({name: _WORDS[name] for name in names})
    return _form_turn(question, schema, _described(item, names), boxes_around(scene, item))


def _whole(rng: Random, scene: Scene) -> Turn | None:
    """The whole image: the number of its objects, its text, and the objects themselves."""
    listed = [*scene.items]
    values: dict[str, tuple[Schema, Any]] = {"count": (_NUMBER, len(listed))}
    if len(scene.labels) == 1:
        values["text"] = (_TEXT, scene.labels[0].text)
    if len(listed) <= MOST_LISTED:
        names = rng.sample(list(_WORDS), rng.randint(1, 2))
        entry = _object({name: _WORDS[name] for name in names})
        objects = [_described(item, names) for item in listed]
        values["objects"] = ({"type": "array", "items": entry, "maxItems": 9}, objects)
    chosen = rng.sample(list(values), min(len(values), rng.randint(1, 3)))
    question = rng.choice(("Describe the image as JSON.", "Reply as JSON. What is in the image?"))
    schema = _object({name: values[name][0] for name in chosen})
    focus = boxes_around(scene, *listed, *scene.labels)
    return _form_turn(question, schema, {name: values[name][1] for name in chosen}, focus)


def _described(item: Item, names: list[str]) -> dict[str, str]:
    every = {"shape": item.shape, "color": item.colour, "position": item.place}
    return {name: every[name] for name in names}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _form_turn(question: str, schema: Schema, value: Mapping[str, Any], focus: tuple[Box, ...]) -> Turn:
    answer = json.dumps(value, separators=(",", ":"))
    return Turn(question, answer, (answer,), focus, schema=schema)


Tool = Mapping[str, Any]


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> Tool:
    function = {"name": name, "description": description, "parameters": _object(properties)}
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

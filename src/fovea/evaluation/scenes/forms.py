"""Questions that ask for JSON without naming its properties: the schema of the request names them.

Any of the properties may be asked for, in any order. So the answer is only right if the engine holds the
model to the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from fovea.evaluation.scenes.focus import boxes_around
from fovea.evaluation.scenes.phrasing import by_colour, by_name, by_shape, pick
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene
from fovea.evaluation.scenes.vocabulary import CELLS, COLOUR_NAMES, SHAPES

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
    return _turn(question, schema, _described(item, names), boxes_around(scene, item))


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
    return _turn(question, schema, {name: values[name][1] for name in chosen}, focus)


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


def _turn(question: str, schema: Schema, value: Mapping[str, Any], focus: Any) -> Turn:
    answer = json.dumps(value, separators=(",", ":"))
    return Turn(question, answer, (answer,), focus, schema=schema)

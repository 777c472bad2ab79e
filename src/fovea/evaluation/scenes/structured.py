"""Questions whose answer is compact JSON of a stated schema, with keys in the schema's order."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from fovea.evaluation.scenes.focus import boxes_around, evidence
from fovea.evaluation.scenes.phrasing import by_colour, by_name, by_shape, pick
from fovea.evaluation.scenes.quantities import counting_of, noun_of
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Box, Scene
from fovea.evaluation.scenes.vocabulary import COLOUR_NAMES, SHAPES, article, plural

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


_FAMILIES: tuple[Callable[[Random, Scene], Turn | None], ...] = (
    _at_place,
    _at_place,
    _position,
    _count,
    _exists,
    _text,
    _objects,
)


def structured(rng: Random, scene: Scene) -> Turn | None:
    """A question whose answer is JSON of one of six schemas; None: the scene does not suit the chosen schema.

    The schemas are: item at a place, place of an item, number, existence, text, all objects.
    """
    return rng.choice(_FAMILIES)(rng, scene)

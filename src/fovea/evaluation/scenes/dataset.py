"""Generates samples from a seed: every kind of question, on scenes that suit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from fovea.evaluation.scenes import questions
from fovea.evaluation.scenes.chat import chat
from fovea.evaluation.scenes.compose import compose, random_size
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.questions import reading_of, refusal
from fovea.evaluation.scenes.scene import Sample, Scene, Turn
from fovea.evaluation.scenes.several_images import compare, motion
from fovea.evaluation.scenes.small import LARGE_SIZES, Question, small_object, small_text
from fovea.evaluation.scenes.structured import TOOLS, form, structured, tool_use

Size = tuple[int, int]
Content = tuple[tuple[Scene, ...], tuple[Turn, ...], dict[str, int]]

_PAIR_SIDES = (128, 160, 192, 224, 256)
MAX_COUNT = 9


def _about_one(
    ask: Callable[[Random, Scene], Turn | tuple[Turn, ...] | None], labels: tuple[int, ...] = (0, 0, 0, 1)
) -> Callable[[Random, Size], Content]:
    """Return a function that composes scenes until one suits a question. labels: choices of their number."""

    def compose_and_ask(rng: Random, size: Size) -> Content:
        while True:
            scene = compose(rng, *size, labels=rng.choice(labels))
            turns = ask(rng, scene)
            if turns is not None:
                return (scene,), (turns,) if isinstance(turns, Turn) else turns, {}

    return compose_and_ask


def _counting(rng: Random, size: Size) -> Content:
    """A counting question. Each answer of 0 to 5 has a probability of 1/8, each of 6 to 9 one of 1/16."""
    answer = rng.choice((0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9))
    while True:
        scene = compose(rng, *size, items=rng.randint(max(1, answer), 9))
        question = questions.counting_of(rng, scene, answer)
        if question is not None:
            return (scene,), (question[0],), {"count": answer}


def _reading(rng: Random, size: Size) -> Content:
    while True:
        scene = compose(rng, *size, labels=rng.choice((1, 1, 1, 2)))
        question = reading_of(rng, scene)
        if question is not None:
            turn, label = question
            return (scene,), (turn,), {"characters": len(label.text), "height": label.height}


def _compare(rng: Random, size: Size) -> Content:
    scenes, turn = compare(rng, *size)
    return scenes, (turn,), {}


def _motion(rng: Random, size: Size) -> Content:
    scenes, turn = motion(rng, *size)
    return scenes, (turn,), {"frames": len(scenes)}


def _alone(question: Question) -> Content:
    scene, turn, facts = question
    return (scene,), (turn,), facts


_CONTENTS: Mapping[str, Callable[[Random, Size], Content]] = {
    "colour": _about_one(questions.colour),
    "shape": _about_one(questions.shape),
    "position": _about_one(questions.position),
    "relation": _about_one(questions.relation),
    "existence": _about_one(questions.existence),
    "counting": _counting,
    "listing": _about_one(questions.listing),
    "describe": _about_one(questions.describe),
    "reading": _reading,
    "json": _about_one(structured),
    "compare": _compare,
    "motion": _motion,
    "refusal": _about_one(refusal),
    "chat": _about_one(chat, (0, 0, 1)),
    "small_text": lambda rng, size: _alone(small_text(rng, *size)),
    "small_object": lambda rng, size: _alone(small_object(rng, *size)),
    "tool": _about_one(tool_use, (0, 1, 1)),
    "form": _about_one(form, (0, 1, 1)),
}
ALL_KINDS = tuple(_CONTENTS)
DETAIL_KINDS: tuple[str, ...] = ("small_text", "small_object")
"""Kinds about small details in large images. They are not among the default kinds."""

TASK_KINDS: tuple[str, ...] = ("tool", "form")
"""Kinds that need more than a question: tools to call, or a schema that comes with the request.

They are not among the default kinds.
"""
KINDS = tuple(kind for kind in ALL_KINDS if kind not in (*DETAIL_KINDS, *TASK_KINDS))
"""The default kinds, in the order in which they take turns."""


def _size(rng: Random, kind: str, sizes: Sequence[Size] | None) -> Size:
    if sizes is not None:
        return rng.choice(sizes)
    if kind in ("compare", "motion"):
        return rng.choice(_PAIR_SIDES), rng.choice(_PAIR_SIDES)
    if kind in DETAIL_KINDS:
        return rng.choice(LARGE_SIZES)
    return random_size(rng)


def content(kind: str, rng: Random, size: Size) -> Content:
    """The scenes, turns and facts of one sample, not drawn yet. size: (width, height) in pixels."""
    return _CONTENTS[kind](rng, size)


def generate(
    seed: int, count: int, kinds: Sequence[str] = KINDS, sizes: Sequence[Size] | None = None
) -> Iterator[Sample]:
    """`count` samples, the kinds in turn. A sample depends only on the seed, its index, its kind and `sizes`.

    Raises ValueError for unknown kinds, and for none.

    kinds: names from ALL_KINDS.
    sizes: choices of (width, height) in pixels. None: 128 to 896 per side, mostly small, a fifth of them not
        multiples of 32; for compare and motion 128 to 256; for DETAIL_KINDS `LARGE_SIZES`.
    """
    unknown = sorted(set(kinds) - set(ALL_KINDS))
    if unknown or not kinds:
        raise ValueError(f"unknown kinds {unknown}, there are {', '.join(ALL_KINDS)}")
    for index in range(count):
        kind = kinds[index % len(kinds)]
        rng = Random(f"{seed}/{index}/{kind}")
        size = _size(rng, kind, sizes)
        scenes, turns, facts = content(kind, rng, size)
        facts |= {"width": size[0], "image_height": size[1]}
        images = tuple(draw(scene) for scene in scenes)
        tools = TOOLS if kind == "tool" else ()
        yield Sample(f"{kind}-{seed}-{index}", kind, images, turns, facts, tools)

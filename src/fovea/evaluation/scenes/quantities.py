"""Questions about how many there are: whether any, and exactly how many."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import evidence
from fovea.evaluation.scenes.phrasing import BRIEF_NUMBER, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.vocabulary import COLOUR_NAMES, SHAPES, article, plural

Predicate = tuple[str | None, str | None]


def noun_of(predicate: Predicate) -> str:
    """(colour, shape), either of them None for any, as a noun phrase."""
    shade, form = predicate
    return " ".join(filter(None, (shade, form or "object")))


def _predicates(rng: Random, scene: Scene) -> dict[Predicate, int]:
    """Predicates worth asking about, near misses included, with how many items each has."""
    pairs: set[Predicate] = {(None, None)}
    for item in scene.items:
        other_shade, other_form = rng.choice(COLOUR_NAMES), rng.choice(SHAPES)
        pairs |= {(item.colour, item.shape), (item.colour, None), (None, item.shape)}
        pairs |= {(item.colour, other_form), (other_shade, item.shape)}
    pairs |= {(rng.choice(COLOUR_NAMES), None), (None, rng.choice(SHAPES))}
    if len(scene.items) > 1:
        first, second = rng.sample(scene.items, 2)
        pairs.add((first.colour, second.shape))
    ordered = sorted(pairs, key=lambda pair: (pair[0] or "", pair[1] or ""))
    return {pair: len(scene.matching(*pair)) for pair in ordered}


def existence(rng: Random, scene: Scene) -> Turn | None:
    """Is there such a thing? Yes and no are equally likely; most noes are near misses."""
    counts = _predicates(rng, scene)
    del counts[(None, None)]
    wanted = rng.random() < 0.5
    candidates = [pair for pair, count in counts.items() if (count > 0) == wanted]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    forms = ("Is there {} in the image?", "Is there {}?", "Can you see {}?", "Does the image show {}?")
    question = rng.choice(forms).format(article(noun))
    full = f"yes, there is {article(noun)}" if wanted else f"no, there is no {noun}"
    return turn(rng, question, "yes" if wanted else "no", full, focus=evidence(scene, *predicate))


def counting_of(rng: Random, scene: Scene, wanted: int | None = None) -> tuple[Turn, int] | None:
    """A counting question whose answer is `wanted` (None: each count the scene offers is equally likely)."""
    counts = _predicates(rng, scene)
    offered = sorted(set(counts.values()))
    number = rng.choice(offered) if wanted is None else wanted
    candidates = [pair for pair, count in counts.items() if count == number]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    forms = (
        "How many {} are there?",
        "How many {} are in the image?",
        "How many {} can you see?",
        "Count the {}.",
    )
    question = rng.choice(forms).format(plural(noun))
    full = f"there is 1 {noun}" if number == 1 else f"there are {number} {plural(noun)}"
    return turn(rng, question, str(number), full, BRIEF_NUMBER, evidence(scene, *predicate)), number


def counting(rng: Random, scene: Scene) -> Turn | None:
    """How many of a colour, a shape, both, or objects at all; 0..9."""
    found = counting_of(rng, scene)
    return None if found is None else found[0]

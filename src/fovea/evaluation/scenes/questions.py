"""Questions about one scene, answered in words: one function per kind.

They ask for attributes of an item, relations of two items, quantities, the text of labels, lists and
descriptions of the whole image, and for things that the scene does not have.
"""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.phrasing import (
    BRIEF_NUMBER,
    BRIEF_PLACE,
    BRIEF_TEXT,
    boxes_around,
    by_colour,
    by_name,
    by_place,
    by_shape,
    evidence,
    pick,
    place_box,
    turn,
)
from fovea.evaluation.scenes.scene import (
    CELLS,
    COLOUR_NAMES,
    SHAPES,
    Box,
    Item,
    Label,
    Scene,
    Turn,
    article,
    join_phrases,
    plural,
    sentence,
)


def colour(rng: Random, scene: Scene) -> Turn | None:
    """A question about the colour of an item, which is named by its shape or place; None: no such item."""
    reference = pick(rng, by_shape(scene), by_place(scene))
    if reference is None:
        return None
    item, noun = reference
    forms = (
        "What color is the {}?",
        "What colour is the {}?",
        "Which color does the {} have?",
        "Name the color of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(rng, question, item.colour, f"the {noun} is {item.colour}", focus=boxes_around(scene, item))


def shape(rng: Random, scene: Scene) -> Turn | None:
    """A question about the shape of an item, which is named by its colour or place; None: no such item."""
    reference = pick(rng, by_colour(scene), by_place(scene))
    if reference is None:
        return None
    item, noun = reference
    forms = (
        "What shape is the {}?",
        "Which shape is the {}?",
        "What is the shape of the {}?",
        "Name the shape of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(
        rng, question, item.shape, f"the {noun} is {article(item.shape)}", focus=boxes_around(scene, item)
    )


def _where(rng: Random, scene: Scene, item: Item, noun: str) -> Turn:
    forms = ("Where is the {}?", "In which part of the image is the {}?", "What is the position of the {}?")
    question, full = rng.choice(forms).format(noun), f"the {noun} is in the {item.place}"
    return turn(rng, question, item.place, full, BRIEF_PLACE, boxes_around(scene, item))


def position(rng: Random, scene: Scene) -> Turn | None:
    """A question about the cell of an item, or (a third of the time) about the item in a cell.

    None: no item can be named without ambiguity.
    """
    if scene.items and rng.random() < 0.33:
        item = rng.choice(scene.items)
        forms = ("What is in the {}?", "What do you see in the {}?", "Which object is in the {}?")
        full = f"there is {article(item.name)} in the {item.place}"
        question, brief = rng.choice(forms).format(item.place), ("Answer briefly.", "Color and shape only.")
        return turn(rng, question, item.name, full, brief, boxes_around(scene, item))
    reference = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if reference is None:
        return None
    return _where(rng, scene, *reference)


_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def _relations(one: Item, other: Item) -> list[str]:
    """The relations that are true of two items in different cells: `one` is ... `other`."""
    relations = []
    if one.column != other.column:
        relations.append("left of" if one.column < other.column else "right of")
    if one.row != other.row:
        relations.append("above" if one.row < other.row else "below")
    return relations


def relation(rng: Random, scene: Scene) -> Turn | None:
    """A question about the relation of two items; None: fewer than two items have an unambiguous name.

    Most are yes-or-no questions, with both answers equally likely. For two items in one row or column it may
    also be the question on which side one of them is.
    """
    names = by_name(scene) if rng.random() < 0.7 else by_shape(scene)
    if len(names) < 2:
        return None
    (one, noun), (other, other_noun) = rng.sample(names, 2)
    relations, both = _relations(one, other), boxes_around(scene, one, other)
    if len(relations) == 1 and rng.random() < 0.5:
        question = f"Where is the {noun} relative to the {other_noun}?"
        full = f"the {noun} is {relations[0]} the {other_noun}"
        return turn(rng, question, relations[0], full, ("Answer briefly.",), both)
    claim = rng.choice(relations)
    true = rng.random() < 0.5
    claim = claim if true else _OPPOSITE[claim]
    question = rng.choice(("Is the {} {} the {}?", "Is the {} to be found {} the {}?")).format(
        noun, claim, other_noun
    )
    word, full = ("yes", "yes, it is") if true else ("no", "no, it is not")
    return turn(rng, question, word, full, focus=both)


Predicate = tuple[str | None, str | None]
"""Colour and shape of items; None stands for any."""


def noun_of(predicate: Predicate) -> str:
    """A predicate as a noun phrase, such as "red circle" or "object"."""
    shade, form = predicate
    return " ".join(filter(None, (shade, form or "object")))


def _predicates(rng: Random, scene: Scene) -> dict[Predicate, int]:
    """Predicates to ask about, and how many items each matches. Some nearly match an item of the scene."""
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
    """A question about whether there is an item of a kind; None: the scene offers no such question.

    Yes and no are equally likely. If the answer is no, the scene mostly has an item that nearly matches.
    """
    counts = _predicates(rng, scene)
    del counts[(None, None)]
    yes = rng.random() < 0.5
    candidates = [pair for pair, count in counts.items() if (count > 0) == yes]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    forms = ("Is there {} in the image?", "Is there {}?", "Can you see {}?", "Does the image show {}?")
    question = rng.choice(forms).format(article(noun))
    full = f"yes, there is {article(noun)}" if yes else f"no, there is no {noun}"
    return turn(rng, question, "yes" if yes else "no", full, focus=evidence(scene, *predicate))


def counting_of(rng: Random, scene: Scene, answer: int | None = None) -> tuple[Turn, int] | None:
    """A counting question, and its answer; None: the scene offers no question with that answer.

    answer: the number to ask for; None: each count that the scene offers is equally likely.
    """
    counts = _predicates(rng, scene)
    choices = sorted(set(counts.values()))
    number = rng.choice(choices) if answer is None else answer
    candidates = [pair for pair, count in counts.items() if count == number]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    several = ("How many {} are there?", "How many {} are in the image?", "How many {} can you see?")
    forms = (*several, "Count the {}.")
    question = rng.choice(forms).format(plural(noun))
    full = f"there is 1 {noun}" if number == 1 else f"there are {number} {plural(noun)}"
    return turn(rng, question, str(number), full, BRIEF_NUMBER, evidence(scene, *predicate)), number


def counting(rng: Random, scene: Scene) -> Turn | None:
    """A question about the number of all objects, or of those with a colour, a shape or both; 0 to 9."""
    question = counting_of(rng, scene)
    return None if question is None else question[0]


def _reply(rng: Random, question: str, text: str, focus: tuple[Box, ...]) -> Turn:
    full = f'The text is "{text}".'
    if rng.random() < 0.5:
        return Turn(f"{question} {rng.choice(BRIEF_TEXT)}", text, (text, full), focus)
    return Turn(question, full, (full, text), focus)


def reading_of(rng: Random, scene: Scene) -> tuple[Turn, Label] | None:
    """A question about a label's text, and the label; None: the scene has no label.

    If there are several labels, the question names the label's row.
    """
    if not scene.labels:
        return None
    label = rng.choice(scene.labels)
    forms: tuple[str, ...] = (
        "What is the text at the {}?",
        "Read the text at the {}.",
        "What is written at the {}?",
    )
    if len(scene.labels) == 1 and rng.random() < 0.75:
        forms = (
            "What does the text say?",
            "Read the text.",
            "What text is in the image?",
            "What is written in the image?",
        )
    question = rng.choice(forms).format(label.place)
    return _reply(rng, question, label.text, boxes_around(scene, label)), label


def reading(rng: Random, scene: Scene) -> Turn | None:
    """A question about a label's text; None: the scene has no label."""
    question = reading_of(rng, scene)
    return None if question is None else question[0]


def _list(scene: Scene, question: str, names: list[str]) -> Turn:
    answer = ", ".join(names) or "none"
    return Turn(question, answer, (answer,), boxes_around(scene, *scene.items))


def listing(rng: Random, scene: Scene) -> Turn | None:
    """A question for a list of all objects, or of the colours or shapes that occur.

    Objects are listed in reading order (rows from the top, each from the left). Colours and shapes are listed
    in the order of the vocabulary, each once.
    """
    kind = rng.random()
    if kind < 0.6:
        forms = (
            "List the objects.",
            "List all objects in the image.",
            "Which objects are in the image? Give a list.",
        )
        return _list(scene, rng.choice(forms), [item.name for item in scene.items])
    if kind < 0.8:
        shades = {item.colour for item in scene.items}
        names = [name for name in COLOUR_NAMES if name in shades]
        return _list(scene, "List the colors of the objects.", names)
    shapes = {item.shape for item in scene.items}
    return _list(scene, "List the shapes in the image.", [name for name in SHAPES if name in shapes])


def describe(rng: Random, scene: Scene) -> Turn | None:
    """A question for a description: every item with its place in reading order, then labels from the top."""
    parts = [f"{article(item.name)} in the {item.place}" for item in scene.items]
    parts += [f'the text "{label.text}" at the {label.place}' for label in scene.labels]
    forms = ("Describe the image.", "What is in this image?", "What do you see?", "Describe this picture.")
    answer = sentence(join_phrases(parts) or "the image is empty")
    return Turn(rng.choice(forms), answer, (answer,), boxes_around(scene, *scene.items, *scene.labels))


def _missing(question: str, what: str, focus: tuple[Box, ...] = ()) -> Turn:
    answer = f"There is no {what}."
    return Turn(question, answer, (answer,), focus)


def _absent_name(rng: Random, scene: Scene) -> str:
    names = [f"{c} {s}" for c in COLOUR_NAMES for s in SHAPES if not scene.matching(c, s)]
    near = [n for n in names if scene.matching(colour=n.split()[0]) or scene.matching(shape=n.split()[1])]
    return rng.choice(near if near and rng.random() < 0.6 else names)


def refusal(rng: Random, scene: Scene) -> Turn | None:
    """A question about an absent item, an empty place or an absent text; None: there is no such question."""
    kind = rng.randrange(5)
    if kind == 0:
        absent = [s for s in SHAPES if not scene.matching(shape=s)]
        noun = rng.choice(absent) if absent else None
        return _missing(f"What color is the {noun}?", noun) if noun else None
    if kind == 1:
        shades = [c for c in COLOUR_NAMES if not scene.matching(colour=c)]
        noun = f"{rng.choice(shades)} object" if shades else None
        return _missing(f"What shape is the {noun}?", noun) if noun else None
    if kind == 2:
        noun = _absent_name(rng, scene)
        return _missing(f"Where is the {noun}?", noun, evidence(scene, *noun.split()))
    if kind == 3:
        empty = [place for cell, place in enumerate(CELLS) if scene.in_cell(cell) is None]
        empty = [p for p in empty if CELLS.index(p) // 3 not in {label.row for label in scene.labels}]
        place = rng.choice(empty) if empty else None
        if place is None:
            return None
        answer = f"There is nothing in the {place}."
        focus = (place_box(scene, CELLS.index(place)),)
        return Turn(f"What is in the {place}?", answer, (answer,), focus)
    return None if scene.labels else _missing("What does the text say?", "text")

"""Scenes: equal seeds give equal samples, and every answer agrees with the scene."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random

import pytest

from fovea.evaluation.scenes import HELD_OUT_SEED, KINDS, generate
from fovea.evaluation.scenes.compose import compose, random_size
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw, glyphs
from fovea.evaluation.scenes.scene import CELLS, CODE_CHARACTERS, COLOUR_NAMES, COLOURS, SHAPES, Item, Scene

SEED = HELD_OUT_SEED + 77


def draw_samples(kind: str, count: int, size: tuple[int, int] = (192, 192)):
    """Samples before drawing: (scenes, turns, facts) of each."""
    return [content(kind, Random(f"{SEED}/{kind}/{index}"), size) for index in range(count)]


def thing(scene: Scene, noun: str) -> list[Item]:
    """The items that a noun phrase means, by its words alone, without the generator's functions."""
    place = next((cell for cell in sorted(CELLS, key=len, reverse=True) if f"in the {cell}" in noun), None)
    words = re.findall(r"[a-z]+", noun.split(" in the ")[0])
    words = [re.sub(r"(?<=cross)es$|(?<!s)s$", "", word) for word in words]
    result = []
    for item in scene.items:
        column, row = int(item.x // (scene.width / 3)), int(item.y // (scene.height / 3))
        if place is not None and CELLS[3 * row + column] != place:
            continue
        if all(w in (item.colour, item.shape, "object") for w in words if w in {*COLOURS, *SHAPES, "object"}):
            result.append(item)
    return result


def test_the_same_seed_gives_the_same_pixels_and_words() -> None:
    one, two = (list(generate(SEED, 2 * len(KINDS))) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert (first.id, first.turns, dict(first.facts)) == (second.id, second.turns, dict(second.facts))
        assert [i.tobytes() for i in first.images] == [i.tobytes() for i in second.images]
    other = list(generate(SEED + 1, 2 * len(KINDS)))
    assert [sample.turns for sample in one] != [sample.turns for sample in other]


def test_every_kind_comes_in_turn_and_an_unknown_one_is_refused() -> None:
    samples = list(generate(SEED, 2 * len(KINDS), sizes=[(128, 160)]))
    assert [sample.kind for sample in samples] == [*KINDS, *KINDS]
    assert len({sample.id for sample in samples}) == len(samples)
    for sample in samples:
        assert all(image.size == (128, 160) and image.mode == "RGB" for image in sample.images)
        for turn in sample.turns:
            assert turn.accepted[0] == turn.answer
            assert turn.question
    with pytest.raises(ValueError, match="unknown kinds"):
        next(generate(SEED, 1, kinds=("smell",)))


def test_numbers_of_images() -> None:
    images = {kind: Counter(len(scenes) for scenes, _, _ in draw_samples(kind, 40)) for kind in KINDS}
    assert set(images.pop("compare")) == {2}
    assert set(images.pop("motion")) == {3, 4}
    assert all(set(numbers) == {1} for numbers in images.values())


def test_sizes_keep_their_limits() -> None:
    sizes = [random_size(Random(f"size/{index}")) for index in range(2000)]
    sides = [side for size in sizes for side in size]
    assert min(sides) >= 128
    assert max(sides) <= 896
    odd = sum(width % 32 > 0 or height % 32 > 0 for width, height in sizes) / len(sizes)
    assert 0.1 < odd < 0.3


@pytest.mark.parametrize("size", [(128, 128), (224, 160), (896, 512)])
def test_items_keep_inside_their_cell_and_labels_inside_their_row(size: tuple[int, int]) -> None:
    for index in range(150):
        scene = compose(Random(f"layout/{index}"), *size, labels=index % 4)
        wide, high = scene.width / 3, scene.height / 3
        assert len({item.cell for item in scene.items}) == len(scene.items)
        for item in scene.items:
            assert abs(item.x - (item.column + 0.5) * wide) + item.size / 2 <= wide / 2 + 0.1
            assert abs(item.y - (item.row + 0.5) * high) + item.size / 2 <= high / 2 + 0.1
            assert item.row not in {label.row for label in scene.labels}
        for label in scene.labels:
            assert set(label.text) <= set(CODE_CHARACTERS)
            assert 2 <= len(label.text) <= 6
            assert label.row * high <= label.baseline - label.height
            assert label.baseline <= (label.row + 1) * high
            assert label.x >= 0
            assert glyphs(label)[-1][2] <= scene.width


def test_pixels_have_the_colours_of_the_items() -> None:
    scene = compose(Random("pixels"), 256, 224, items=9)
    image = draw(scene)
    for item in scene.items:
        assert image.getpixel((int(item.x), int(item.y))) == item.rgb
        nearest = min(
            COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], item.rgb, strict=True))
        )
        assert nearest == item.colour


def test_colours_and_shapes_are_those_of_the_one_matching_item() -> None:
    for kind, names in (("colour", COLOUR_NAMES), ("shape", SHAPES)):
        for (scene,), (turn,), _ in draw_samples(kind, 120):
            [item] = thing(scene, turn.question.split("?")[0])
            said = [name for name in names if name in re.findall(r"[a-z]+", turn.answer)]
            assert said == [item.colour if kind == "colour" else item.shape]


def test_positions_follow_from_coordinates() -> None:
    for (scene,), (turn,), _ in draw_samples("position", 150):
        asked = turn.question.split("?")[0]
        if " in the " in asked and asked.rsplit(" in the ")[-1] in CELLS:
            [item] = thing(scene, "object in the " + asked.rsplit(" in the ")[-1])
            assert item.name in turn.answer
            continue
        [item] = thing(scene, asked)
        cell = CELLS[3 * int(item.y // (scene.height / 3)) + int(item.x // (scene.width / 3))]
        assert cell in turn.accepted


def test_counts_are_right_and_balanced() -> None:
    samples = draw_samples("counting", 400)
    for (scene,), (turn,), facts in samples:
        [number] = re.findall(r"\d", turn.answer)
        asked = turn.question.split("?")[0].removeprefix("Count ").split(".")[0]
        assert int(number) == facts["count"] == len(thing(scene, asked))
    counts = Counter(facts["count"] for _, _, facts in samples)
    assert set(counts) == set(range(10))
    assert all(30 <= counts[number] <= 75 for number in range(6))


def test_yes_and_no_are_right_and_balanced() -> None:
    yes = 0
    for (scene,), (turn,), _ in draw_samples("existence", 400):
        said = turn.answer.lower().startswith("yes")
        assert said == bool(thing(scene, turn.question.split("?")[0]))
        yes += said
    assert 150 <= yes <= 250


def test_relations_follow_from_coordinates() -> None:
    for (scene,), (turn,), _ in draw_samples("relation", 150):
        phrase = turn.question.split("?")[0]
        words = re.search(r"left of|right of|above|below|relative to", phrase)
        assert words is not None
        [one] = thing(scene, phrase[: words.start()])
        [other] = thing(scene, phrase[words.end() :])
        holds = {"left of": one.x < other.x, "right of": one.x > other.x}
        holds |= {"above": one.y < other.y, "below": one.y > other.y}
        if words.group() == "relative to":
            assert holds[next(name for name in holds if name in turn.answer)]
        else:
            assert turn.answer.lower().startswith("yes" if holds[words.group()] else "no")


def test_texts_are_those_of_the_labels() -> None:
    for (scene,), (turn,), facts in draw_samples("reading", 100):
        codes = {label.place: label for label in scene.labels}
        place = next((place for place in codes if f"at the {place}" in turn.question), next(iter(codes)))
        assert codes[place].text in turn.accepted
        assert facts == {"characters": len(codes[place].text), "height": codes[place].height}


def test_lists_and_descriptions_name_everything_in_reading_order() -> None:
    for (scene,), (turn,), _ in draw_samples("listing", 100):
        if "objects" in turn.question and "colors" not in turn.question:
            assert turn.answer.split(", ") == [i.name for i in sorted(scene.items, key=lambda i: i.cell)] or (
                turn.answer == "none" and not scene.items
            )
    for (scene,), (turn,), _ in draw_samples("describe", 60):
        assert all(f"{item.name} in the {item.place}" in turn.answer for item in scene.items)
        assert all(f'"{label.text}"' in turn.answer for label in scene.labels)


def test_json_answers_have_the_schema_of_the_question() -> None:
    types = {"string": str, "integer": int, "boolean": bool, "array": list}
    for (scene,), (turn,), _ in draw_samples("json", 200):
        schema = re.search(r"\{.*\}", turn.question)
        assert schema is not None
        fields = re.findall(r'"(\w+)": (string|integer|boolean|\[)', schema.group())
        value = json.loads(turn.answer)
        assert json.dumps(value, separators=(",", ":")) == turn.answer
        if "objects" in value:
            pairs = [(entry["color"], entry["shape"]) for entry in value["objects"]]
            assert pairs == [(item.colour, item.shape) for item in scene.items]
            continue
        assert list(value) == [name for name, _ in fields]
        for name, kind in fields:
            assert type(value[name]) is types[kind]
        if "count" in value:
            asked = re.search(r"How many (.*) are there", turn.question)
            assert asked is not None
            assert value["count"] == len(thing(scene, asked.group(1)))


def test_refusals_are_about_absent_things() -> None:
    for (scene,), (turn,), _ in draw_samples("refusal", 200):
        assert turn.answer.startswith(("There is no ", "There is nothing in the "))
        if turn.answer.startswith("There is nothing"):
            assert not thing(scene, "object" + turn.answer.removeprefix("There is nothing").rstrip("."))
        elif turn.answer == "There is no text.":
            assert not scene.labels
        else:
            assert not thing(scene, turn.answer)


def test_answers_about_pairs_and_motion_are_right() -> None:
    for (one, two), (turn,), _ in draw_samples("compare", 200):
        first, second = turn.answer.lower().rstrip("."), (one.items == two.items)
        if "same" in turn.question or "equal" in turn.question:
            assert first.startswith("yes" if second else "no")
        elif "more" in turn.question:
            counts = [len(thing(scene, turn.question.split("more")[1])) for scene in (one, two)]
            word = "first" if counts[0] > counts[1] else "second" if counts[1] > counts[0] else "neither"
            assert word in " ".join(turn.accepted)
    steps = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
    for frames, (turn,), _ in draw_samples("motion", 100):
        still = set.intersection(*({(i.name, i.x, i.y) for i in frame.items} for frame in frames))
        moved = [[i for i in frame.items if (i.name, i.x, i.y) not in still] for frame in frames]
        assert all(len(items) == 1 for items in moved)
        start, end = moved[0][0], moved[-1][0]
        assert start.name in turn.question + turn.answer
        for direction, (across, down) in steps.items():
            if direction in re.findall("[a-z]+", turn.answer):
                assert (end.x - start.x) * across + (end.y - start.y) * down > 0


def test_conversations_have_several_turns() -> None:
    lengths = Counter(len(turns) for _, turns, _ in draw_samples("chat", 100))
    assert min(lengths) >= 2
    assert max(lengths) <= 5


def test_held_out_seeds_share_nothing_with_training_seeds() -> None:
    words = [{s.turns for s in generate(seed, 60, sizes=[(192, 192)])} for seed in (1, HELD_OUT_SEED)]
    pixels = [
        {image.tobytes() for s in generate(seed, 60, sizes=[(192, 192)]) for image in s.images}
        for seed in (1, HELD_OUT_SEED)
    ]
    assert words[0] != words[1]
    assert not pixels[0] & pixels[1]

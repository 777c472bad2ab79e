"""Questions about small details in large images: sizes, facts and answers."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS, generate
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import FONTS, font
from fovea.evaluation.scenes.small import LARGE_SIZES, compose_small


def draw_samples(kind: str, count: int = 200):
    """Samples before drawing: (scene, turn, facts) of each."""
    for index in range(count):
        rng = Random(f"small/{kind}/{index}")
        (scene,), (turn,), facts = content(kind, rng, rng.choice(LARGE_SIZES))
        yield scene, turn, facts


def test_these_kinds_are_available_by_name_only() -> None:
    assert not set(DETAIL_KINDS) & set(KINDS)
    samples = list(generate(HELD_OUT_SEED, 4, DETAIL_KINDS))
    assert [sample.kind for sample in samples] == [*DETAIL_KINDS, *DETAIL_KINDS]


def test_the_same_seed_gives_the_same_pixels_and_words() -> None:
    one, two = (list(generate(HELD_OUT_SEED, 6, DETAIL_KINDS)) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert (first.id, first.turns, dict(first.facts)) == (second.id, second.turns, dict(second.facts))
        assert [i.tobytes() for i in first.images] == [i.tobytes() for i in second.images]
    assert len({sample.turns for sample in one}) == len(one)


def test_images_are_large() -> None:
    assert (640, 640) in LARGE_SIZES
    assert {(1344, 896), (896, 1344)} <= set(LARGE_SIZES)
    for width, height in LARGE_SIZES:
        assert width % 32 == height % 32 == 0
        assert 640 <= min(width, height) <= max(width, height) <= 1344
        assert width * height <= 1344 * 896
    for sample in generate(HELD_OUT_SEED, 4, DETAIL_KINDS):
        assert sample.images[0].size in LARGE_SIZES
        assert sample.images[0].size == (sample.facts["width"], sample.facts["image_height"])
    assert next(generate(1, 1, ("small_text",), [(640, 704)])).images[0].size == (640, 704)


def test_small_texts() -> None:
    heights, labels = Counter(), Counter()
    for scene, turn, facts in draw_samples("small_text"):
        [label] = [label for label in scene.labels if label.text in turn.accepted]
        assert facts == {"characters": len(label.text), "height": label.height}
        assert 3 <= len(label.text) <= 6
        assert len(scene.items) <= 4
        assert len(scene.labels) == 1 or f"at the {label.place}" in turn.question
        heights[label.height] += 1
        labels[len(scene.labels)] += 1
    assert set(heights) == set(range(13, 19))
    assert set(labels) == {1, 2}


@pytest.mark.parametrize("name", FONTS)
def test_capitals_have_the_given_height(name: str) -> None:
    for height in range(13, 19):
        assert height <= -font(name, height).getbbox("H", anchor="ls")[1] <= height + 1


def test_small_objects() -> None:
    sizes, large = [], 0
    for scene, turn, facts in draw_samples("small_object"):
        small = [item for item in scene.items if 18 <= item.size <= 34]
        assert 1 <= len(small) <= 5
        assert len(scene.items) - len(small) <= 1
        large += len(scene.items) > len(small)
        [(left, top, right, bottom)] = turn.focus
        [item] = [i for i in small if left < i.x < right and top < i.y < bottom]
        assert facts == {"size": round(item.size)}
        said = set(re.findall("[a-z]+", turn.answer.lower()))
        assert said & {item.colour, item.shape} or item.place in turn.answer
        sizes.append(item.size)
    assert min(sizes) < 21
    assert max(sizes) > 31
    assert 30 < large < 110


def test_scenes_are_mostly_empty() -> None:
    things, covered = Counter(), []
    for index in range(300):
        rng = Random(f"page/{index}")
        scene = compose_small(rng, *rng.choice(LARGE_SIZES))
        things[len(scene.items) + len(scene.labels)] += 1
        covered.append(sum(item.size**2 for item in scene.items) / (scene.width * scene.height))
        assert [item.cell for item in scene.items] == sorted({item.cell for item in scene.items})
        assert not {item.row for item in scene.items} & {label.row for label in scene.labels}
    assert things[0] == 0
    assert things[1]
    assert max(things) >= 6
    assert sorted(covered)[len(covered) // 2] < 0.03


def test_numbers_of_things_can_be_chosen() -> None:
    scene = compose_small(Random("chosen"), 960, 640, labels=2, small=2, large=4)
    assert len(scene.labels) == 2
    assert [item.size <= 34 for item in scene.items].count(True) == 2
    assert len(scene.items) == 3

"""Which images words name: their order, numbers, letters, and what only sounds like it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.relevance.naming import last_mentions, named_images


@pytest.mark.parametrize(
    ("words", "count", "places"),
    [
        ("what is in the second image?", 3, {1}),
        ("What is in the 2nd picture", 3, {1}),
        ("image 2", 3, {1}),
        ("Describe image #2.", 3, {1}),
        ("the total of page no. 3", 4, {2}),
        ("photo number two, please", 3, {1}),
        ("what does Image B show?", 3, {1}),
        ("is it in image A or in image C?", 3, {0, 2}),
        ("the last picture", 4, {3}),
        ("the final screenshot", 4, {3}),
        ("the penultimate slide", 4, {2}),
        ("the second-to-last view", 4, {2}),
        ("Compare first and third.", 3, {0, 2}),
        ("compare the first image with the third", 3, {0, 2}),
        ("is the first larger than the last?", 4, {0, 3}),
        ("the first, second and 4th pictures", 5, {0, 1, 3}),
        ("what differs between image 1 and image 3?", 3, {0, 2}),
        ("pictures 1, 2 and 4", 5, {0, 1, 3}),
        ("images 2-4", 5, {1, 2, 3}),
        ("images 2 to 4", 5, {1, 2, 3}),
        ("the first two photos", 5, {0, 1}),
        ("the last two photos", 5, {3, 4}),
        ("in the first two or the last image", 4, {0, 1, 3}),
        ("And the third?", 3, {2}),
        ("read the second one", 3, {1}),
    ],
)
def test_names(words: str, count: int, places: set[int]) -> None:
    assert named_images(words, count) == places


@pytest.mark.parametrize(
    "words",
    ["what is in both images?", "compare them", "what is different?", "count the cats in all pictures"],
)
def test_all_of_them(words: str) -> None:
    assert named_images(words, 3) == {0, 1, 2}


def test_a_name_comes_before_all() -> None:
    assert named_images("compare the second image with all others", 4) == {1}


@pytest.mark.parametrize(
    "words",
    [
        "", "what is it?", "What is the second word?", "the first and the second letter of the title", "who came first?",
        "when does it last?", "these two images", "there is one image", "image 7", "image 0", "the ninth picture",
        "In the image I see a dog", "a photo of 640x480 pixels", "seconds of the video",
    ],
)  # fmt: skip
def test_what_names_none(words: str) -> None:
    assert named_images(words, 3) == frozenset()


def test_the_other_order_beside_a_name() -> None:
    assert named_images("What is the second word in the text of the first picture?", 3) == {0}


def test_a_label_is_no_question() -> None:
    """Pictures are often sent with one before each."""
    assert named_images("Image 1:\nImage 2:\n image C :\nwhat is in image 2?", 3) == {1}
    assert named_images("Image 1:\nImage 2:\nwhat is it?", 3) == frozenset()


def test_what_was_named_last_and_how_many_there_were_then() -> None:
    assert last_mentions([("what is in the last image?", 2), ("and here?", 3)], 3) == [-1, 0, -1]
    assert last_mentions([("what is in the last image?", 2), ("and in the first?", 3)], 3) == [1, 0, -1]
    assert last_mentions([("what is in the last image?", 2), ("compare them", 3)], 3) == [1, 1, 1]
    assert last_mentions([], 2) == [-1, -1]


@given(st.text(st.sampled_from("image first last two 1 3 - and the , # A 9999 \n")), st.integers(0, 6))
def test_only_images_that_there_are(words: str, count: int) -> None:
    assert named_images(words, count) <= set(range(count))


@pytest.mark.parametrize(
    "piece", ["image ", "the first ", "first and ", "image 1, ", "1, ", "\n", " ", "images 1-999 ", "a"]
)
def test_a_long_text_is_read_to_its_end(piece: str) -> None:
    """Words come from clients; what takes the square of their length would not come back from this."""
    assert named_images(piece * 20_000 + " the third image", 4) >= {2}


@pytest.mark.parametrize("words", ["read the f\u0131rst image", "image \u017fix", "the \u017fecond picture", "pictures f\u0131ve and two", "image \u0663", "the \u0663rd image"])  # fmt: skip
def test_letters_of_other_alphabets_are_not_those_that_look_like_them(words: str) -> None:
    """Case was folded: a dotless i, as Turkish keyboards type it, made "first" of what no table knew, and the request failed."""
    assert named_images(words, 9) <= {1}

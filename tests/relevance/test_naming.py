"""The images that words name, by order, number or letter, and words that only look like such names."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.relevance.images import last_mentions, named_images


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
def test_words_about_all_images(words: str) -> None:
    assert named_images(words, 3) == {0, 1, 2}


def test_a_named_image_takes_precedence_over_words_about_all() -> None:
    assert named_images("compare the second image with all others", 4) == {1}


@pytest.mark.parametrize(
    "words",
    [
        "", "what is it?", "What is the second word?", "the first and the second letter of the title",
        "who came first?", "when does it last?", "these two images", "there is one image", "image 7",
        "image 0", "the ninth picture", "In the image I see a dog", "a photo of 640x480 pixels",
        "seconds of the video",
    ],
)  # fmt: skip
def test_words_that_name_no_image(words: str) -> None:
    assert named_images(words, 3) == frozenset()


def test_an_ordinal_of_another_thing_beside_a_named_image() -> None:
    assert named_images("What is the second word in the text of the first picture?", 3) == {0}


def test_a_label_names_no_image() -> None:
    """Clients often send a label before each image."""
    assert named_images("Image 1:\nImage 2:\n image C :\nwhat is in image 2?", 3) == {1}
    assert named_images("Image 1:\nImage 2:\nwhat is it?", 3) == frozenset()


def test_last_mentions_count_the_images_of_their_turn() -> None:
    assert last_mentions([("what is in the last image?", 2), ("and here?", 3)], 3) == [-1, 0, -1]
    assert last_mentions([("what is in the last image?", 2), ("and in the first?", 3)], 3) == [1, 0, -1]
    assert last_mentions([("what is in the last image?", 2), ("compare them", 3)], 3) == [1, 1, 1]
    assert last_mentions([], 2) == [-1, -1]


@given(st.text(st.sampled_from("image first last two 1 3 - and the , # A 9999 \n")), st.integers(0, 6))
def test_only_existing_images_are_named(words: str, count: int) -> None:
    assert named_images(words, count) <= set(range(count))


@pytest.mark.parametrize(
    "piece", ["image ", "the first ", "first and ", "image 1, ", "1, ", "\n", " ", "images 1-999 ", "a"]
)
def test_a_long_text_takes_linear_time(piece: str) -> None:
    """Words come from clients. A pattern with quadratic time would not finish on this text."""
    assert named_images(piece * 20_000 + " the third image", 4) >= {2}


@pytest.mark.parametrize(
    "words",
    [
        "read the f\u0131rst image",
        "image \u017fix",
        "the \u017fecond picture",
        "pictures f\u0131ve and two",
        "image \u0663",
        "the \u0663rd image",
    ],
)
def test_similar_letters_of_other_alphabets_do_not_match(words: str) -> None:
    """Patterns ignored case for all alphabets, so a Turkish dotless i matched the "i" of "first".

    The table of ordinals did not have this spelling, and the request failed.
    """
    assert named_images(words, 9) <= {1}

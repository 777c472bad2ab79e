"""Tests of block names: two are equal exactly when everything that the KV depends on is equal."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from fovea.engine.kv.hashing import block_hash, mm_hash, root_hash
from fovea.engine.sequence import ImageSpan
from tests.support.brains import image

PARENT = root_hash("")


def test_two_images_with_identical_text_have_different_names() -> None:
    """All image placeholders have one token id, so two prompts may differ only in their images' keys."""
    tokens = [7, 999, 999, 8]
    assert block_hash(PARENT, tokens, 0, [image(1, 2, "cat")]) != block_hash(
        PARENT, tokens, 0, [image(1, 2, "dog")]
    )


def test_the_same_image_has_the_same_name_wherever_it_came_from() -> None:
    tokens = [7, 999, 999, 8]
    assert block_hash(PARENT, tokens, 0, [image(1, 2, "k")]) == block_hash(
        PARENT, tokens, 0, [image(1, 2, "k", 5)]
    )


def test_the_name_of_a_block_inside_an_image_depends_on_the_image_and_on_the_part_of_it() -> None:
    tokens = [999] * 4
    cat = [image(2, 40, "cat")]
    names = {
        block_hash(PARENT, tokens, 8, cat),
        block_hash(PARENT, tokens, 12, cat),
        block_hash(PARENT, tokens, 8, [image(2, 40, "dog")]),
    }
    assert len(names) == 3


def test_an_image_elsewhere_does_not_change_a_name() -> None:
    assert block_hash(PARENT, [1, 2], 4, [image(0, 4, "a"), image(6, 3, "b")]) == block_hash(
        PARENT, [1, 2], 4, []
    )


def test_salts_have_disjoint_chains() -> None:
    assert len({root_hash(""), root_hash("a"), root_hash("b")}) == 3


def test_a_name_depends_on_the_blocks_before() -> None:
    assert block_hash(root_hash("a"), [1], 0, []) != block_hash(root_hash("b"), [1], 0, [])


def test_the_public_name_of_an_image_is_a_hash_of_its_key() -> None:
    """A key may contain a client's secret salt, zero bytes included. Nothing of it is shown."""
    name = mm_hash("secret-salt\x00cat\x00560x420")
    assert name != mm_hash("other-salt\x00cat\x00560x420")
    assert len(name) == 64
    assert name.endswith(48 * "0")
    assert set(name) <= set("0123456789abcdef")


Spans = st.lists(st.sampled_from(["a", "b", "ab", ""]), max_size=2)


def layout(keys: list[str]) -> list[ImageSpan]:
    return [image(2 * place, 2, key, place) for place, key in enumerate(keys)]


@example(([0, 0], [""]), ([0, 0, 0, 0], []))  # the framing of an image, read as two more tokens
@given(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), Spans),
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), Spans),
)
def test_equal_names_mean_equal_contents(
    one: tuple[list[int], list[str]], two: tuple[list[int], list[str]]
) -> None:
    """The hash frames its parts, so that `a` then `b` differs from `ab`, and tokens differ from keys."""

    def content(value: tuple[list[int], list[str]]) -> object:
        tokens, keys = value
        return tokens, [(s.start, s.key) for s in layout(keys) if s.start < len(tokens)]

    names = [block_hash(PARENT, tokens, 0, layout(keys)) for tokens, keys in (one, two)]
    assert (names[0] == names[1]) == (content(one) == content(two))

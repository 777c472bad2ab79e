"""Generated pictures and texts: their sizes, and which arguments make them equal."""

from __future__ import annotations

import base64
import io

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fovea.bench.context import Content, picture


def size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "JPEG"
        return image.size


@given(st.integers(1, 300), st.sampled_from([4, 8, 14]))
def test_picture_size_matches_its_visual_tokens(tokens: int, side: int) -> None:
    width, height = size(picture("seed", tokens, side))
    assert width % side == height % side == 0
    assert abs(width * height / side**2 - tokens) <= tokens**0.5 / 2 + 0.5


def test_square_numbers_of_tokens_are_exact() -> None:
    assert [size(picture("s", n, 28)) for n in (64, 256, 1024)] == [(224, 224), (448, 448), (896, 896)]


def test_seed_and_nonce_determine_the_contents() -> None:
    def contents(seed: int, nonce: str) -> tuple[str, str, str]:
        content = Content(seed, nonce, 8)
        return content.picture_url("cat", 4), content.text(30), content.system(20)

    assert contents(1, "a") == contents(1, "a")
    assert all(x != y for x, y in zip(contents(1, "a"), contents(1, "b"), strict=True))
    assert contents(1, "a")[0] != contents(2, "a")[0]


def test_keys_determine_pictures() -> None:
    content = Content(0, "n", 8)
    assert content.picture_url("cat", 4) == content.picture_url("cat", 4) != content.picture_url("dog", 4)
    head, data = content.picture_url("cat", 4).split(",")
    assert head == "data:image/jpeg;base64"
    assert size(base64.b64decode(data)) == (16, 16)


def test_texts_begin_differently_and_system_prompts_alike() -> None:
    content = Content(0, "n", 8)
    texts = [content.text(40) for _ in range(50)]
    assert len({text.split()[0] for text in texts}) == 50
    assert content.system(60).startswith(content.system(30))

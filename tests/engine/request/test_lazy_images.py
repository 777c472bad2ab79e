"""Images that are decoded when the engine needs their pixels: how often, and who learns of a damaged one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fovea import Engine
from fovea.core.errors import InvalidImage
from fovea.core.media import Image
from fovea.core.types import ChatPrompt, Completion, GenerationRequest, ImagePart, Message, TextPart
from tests.support.checkpoints import write


class Source:
    """Pixels of one colour, which are counted when they are read; "broken" cannot be decoded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self.reads = 0

    def read(self) -> bytes:
        self.reads += 1
        self.seconds = 0.25
        if self.name == "broken":
            raise InvalidImage("it is damaged", code="image_truncated")
        return bytes(64 * 64 * 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write("qwen2_vl", tmp_path_factory.mktemp("lazy") / "tiny")
    with Engine.from_pretrained(str(folder), dtype="float32", threads=1, kv_cache_mib=16) as engine:
        yield engine


def image(source: Source) -> Image:
    return Image(source.name.ljust(64, "0"), 64, 64, source)


def ask(engine: Engine, *sources: Source) -> Completion:
    parts = (*(ImagePart(image(source)) for source in sources), TextPart("what is it?"))
    prompt = ChatPrompt((Message("user", parts),))
    return engine.generate(prompt, max_tokens=2, temperature=0)


def test_a_known_image_is_not_decoded_again(engine: Engine) -> None:
    """Its encoder output is cached under the hash of its file, so its pixels are never needed."""
    first = Source("cat")
    answer = ask(engine, first)
    again = Source("cat")
    assert ask(engine, again).token_ids == answer.token_ids
    assert (first.reads, again.reads) == (1, 0)


def test_decoding_has_a_time_of_its_own(engine: Engine) -> None:
    timings = ask(engine, Source("dog")).timings
    assert 0 < timings.media_decode <= 0.25
    assert timings.preprocess >= 0
    assert timings.queue >= 0


def test_a_damaged_image_is_named_by_its_number(engine: Engine) -> None:
    with pytest.raises(InvalidImage, match="image 1: it is damaged") as caught:
        ask(engine, Source("fish"), Source("broken"))
    assert (caught.value.index, caught.value.code) == (1, "image_truncated")


async def test_two_requests_with_one_damaged_image_each_get_its_own_number(engine: Engine) -> None:
    """They share one computation of the pixels, and its error must not name the other one's image."""

    async def fail(*sources: Source) -> int | None:
        parts = tuple(ImagePart(image(source)) for source in sources)
        request = GenerationRequest(f"r{len(sources)}", ChatPrompt((Message("user", parts),)))
        with pytest.raises(InvalidImage) as caught:
            async for _ in engine.stream(request):
                pass
        return caught.value.index

    numbers = await asyncio.gather(fail(Source("broken")), fail(Source("bird"), Source("broken")))
    assert numbers == [0, 1]
    engine.check_integrity()


def test_a_source_that_returns_other_pixels_is_refused(engine: Engine) -> None:
    class Short(Source):
        def read(self) -> bytes:
            return b"12345"

    with pytest.raises(InvalidImage, match="its decoder returned 5 bytes, 12288 are needed"):
        ask(engine, Short("short"))

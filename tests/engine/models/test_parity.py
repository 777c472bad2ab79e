"""Generated tokens equal those of transformers, for every supported architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.models import registry
from fovea.engine.request.inputs import to_image
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.reference import Reference
from tests.support.thorough import is_thorough, others_slow

TOKENS = 64 if is_thorough() else 8
SIZES = [(130, 90), (60, 200), (231, 57), (100, 100), (33, 47)]
COMMON = ("qwen3_vl", "llava_onevision")
"""Architectures that the default tests ask everything.

They ask the others one question of each kind that differs by model.
"""

# All lists of architectures are equal. pytest goes by places in lists: else it makes pairs several times.
MOST_SLOW = pytest.mark.parametrize("pair", others_slow(sorted(ARCHITECTURES), COMMON), indirect=True)
EVERY = pytest.mark.parametrize("pair", sorted(ARCHITECTURES), indirect=True)
LIKE_OTHERS = (
    "deepseek_ocr2", "glm46v", "internvl_chat", "lighton_ocr",
    "mistral3", "qwen3_5_moe", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
"""Architectures that place images as others do, or as tests of their own show.

The default run gives them one image.
"""
DIFFERENT = pytest.mark.parametrize(
    "pair", others_slow(sorted(ARCHITECTURES), sorted({*ARCHITECTURES} - {*LIKE_OTHERS})), indirect=True
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Reference]]:
    folder = write(request.param, tmp_path_factory.mktemp(request.param))
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        yield engine, Reference(Path(folder))


def chat(*turns: tuple[str, list[Image.Image], str]) -> ChatPrompt:
    messages = []
    for role, images, text in turns:
        parts = [ImagePart(to_image(image)) for image in images]
        messages.append(Message(role, (*parts, TextPart(text))))
    return ChatPrompt(tuple(messages))


def assert_same(engine: Engine, reference: Reference, prompt: ChatPrompt, images: list[Image.Image]) -> None:
    """Tokens must be equal, or tie in transformers' own logits where they first differ.

    The default run asks transformers once, for the logits before every token.
    """
    ids = engine.parts.preparer.builder.build(prompt).ids
    ours = list(engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True).token_ids[0])
    if not is_thorough() and reference.image_token not in ours:
        rows = reference.logits(ids, images, ours)
        deficits = [float(row.max() - row[token]) for row, token in zip(rows, ours, strict=True)]
        assert max(deficits) < 1e-4, f"{ours} are below the best tokens by {deficits}"
        return
    theirs = reference.generate(ids, images, TOKENS)
    if ours != theirs:
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        row = reference.logits(ids, images, theirs)[first]
        difference = abs(float(row[ours[first]] - row[theirs[first]]))
        assert difference < 1e-4, f"token {first}: {ours[first]} instead of {theirs[first]}"


def test_every_architecture_is_compared() -> None:
    """An architecture that the registry knows and these tests do not could answer anything."""
    known = {
        architecture.tower or architecture.model_type
        for architecture in registry.ARCHITECTURES
        if architecture.images  # `test_text_only` compares the others
    }
    assert known == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@EVERY
def test_one_image(pair: tuple[Engine, Reference], size: tuple[int, int]) -> None:
    image = picture(*size)
    assert_same(*pair, chat(("user", [image], "what is it?")), [image])


@DIFFERENT
def test_two_images_of_different_shape(pair: tuple[Engine, Reference]) -> None:
    images = [picture(140, 80, 1), picture(70, 190, 2)]
    assert_same(*pair, chat(("user", images, "compare them")), images)


@MOST_SLOW
def test_images_in_two_turns(pair: tuple[Engine, Reference]) -> None:
    first, second = picture(90, 90, 3), picture(160, 60, 4)
    prompt = chat(
        ("user", [first], "the red circle?"),
        ("assistant", [], "it is left of the blue square"),
        ("user", [second], "and here?"),
    )
    assert_same(*pair, prompt, [first, second])


@MOST_SLOW
def test_text_only(pair: tuple[Engine, Reference]) -> None:
    assert_same(*pair, chat(("user", [], "the blue square is left of the circle")), [])


@EVERY
def test_logits_agree(pair: tuple[Engine, Reference]) -> None:
    """Log-probabilities of chosen tokens and alternatives are within 1e-3 of transformers' in float32.

    Chosen tokens are the best of transformers, too, so with one image this also compares tokens.
    """
    engine, reference = pair
    image = picture(120, 75, 5)
    prompt = chat(("user", [image], "what is it?"))
    answer = engine.generate(
        prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, top_logprobs=5
    )
    rows = reference.logits(
        engine.parts.preparer.builder.build(prompt).ids, [image], list(answer.token_ids[0])
    ).log_softmax(-1)
    for row, entry in zip(rows, answer.logprobs[0], strict=True):
        assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=1e-3)
        assert float(row.max() - row[entry.id]) < 1e-4
        for token, _, logprob in entry.top:
            assert float(row[token]) == pytest.approx(logprob, abs=1e-3)

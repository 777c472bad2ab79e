"""A render equals what the engine then computes: token ids, spans, keys and the names of KV blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import InvalidRequest, PromptTooLong, Unavailable
from fovea.core.media import Image, PixelBudget, VideoBudget, VisualTokens
from fovea.core.types import (
    ChatPrompt,
    GenerationRequest,
    ImagePart,
    Message,
    Prompt,
    Rendered,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoPart,
)
from fovea.engine.kv.hashing import PrefixNames, mm_hash
from fovea.engine.request.inputs import to_video
from fovea.engine.request.prepare import to_sequence
from fovea.engine.request.render import without_pixels
from fovea.engine.sequence import Sequence
from tests.support.checkpoints import ARCHITECTURES
from tests.support.clips import noise
from tests.support.engines import ask, engine, picture
from tests.support.reduced import reduced_budget

BLOCK = 4
WORDS = "compare these and say what is in them"


class Unreadable:
    """Pixels that a test reads nowhere."""

    seconds = 0.0
    size = 0

    def read(self) -> bytes:
        raise AssertionError("the pixels were read")

    def file(self) -> bytes:
        raise AssertionError("the file was read")


def undecoded(image: Image) -> Image:
    return replace(image, pixels=Unreadable())


def request(machine: Engine, prompt: Prompt, salt: str = "", **options: Any) -> GenerationRequest:
    sampling = machine.sampling({"temperature": 0, "max_tokens": 1})
    return GenerationRequest("r", prompt, sampling, cache_salt=salt, **options)


def rendered(machine: Engine, asked: GenerationRequest) -> Rendered:
    return asyncio.run(machine.render(asked))


@contextmanager
def sequences(machine: Engine) -> Iterator[list[Sequence]]:
    """Record the sequences of the requests that the engine computes."""
    found: list[Sequence] = []
    submit = machine.loop.submit

    def record(jobs: Any) -> None:
        found.extend(job.seq for job in jobs)
        submit(jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.loop, "submit", record)
        yield found


def assert_equal(machine: Engine, prompt: Prompt, salt: str = "", blind: Prompt | None = None) -> Rendered:
    """Render a request without pixels, compute it with them, and compare.

    blind: the prompt with pixels that cannot be read; None: `prompt` itself.
    """
    asked = request(machine, prompt, salt)
    found = rendered(machine, replace(asked, prompt=blind or prompt))
    with sequences(machine) as made:
        for _ in machine.iterate(asked):
            pass
    [seq] = made
    assert found.ids == list(seq.prompt_ids)
    assert [(span.name, span.offset, span.length) for span in found.spans] == [
        (mm_hash(span.key), span.start, span.length) for span in seq.spans
    ]
    assert found.max_tokens == seq.max_tokens
    assert names(machine, asked) == names_of(seq)
    return found


def names(machine: Engine, asked: GenerationRequest) -> list[bytes]:
    """The names of the whole blocks of a request whose pixels cannot be read."""
    blind = replace(asked, prompt=without_pixels(asked.prompt))
    parts = machine.parts
    prompt, most = parts.preparer.lay_out(blind, machine.info, parts.admission.load)
    return names_of(to_sequence(blind, prompt, most, time.monotonic()))


def names_of(seq: Sequence) -> list[bytes]:
    seq.block_hashes = []
    PrefixNames(BLOCK).fill(seq, len(seq.prompt_ids) // BLOCK)
    return seq.block_hashes


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_render_equals_the_sequence_of_every_family(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Several images, one of them twice, in two turns, with a salt and without; text alone; token ids."""
    first, second = picture(1), picture(2, 130, 70)
    with engine(checkpoint(family), block_size=BLOCK, kv_blocks=2048) as machine:
        turns = (
            Message("user", (ImagePart(first), TextPart("what is it?"))),
            Message("assistant", (TextPart("a circle"),)),
            Message("user", (ImagePart(second), TextPart("and this?"))),
        )
        blind = ask(WORDS, *map(undecoded, (first, second, first)))
        found = assert_equal(machine, ask(WORDS, first, second, first), blind=blind)
        assert {span.kind for span in found.spans} == {"image"}
        same, other, again = found.spans
        assert same.name == again.name != other.name
        salted = assert_equal(machine, ask(WORDS, first, second, first), "tenant:salt")
        assert not {span.name for span in salted.spans} & {span.name for span in found.spans}
        assert_equal(machine, ChatPrompt(turns))
        text = assert_equal(machine, ask(WORDS))
        assert text.spans == ()
        assert_equal(machine, TokenPrompt(tuple(text.ids)))
        marker = machine.parts.preparer.builder._markers[0]
        assert_equal(machine, TextPrompt(f"a {marker} b", (ImagePart(first),)))


@pytest.fixture(scope="module")
def qwen_engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with engine(checkpoint("qwen3_vl"), block_size=BLOCK, kv_blocks=2048) as machine:
        yield machine


def video_prompt(seed: int, pruning: float = 0.0) -> ChatPrompt:
    part = VideoPart(to_video(noise(8, 96, 64, seed)), VideoBudget(pruning_rate=pruning))
    return ChatPrompt((Message("user", (part, ImagePart(picture(1)), TextPart("what moves?"))),))


def test_each_group_of_a_videos_frames_has_a_name_and_a_place(qwen_engine: Engine) -> None:
    found = assert_equal(qwen_engine, video_prompt(1))
    kinds = [span.kind for span in found.spans]
    assert kinds.count("video") > 1
    assert kinds[-1] == "image"


def test_a_pruned_video_can_be_rendered_once_its_tokens_are_known(qwen_engine: Engine) -> None:
    """Which tokens a pruned video keeps follows from its frames. The engine remembers it."""
    prompt = video_prompt(2, pruning=0.5)
    with pytest.raises(InvalidRequest, match="reads no pixels") as refused:
        rendered(qwen_engine, request(qwen_engine, prompt))
    assert (refused.value.code, refused.value.param) == ("needs_pixels", "video_pruning_rate")
    qwen_engine.generate(prompt, max_tokens=1)
    assert_equal(qwen_engine, prompt)


@pytest.mark.parametrize(
    "wish",
    [
        VisualTokens("resize", 0.5), VisualTokens("uniform", 0.5), VisualTokens("dpp", 0.25),
        VisualTokens("dart_query", 0.5), VisualTokens("relevance", 0.5), VisualTokens("relevance", budget=20),
        VisualTokens("general"), VisualTokens("fast"), VisualTokens("document"),
    ],
    ids=str,
)  # fmt: skip
def test_methods_whose_number_of_tokens_is_known(qwen_engine: Engine, wish: VisualTokens) -> None:
    """The pixels decide which tokens stay; how many, and the key, follow from the header."""
    images = picture(1, 224, 192), picture(2, 192, 224)
    prompt = ask("read the word", *images, budget=PixelBudget(visual=wish))
    assert_equal(qwen_engine, prompt)


def test_methods_whose_number_of_tokens_follows_from_pixels(qwen_engine: Engine) -> None:
    images = picture(1, 224, 192), picture(2, 192, 224)
    for method, wish in (("relevance", {"keep": "auto"}), ("relevance", {}), ("views", {"keep": 0.5})):
        budget = reduced_budget(method, **wish)
        with pytest.raises(InvalidRequest, match="reads no pixels") as refused:
            rendered(qwen_engine, request(qwen_engine, ask("read the small word", *images, budget=budget)))
        assert (refused.value.code, refused.value.param) == ("needs_pixels", "visual_tokens")
    # Such methods look at no pixels if all tokens stay.
    assert_equal(qwen_engine, ask("hello", images[0], budget=reduced_budget("views", keep=0.5)))


def test_a_render_says_what_the_load_of_now_makes_of_an_image(checkpoint: Callable[[str], Path]) -> None:
    """`detail: auto` loses levels under load, so a render under load has fewer tokens."""
    prompt = ask("what is it?", picture(1, 640, 480))
    folder = checkpoint("qwen3_vl")
    with engine(folder, block_size=BLOCK, kv_blocks=2048, degrade_from=0.5, max_queue=8) as machine:
        idle = assert_equal(machine, prompt)
        admission = machine.parts.admission
        ticket = admission.enter(int(0.9 * admission._max_in_flight))
        loaded = rendered(machine, request(machine, prompt))
        assert len(loaded.ids) < len(idle.ids)
        assert_equal(machine, prompt)
        ticket.leave()
        assert rendered(machine, request(machine, prompt)) == idle


def test_a_render_that_would_be_late_has_less_detail(checkpoint: Callable[[str], Path]) -> None:
    """With `when_late` degrade, a request gets the detail with which its first token would be in time."""
    prompt = ask("what is it?", picture(1, 640, 480))
    settings = {"target_ttft_ms": 1000, "when_late": "degrade", "block_size": BLOCK, "kv_blocks": 2048}
    with engine(checkpoint("qwen3_vl"), **settings) as machine:
        usual = rendered(machine, request(machine, prompt))
        tokens: list[int] = []

        def late(seq: Sequence, expected: object) -> bool:
            tokens.append(len(seq.prompt_ids))
            return len(tokens) < 3

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine.parts.intake.gate, "late", late)
            degraded = rendered(machine, request(machine, prompt))
        assert tokens == sorted(tokens, reverse=True)
        assert len(degraded.ids) == tokens[-1] < len(usual.ids) == tokens[0]
        assert machine.stats()["requests_degraded_late"] == 0


def test_a_render_takes_no_place_and_refuses_what_cannot_run(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3_vl")
    with engine(folder, max_running=1, max_queue=0, kv_blocks=64) as machine:
        ticket = machine.parts.admission.enter(1)
        assert rendered(machine, request(machine, ask("hello"))).ids
        assert machine.parts.admission.in_flight == 1
        ticket.leave()
        with pytest.raises(PromptTooLong):
            rendered(machine, request(machine, ask("red " * machine.info.max_context)))
    with pytest.raises(Unavailable):
        rendered(machine, request(machine, ask("hello")))

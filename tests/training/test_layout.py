"""Training and engine give a model equal input: the same ids, positions and pixels for one conversation."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fovea import Engine
from fovea.core.media import video_of_images
from fovea.core.types import ChatPrompt, ImagePart, Message, Part, TextPart, VideoPart
from fovea.engine.request.inputs import to_image
from fovea.engine.request.prompt_plan import process
from fovea.engine.step.positions import mrope_positions
from fovea.evaluation.scenes.scene import Turn
from fovea.media.image.decode import from_pil
from tests.support.clips import noise
from tests.support.pixels import in_time

TURN = Turn("Which way did the red circle move?", "left", ("left",))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("fovea-tiny", dtype="float32", threads=1, kv_cache_mib=16) as engine:
        yield engine


def engine_pixels(engine: Engine, prepared: Any) -> NDArray[np.float32]:
    """The pixels of all images of a prompt, (patches, frames, channels, values)."""
    processor = engine.parts.preparer.builder.processor
    pixels = [process(planned, processor).arrays["pixel_values"] for planned in prepared.planned_inputs]
    pixels = [rows if rows.shape[1] == 2 * 3 * 256 else in_time(rows) for rows in pixels]
    return np.concatenate(pixels).reshape(-1, 3, 2, 256).swapaxes(1, 2)


def assert_equal(
    engine: Engine, training: SimpleNamespace, prompt: ChatPrompt, sequence: Any, pictures: Any
) -> None:
    """Compare the engine's prompt with a training sequence. pictures: its images or groups of frames."""
    prepared = engine.parts.preparer.builder.build(prompt)
    length = len(prepared.ids)
    assert sequence.tokens[:length] == prepared.ids
    assert engine.tokenizer.decode(sequence.tokens[length:]).startswith(TURN.answer)
    assert sequence.target_indices == list(range(length, len(sequence.tokens)))
    positions, delta = mrope_positions(length, prepared.spans, 2)
    ours = np.array(sequence.positions).T
    np.testing.assert_array_equal(ours[:, :length], positions)
    # The answer's positions follow those of the prompt, like the engine's.
    np.testing.assert_array_equal(
        ours[:, length:], np.tile(np.arange(length, len(sequence.tokens)) + delta, (3, 1))
    )
    slots = [place for span in prepared.spans for place in range(span.start, span.end)]
    assert sequence.slots == slots
    pixels = training.model.patches(torch.from_numpy(np.stack(pictures))).numpy()
    pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 2, pixels.shape[3])).reshape(-1, 2, 3, 256)
    np.testing.assert_allclose(pixels, engine_pixels(engine, prepared), atol=1e-6)


@pytest.mark.parametrize("system", [None, "Answer the question."])
@pytest.mark.parametrize(
    ("frames", "width", "height", "rate"),
    [(1, 128, 128, 2.0), (2, 128, 96, 0.7), (3, 160, 128, 2.0), (4, 128, 256, 2.0), (7, 96, 160, 5.3)],
)
def test_a_video(
    frames: int,
    width: int,
    height: int,
    rate: float,
    system: str | None,
    engine: Engine,
    training: SimpleNamespace,
) -> None:
    pictures = noise(frames, width, height)
    times = training.several.group_times(frames, rate)
    media = training.packing.PromptMedia((height // 32, width // 32), 0, times)
    sequence = training.packing.conversation(training.packer, [TURN], media, system, False)
    groups = training.several.group_frames(
        [training.batches.fit_image(frame, (width, height)) for frame in pictures]
    )
    video = video_of_images([from_pil(frame) for frame in pictures], rate)
    assert_equal(engine, training, _ask(VideoPart(video), system=system), sequence, groups)


def test_images(engine: Engine, training: SimpleNamespace) -> None:
    pictures = noise(3, 128, 160)
    sequence = training.packing.conversation(
        training.packer, [TURN], training.packing.PromptMedia((5, 4), 3), None, False
    )
    frames = [training.batches.fit_image(picture, (128, 160)) for picture in pictures]
    parts = [ImagePart(to_image(picture)) for picture in pictures]
    assert_equal(engine, training, _ask(*parts), sequence, frames)


def test_branches_have_the_positions_that_they_would_have_alone(training: SimpleNamespace) -> None:
    """Each of several questions about one video has the ids and positions of a conversation with it alone."""
    media = training.packing.PromptMedia((3, 4), 0, (0.25, 1.0))
    other = Turn("Which object moved?", "red circle", ("red circle",))
    packed = training.packing.branches(training.packer, [TURN, other], media, None)
    conversations = []
    for number in (1, 2):
        indices = [at for at, segment in enumerate(packed.segment) if segment in (0, number)]
        conversations.append(
            ([packed.tokens[at] for at in indices], [packed.positions[at] for at in indices])
        )
    for turn in (TURN, other):
        alone = training.packing.conversation(training.packer, [turn], media, None, False)
        assert (alone.tokens, alone.positions) in conversations


def _ask(*parts: Part, system: str | None = None) -> ChatPrompt:
    head = (Message("system", (TextPart(system),)),) if system else ()
    return ChatPrompt((*head, Message("user", (*parts, TextPart(TURN.question)))))

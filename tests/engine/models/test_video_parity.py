"""Videos equal those of transformers: frames, sizes, pixels, prompt, positions, greedy tokens, in float32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea import Engine
from fovea.core.media import Video, VideoBudget, video_of_images
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart, VideoPart
from fovea.engine.request.inputs import to_image
from fovea.engine.request.prompt_plan import PreparedPrompt, process
from fovea.engine.step.positions import mrope_positions
from fovea.engine.vision.processor.video import QwenVideos, SamplingRule
from fovea.media.image.decode import from_pil
from tests.support import video_reference as oracle
from tests.support.checkpoints import write
from tests.support.clips import noise
from tests.support.reference import Reference
from tests.support.thorough import examples, is_thorough, others_slow

TOKENS = 32 if is_thorough() else 8
# frames, width, height, frames per second
CLIPS = [(8, 130, 90, 2.0), (7, 60, 200, 2.0), (2, 100, 100, 1.0), (1, 64, 64, 2.0), (12, 96, 96, 0.5)]
QUICK = [CLIPS[1], CLIPS[4]]


NEWEST = ("qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
"""Models with a time before each pair of frames."""


@pytest.fixture(
    scope="module",
    params=[
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_vl_moe", "qwen3_5_moe")),
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Reference]]:
    folder = write(request.param, tmp_path_factory.mktemp(request.param))
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        yield engine, Reference(Path(folder))


def chat(video: Video, text: str = "what moved?", budget: VideoBudget | None = None) -> ChatPrompt:
    return ChatPrompt((Message("user", (VideoPart(video, budget or VideoBudget()), TextPart(text))),))


def pixels_of(prepared: PreparedPrompt, engine: Engine) -> np.ndarray:
    processor = engine.parts.preparer.builder.processor
    images = [process(planned, processor) for planned in prepared.planned_inputs]
    return np.concatenate([image.arrays["pixel_values"] for image in images])


def whole_grid(prepared: PreparedPrompt) -> tuple[int, int, int]:
    (video,) = prepared.videos
    _, rows, columns = video.plan.groups[0].grid
    return len(video.plan.groups), rows, columns


@pytest.mark.parametrize("shape", others_slow(CLIPS, QUICK), ids=lambda c: f"{c[0]}x{c[1]}x{c[2]}")
def test_one_video(pair: tuple[Engine, Reference], shape: tuple[int, int, int, float]) -> None:
    engine, reference = pair
    count, width, height, fps = shape
    video = video_of_images([from_pil(frame) for frame in noise(count, width, height)], fps)
    prepared = engine.parts.preparer.builder.build(chat(video))
    grid, (planned,) = whole_grid(prepared), prepared.videos
    pixels = pixels_of(prepared, engine)

    # Pixels: transformers' patches of these resized frames, normalised in the order of its PIL processors.
    frames = np.stack([frame.transpose(2, 0, 1) for frame in planned.clip.frames()]).astype(np.float32)
    mean, std = (np.array(v, np.float32)[:, None, None] for v in _norm(reference))
    theirs, their_grid = oracle.patches(
        (frames / np.float32(255) - mean) / std, 16 if reference.kind in NEWEST else 14
    )
    assert grid == tuple(their_grid)
    np.testing.assert_allclose(pixels, theirs.numpy(), atol=1e-6)

    # Token ids: the marker of the template, expanded as in transformers.
    marker = "<|video_pad|>"
    text = engine.tokenizer.render(chat(video).messages)
    expanded = (
        oracle.placeholder(grid, list(range(count)), fps)
        if reference.kind in NEWEST
        else marker * (grid[0] * grid[1] * grid[2] // 4)
    )
    assert prepared.ids == engine.tokenizer.encode(text.replace(marker, expanded))

    inputs = oracle.inputs(reference, prepared.ids, pixels, grid, seconds=2 / fps)
    positions, delta = mrope_positions(len(prepared.ids), prepared.spans, 2)
    their_positions, their_delta = oracle.positions(reference, inputs)
    np.testing.assert_array_equal(positions, their_positions)
    # In a slow video, the positions in time are larger than those of the text after it. There
    # `get_rope_index` continues the answer after the last time, and `generate` after the last token. Fovea
    # does what `generate` does.
    ahead = int(positions.max()) - int(positions[0, -1])
    assert delta == their_delta - ahead

    ours = engine.generate(chat(video), temperature=0, max_tokens=TOKENS, ignore_eos=True)
    assert list(ours.token_ids[0]) == oracle.generate(reference, TOKENS, **inputs)
    assert ours.usage.image == sum(span.tokens for span in prepared.spans)


def test_a_video_beside_an_image(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    picture = noise(1, 90, 120, seed=5)[0]
    video = video_of_images([from_pil(frame) for frame in noise(4, 80, 60)])
    parts = (VideoPart(video), TextPart("and"), ImagePart(to_image(picture)), TextPart("which?"))
    prompt = ChatPrompt((Message("user", parts),))
    prepared = engine.parts.preparer.builder.build(prompt)
    clips, image = prepared.videos[0].groups, prepared.images[0]
    processor = engine.parts.preparer.builder.processor
    pixels = np.concatenate([process(group, processor).arrays["pixel_values"] for group in clips])
    inputs = oracle.inputs(reference, prepared.ids, pixels, whole_grid(prepared), seconds=1.0)
    still = reference.inputs(prepared.ids, [picture])
    inputs |= {name: still[name] for name in ("pixel_values", "image_grid_thw")}
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"] + still["mm_token_type_ids"]
    ours = engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    assert list(ours.token_ids[0]) == oracle.generate(reference, TOKENS, **inputs)
    assert image.key not in {group.key for group in clips}


def _norm(reference: Reference) -> tuple[list[float], list[float]]:
    processor = reference.processor
    half = [0.5] * 3
    return (half, half) if reference.kind in NEWEST else (processor.image_mean, processor.image_std)


@settings(max_examples=examples(300), deadline=None)
@given(
    newest=st.booleans(),
    total=st.integers(2, 3000),
    fps=st.sampled_from([1.0, 12.0, 23.976, 24.0, 29.97, 30.0, 60.0]),
    wanted_fps=st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.3]),
    least=st.integers(2, 8),
    most=st.integers(8, 256),
)
def test_sampled_frames_equal_those_of_transformers(
    newest: bool, total: int, fps: float, wanted_fps: float, least: int, most: int
) -> None:
    rule = SamplingRule(wanted_fps, least, most, group_frames=2, even=newest)
    video = Video("v", 8, 8, total, fps, source=None)  # type: ignore[arg-type]
    theirs = oracle.sample(newest, total, fps, wanted_fps, least, most)
    # In transformers, rounding may give an index one past the end (186 of 745 frames), which it then fails to
    # read.
    assert list(rule.indices(video, VideoBudget())) == [min(index, total - 1) for index in theirs]


@settings(max_examples=examples(300), deadline=None)
@given(
    width=st.integers(8, 2000), height=st.integers(8, 2000), frames=st.integers(2, 64),
    low=st.integers(1, 200), high=st.integers(200, 2000),
)  # fmt: skip
def test_sizes_equal_those_of_transformers(
    videos_of: dict[bool, QwenVideos], width: int, height: int, frames: int, low: int, high: int
) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    for newest, videos in videos_of.items():
        unit = videos.factor
        videos = replace(videos, min_pixels=low * unit**2, max_pixels=high * unit**2)
        video = Video("v", width, height, frames, 2.0, source=None, preselected=True)  # type: ignore[arg-type]
        ours = videos._target(video, frames, None)
        limits = {"factor": unit, "min_pixels": low * unit**2, "max_pixels": high * unit**2}
        theirs = (
            oracle.qwen3.smart_resize(frames, height, width, temporal_factor=2, **limits)
            if newest
            else oracle.qwen2.smart_resize(height, width, **limits)
        )
        assert ours == tuple(theirs)


@pytest.fixture(scope="module")
def videos_of(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, QwenVideos]:
    from fovea.engine.vision.processor.video import build_videos

    by_generation = {}
    for kind, newest in (("qwen2_vl", False), ("qwen3_vl", True)):
        videos = build_videos(kind, {}, {}, {}, {})
        assert videos is not None
        by_generation[newest] = videos
    return by_generation


def test_torchvision_is_never_imported() -> None:
    assert "torchvision" not in sys.modules

"""Builds the video processor of a checkpoint.

The settings come from its own file, or from the files that transformers falls back on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL.Image import Resampling

from fovea.core.errors import CheckpointError
from fovea.core.media import FRAMES_PER_SECOND
from fovea.engine.vision.processor.palette import CLIP_MEAN, CLIP_STD, HALF, Palette
from fovea.engine.vision.processor.pixels import read_filter
from fovea.engine.vision.processor.sampling import SamplingRule
from fovea.engine.vision.processor.settings import Settings, expect_equal, section
from fovea.engine.vision.processor.size import Size
from fovea.engine.vision.processor.video import QwenVideos

FILE = "video_preprocessor_config.json"
TIMESTAMPS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models whose prompts have the time of each group of frames before it."""
_CLASSES = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    **dict.fromkeys(TIMESTAMPS, "Qwen3VLVideoProcessor"),
}
_WRAP = ("<|vision_start|>", "<|vision_end|>")
SHARE = {False: 128_000, True: 768}
"""Default of `max_video_tokens`, by whether the limits are for all frames together (`QwenVideos.volume`)."""


def build_videos(
    model_type: str,
    video_config: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    model: Mapping[str, Any],
    processor: Mapping[str, Any],
) -> QwenVideos | None:
    """Build the video processor; None for architectures without video.

    video_config: the checkpoint's video_preprocessor_config.json. If it is empty, `video_processor` in
        processor_config.json is used, and without that the image processor's settings.

    Raises CheckpointError for settings that are not supported.
    """
    if model_type not in _CLASSES:
        return None
    source = video_config or processor.get("video_processor") or preprocessor
    settings = Settings(source, FILE)
    kind = str(settings.raw("video_processor_type") or _CLASSES[model_type])
    if kind not in _CLASSES.values():
        raise settings.error("video_processor_type", kind, ", ".join(sorted(set(_CLASSES.values()))))
    volume = kind == "Qwen3VLVideoProcessor"
    vision = section(model, "vision_config")
    patch = settings.count("patch_size", int(vision.get("patch_size") or (16 if volume else 14)))
    merge = settings.count("merge_size", int(vision.get("spatial_merge_size") or 2))
    group_frames = settings.count("temporal_patch_size", int(vision.get("temporal_patch_size") or 2))
    expect_equal("patch_size", patch, vision.get("patch_size"))
    expect_equal("merge_size", merge, vision.get("spatial_merge_size"))
    expect_equal("temporal_patch_size", group_frames, vision.get("temporal_patch_size"))
    low, high = _limits(settings, volume)
    capped = settings.flag("cap_pixels_per_frame", False)
    share = settings.count("max_video_tokens", SHARE[volume])
    videos = QwenVideos(
        palette=Palette.read(settings, *((HALF, HALF) if volume else (CLIP_MEAN, CLIP_STD))),
        resample=read_filter(settings, Resampling.BICUBIC),
        resizes=settings.flag("do_resize", True),
        min_pixels=low,
        max_pixels=high,
        volume=volume,
        share=share if capped else None,
        patch=patch,
        merge=merge,
        rule=_rule(settings, group_frames, volume),
        seconds=_seconds(vision, model_type),
        timestamps=model_type in TIMESTAMPS,
        marker=str(processor.get("video_token") or "<|video_pad|>"),
        wrap=_WRAP,
    )
    settings.close()
    return videos


def _rule(settings: Settings, group_frames: int, even: bool) -> SamplingRule:
    if settings.raw("num_frames") is not None:
        raise settings.error(
            "num_frames", settings.raw("num_frames"), "no num_frames; fps, min_frames and max_frames instead"
        )
    fps = settings.number("fps", FRAMES_PER_SECOND)
    least, most = settings.count("min_frames", 4), settings.count("max_frames", 768)
    if fps <= 0 or least > most:
        raise settings.error("fps", (fps, least, most), "fps above 0, min_frames at most max_frames")
    return SamplingRule(fps, least, most, group_frames, even)


def _seconds(vision: Mapping[str, Any], model_type: str) -> float:
    """Positions in time per second of video. Only Qwen2.5-VL has them; 0 for the others."""
    return float(vision.get("tokens_per_second") or 4) if model_type == "qwen2_5_vl" else 0.0


def _limits(settings: Settings, volume: bool) -> tuple[int, int]:
    edge = 32 if volume else 28
    size = settings.size("size", Size(shortest_edge=128 * edge**2, longest_edge=768 * edge**2))
    assert size is not None
    low = settings.count("min_pixels", size.shortest_edge or size.min_pixels or 0)
    high = settings.count("max_pixels", size.longest_edge or size.max_pixels or 0)
    if not low or not high or low > high:
        raise CheckpointError(
            f"{FILE}: size is {size}; accepted: areas shortest_edge <= longest_edge in pixels", param="size"
        )
    return low, high

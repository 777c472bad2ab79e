"""Reads the settings of a checkpoint beside its weights: those of image processors, and of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, FoveaError, InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.engine.files import read_json
from fovea.engine.models.registry import architecture_of
from fovea.engine.models.tokenizer import reason
from fovea.engine.vision.processor import build as build_processor
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.none import NoImages
from fovea.engine.vision.processor.video import QwenVideos, build_videos


def build_processors(folder: Path, config: Any) -> tuple[ImageProcessor, QwenVideos | None]:
    """Build the image processor, and the planner of videos if the model takes videos.

    config: the checkpoint's configuration, as transformers reads it. That of a model for text alone needs no
        further file.
    """
    if not architecture_of(config).images:
        return NoImages(), None
    joint = read_json(folder / "processor_config.json")
    # Newer checkpoints have the image processor's settings inside processor_config.json.
    images = read_json(folder / "preprocessor_config.json") or joint.get("image_processor")
    if not isinstance(images, dict):
        raise CheckpointError(f"{folder} has no preprocessor_config.json")
    videos = read_json(folder / "video_preprocessor_config.json")
    return processors_of(config, images, videos, joint, folder / "preprocessor_config.json")


def processors_of(
    config: Any, images: dict[str, Any], videos: dict[str, Any], joint: dict[str, Any], where: Path
) -> tuple[ImageProcessor, QwenVideos | None]:
    """Build the processors from their settings.

    config: see `build_processors`.
    images, videos, joint: contents of preprocessor_config.json, video_preprocessor_config.json and
        processor_config.json; empty: there is no such file.
    where: file of the settings of images, for messages.
    """
    shapes, kind = config.to_dict(), config.model_type
    try:
        return build_processor(kind, images, shapes, joint), build_videos(kind, videos, images, shapes, joint)
    except FoveaError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: no processor can be built of its values: {reason(error)}") from error


def default_sampling(folder: Path) -> dict[str, float | int]:
    """Return the sampling defaults of generation_config.json, for parameters that a request does not set."""
    config = read_json(folder / "generation_config.json")
    if not config or "do_sample" not in config:
        return {}
    if not config["do_sample"]:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: config[name] for name in names if isinstance(config.get(name), int | float)}
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise CheckpointError(f"{folder}/generation_config.json: {error}") from error
    return values

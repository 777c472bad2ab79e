"""Writes the settings of known models that come with the package, from the facts of tests/published.

    python -m tools.known_models            # writes src/fovea/engine/vision/token_rules/known.json
    python -m tools.known_models --check    # exit code 1 if the file is not what would be written

A model is left out if no source showed the settings of its image processor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.asset import write_or_check

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "published"
SIBLINGS = PUBLISHED / "siblings.json"
ASSET = ROOT / "src" / "fovea" / "engine" / "vision" / "token_rules" / "known.json"

UNSUPPORTED = ("molmo2", "deepseek_vl_v2")
"""model_type of published repositories for which Fovea has no image processor."""
CONFIG_ALONE = ("internvl_chat",)
"""model_type of models whose config.json has all settings that decide the number of tokens."""
CONFIG = (
    "architectures", "model_type", "downsample_factor", "downsample_mode", "downsample_ratio",
    "dynamic_image_size", "image_grid_pinpoints", "max_dynamic_patch", "min_dynamic_patch",
    "mm_tokens_per_image", "scale_factor", "spatial_merge_size", "use_thumbnail", "vision_aspect_ratio",
    "vision_feature_select_strategy",
)  # fmt: skip
"""Settings of config.json that image processors read."""
VISION = (
    "model_type", "image_size", "max_num_tiles", "patch_size", "pooling_kernel_size",
    "position_embedding_size", "spatial_merge_size", "supported_aspect_ratios", "temporal_patch_size",
)  # fmt: skip
"""Settings of vision_config that image processors read."""
PROCESSOR = (
    "image_seq_len", "image_seq_length", "num_additional_image_tokens", "num_image_tokens", "patch_size",
    "spatial_merge_size", "vision_aspect_ratio", "vision_feature_select_strategy",
)  # fmt: skip
"""Settings of processor_config.json that image processors read and that are not text."""
COLORS = (
    "auto_map", "data_format", "do_convert_rgb", "do_normalize", "do_rescale", "image_mean", "image_std",
    "processor_class", "resample", "rescale_factor", "return_row_col_info", "video_sampling",
)  # fmt: skip
"""Settings of preprocessor_config.json that do not change the size of a picture."""


def subset(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the number of visual tokens.

    facts: `config`, `preprocessor` and `processor` as in facts.json.
    """
    config, processor = facts["config"], facts.get("processor", {})
    preprocessor = facts.get("preprocessor") or processor.get("image_processor", {})
    kept = {name: config[name] for name in CONFIG if config.get(name) is not None}
    vision = config.get("vision_config", {})
    kept["vision_config"] = {name: vision[name] for name in VISION if vision.get(name) is not None}
    return {
        "config": kept,
        "preprocessor": {
            name: value for name, value in preprocessor.items() if value is not None and name not in COLORS
        },
        "processor": {name: processor[name] for name in PROCESSOR if processor.get(name) is not None},
    }


def published() -> dict[str, dict[str, Any]]:
    """Return the settings of the repositories of tests/published for which they are known, by hub id."""
    found = {}
    for path in sorted(PUBLISHED.glob("*/facts.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        kind = facts["config"]["model_type"]
        settings = subset(facts)
        if kind not in UNSUPPORTED and (settings["preprocessor"] or kind in CONFIG_ALONE):
            found[facts["repository"]] = settings
    return found


def every_model() -> dict[str, dict[str, Any]]:
    """Return the settings of all known models, by hub id. siblings.json takes precedence over facts.json."""
    models = published()
    siblings: dict[str, dict[str, Any]] = json.loads(SIBLINGS.read_text(encoding="utf-8"))
    for model, entry in siblings.items():
        if "like" not in entry:
            models[model] = subset(entry)
    for model, entry in siblings.items():
        if "like" in entry:
            models[model] = models[entry["like"]]
    return models


def text() -> str:
    """Return the content of known.json: one entry for all models of equal settings."""
    groups: dict[str, list[str]] = {}
    for model, settings in every_model().items():
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(model)
    entries = [{"models": sorted(models, key=str.lower), **json.loads(key)} for key, models in groups.items()]
    entries.sort(key=lambda entry: str(entry["models"][0]).lower())
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def main() -> int:
    about = __doc__.splitlines()[0] if __doc__ else ""
    return write_or_check(ASSET, text, "tools/known_models.py", about)


if __name__ == "__main__":
    sys.exit(main())

"""Tests of all image processors: arguments of `build`, plans, keys, and imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fovea.core.errors import EngineError, UnsupportedModel
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor import build, model_types


def test_unknown_model_type_names_the_known_ones():
    with pytest.raises(UnsupportedModel, match="idefics3.*qwen3_vl.*smolvlm"):
        build("gpt2", {}, {})


def test_every_known_type_builds_on_its_defaults():
    models = {"idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}}}
    models["smolvlm"] = models["idefics3"]
    clip = {"vision_config": {"image_size": 224, "patch_size": 14}}
    sizes = {"crop_size": 336, "size": {"shortest_edge": 336}}
    for name in model_types():
        preprocessor = {"llava_next": sizes, "internvl": {"size": 448}}.get(name, {})
        model = clip if name == "llava" else models.get(name, {})
        assert build(name, preprocessor, model).plan(100, 50, PixelBudget()).tokens > 0


def test_preprocessor_config_inside_the_processor_config():
    nested = {"image_processor": {"patch_size": 16, "image_processor_type": "Qwen2VLImageProcessorFast"}}
    assert build("qwen3_vl", {}, {}, nested).plan(320, 320, PixelBudget()).tokens == 100


def test_a_plan_belongs_to_one_size(make_image):
    processor = build("qwen2_vl", {}, {})
    plan = processor.plan(64, 32, PixelBudget())
    with pytest.raises(EngineError, match="32x64"):
        processor.process(make_image(32, 64), plan)


def test_equal_keys_mean_equal_pixels_and_settings_change_the_key(make_image, run):
    image = make_image(200, 150)
    twin = Image("0" * 64, 200, 150, image.rgb)
    one, other = build("qwen2_vl", {}, {}), build("qwen2_vl", {"resample": 2}, {})
    first, second = run(one, image), run(one, twin)
    assert first.plan.key == second.plan.key
    assert np.array_equal(first.arrays["pixel_values"], second.arrays["pixel_values"])
    for changed in ({"resample": 2}, {"image_mean": 0.1}, {"rescale_factor": 0.1}, {"do_normalize": False}):
        other = build("qwen2_vl", changed, {})
        assert other.plan(200, 150, PixelBudget()).key != first.plan.key


def test_other_images_change_no_plan_except_for_llava_onevision():
    clip = {"size": {"shortest_edge": 336}, "crop_size": 336}
    cases = {"qwen2_vl": {}, "llava": clip, "llava_next": clip, "idefics3": {}, "internvl": {"size": 448}}
    for name, config in cases.items():
        processor = build(name, config, {})
        assert processor.plan(64, 48, PixelBudget(), images=3) == processor.plan(64, 48, PixelBudget())


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys; from fovea.engine.vision.processor import build;"
        "build('qwen2_vl', {}, {});"
        "sys.exit(bool({'torch', 'transformers', 'torchvision'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

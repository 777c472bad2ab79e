"""The oracle for whole models: transformers' own model, image processor and greedy generation, in float32."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from PIL import Image
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from fovea.core.media import PixelBudget
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.processor import ImageProcessor, build
from tests.support.checkpoints import write

FAULTS = {
    "paddleocr_vl": (
        "5.23",
        "resizes the table of positions with align_corners=True; the authors' code has False",
    ),
    "minicpmv4_6": ("5.19", "merges all images of a call as if they had the size of the first one"),
}
"""Faults of transformers with images: the first release without each of them, and what older ones do.

Fovea computes the same with every release. On an older one, these tests have nothing to compare with.
"""
PIL_PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), ("qwen2_vl", "Qwen2VLImageProcessorPil")
    ),
    "llava": ("clip", "CLIPImageProcessorPil"),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
    "pixtral": ("pixtral", "PixtralImageProcessorPil"),
    "mistral3": ("pixtral", "PixtralImageProcessorPil"),
    "lighton_ocr": ("pixtral", "PixtralImageProcessorPil"),
    "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
    "glm4v": ("glm4v", "Glm4vImageProcessorPil"),
    "glm46v": ("glm46v", "Glm46VImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "gemma4": ("gemma4", "Gemma4ImageProcessorPil"),
    "minicpmv4_6": ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
    "mllama": ("mllama", "MllamaImageProcessorPil"),
    "deepseek_ocr2": ("deepseek_ocr2", "DeepseekOcr2ImageProcessorPil"),
}
COUNTS = (
    "rows",
    "cols",
    "num_patches",
    "num_crops",
    "grids",
    "num_patches_per_image",
    "num_soft_tokens_per_image",
    "num_tiles",
)
"""Results of image processors that tell the number of visual tokens. Models do not take them."""
NESTED = ("idefics3", "smolvlm", "llava_onevision", "mllama")
"""Models whose image processor takes a list of images per request."""
OPTIONS: dict[str, dict[str, Any]] = {
    "pixtral": {"patch_size": 14},
    "mistral3": {"patch_size": 28},
    "internvl": {"crop_to_patches": True},
}
"""Options that transformers' processor classes pass to their image processors."""


def skip_before(release: str, reason: str) -> None:
    """Skip the test if transformers is older than a release. reason: what older releases do or lack."""
    if Version(hf.__version__) < Version(release):
        pytest.skip(f"transformers {hf.__version__} {reason}; {release} is the first that does not")


def skip_before_mode_4x() -> None:
    """Skip the test of MiniCPM-V's mode 4x if transformers computes its sizes as in mode 16x."""
    skip_before("5.21", "makes edges multiples of the token of mode 16x in mode 4x, too")


def own_processor(folder: Path) -> ImageProcessor:
    """Fovea's image processor of a checkpoint."""
    files = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("preprocessor_config", "config", "processor_config")
    }
    return build(files["config"]["model_type"], *files.values())


def _lfm2_vl(folder: Path, images: list[Image.Image]) -> dict[str, Any]:
    """The model's inputs: Fovea's patches of all tiles and views, padded as transformers pads them."""
    processor = own_processor(folder)
    patches, shapes = [], []
    for source in map(to_image, images):
        prepared = processor.process(source, processor.plan(source.width, source.height, PixelBudget()))
        _, rows, columns = prepared.plan.grid
        sizes = list(prepared.plan.sizes)
        for name in ("tiles", "pixel_values"):
            if name in prepared.arrays:
                height, width = sizes.pop(0)
                cuts = (rows, columns) if name == "tiles" else (1, 1)
                shapes += [(height // cuts[0] // 8, width // cuts[1] // 8)] * len(prepared.arrays[name])
                patches += list(torch.from_numpy(prepared.arrays[name]))
    lengths = torch.tensor([len(part) for part in patches])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(patches, batch_first=True),
        "pixel_attention_mask": mask.int(),
        "spatial_shapes": torch.tensor(shapes),
    }


WITHOUT_PIL = {"lfm2_vl": _lfm2_vl}
"""Models whose image processor in transformers needs torchvision.

The functions return the inputs from Fovea's own pixels, which other tests compare with the arithmetic of that
processor.
"""


def _cross_attention_mask(
    ids: list[int], image_token: int, tiles: list[list[int]], most: int
) -> torch.Tensor:
    """The mask (1, tokens, images, tiles) of Llama 3.2 Vision: 1 where a token sees a tile."""
    ranges = [get_cross_attention_token_mask(ids, image_token)]
    dense = convert_sparse_cross_attention_mask_to_dense(ranges, tiles, most, len(ids))
    return torch.from_numpy(dense)


def _hide_images_from_earlier_text(model: Any) -> None:
    """Let cross-attention add nothing to tokens before the first image, as in the original code.

    transformers lets these tokens attend to all rows of all images, also to rows of padding (issue 39379 of
    its repository).
    """

    def remember(layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        layer.cross_attn.sees_images = kwargs["full_text_row_masked_out_mask"]

    def hide(attention: Any, _args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (output[0] * attention.sees_images[:, 0], *output[1:])

    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(remember, with_kwargs=True)
            layer.cross_attn.register_forward_hook(hide)


class Reference:
    """A checkpoint loaded by transformers.

    kind: model type of the checkpoint; "pixtral" for a LLaVA with Pixtral's tower.
    It cannot load InternVL's original layout. In its place it gets the same weights in its own layout.

    kind: model type of the checkpoint.
    image_token: id of the image token.
    """

    def __init__(self, folder: Path) -> None:
        if json.loads((folder / "config.json").read_text())["model_type"] == "internvl_chat":
            folder = write("internvl", folder / "for_transformers")
        config = json.loads((folder / "config.json").read_text())
        pixtral = config["model_type"] == "llava" and config["vision_config"]["model_type"] == "pixtral"
        self.kind: str = "pixtral" if pixtral else config["model_type"]
        self.image_token: int = config.get("image_token_id", config.get("image_token_index"))
        self.folder = folder
        self.model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        if self.kind == "mllama":
            _hide_images_from_earlier_text(self.model)
        if self.kind not in PIL_PROCESSORS:
            return
        package, name = PIL_PROCESSORS[self.kind]
        module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
        self.processor = getattr(module, name).from_pretrained(folder)

    def inputs(self, ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
        """The arguments that transformers' own processor class would pass to the model for one request."""
        tokens = torch.tensor([ids])
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if images and self.kind in FAULTS:
            skip_before(*FAULTS[self.kind])
        if images and self.kind not in PIL_PROCESSORS:
            inputs |= WITHOUT_PIL[self.kind](self.folder, images)
        elif images:
            nested = [images] if self.kind in NESTED else images
            output = self.processor(images=nested, return_tensors="pt", **OPTIONS.get(self.kind, {}))
            inputs |= {k: v for k, v in output.items() if k not in COUNTS}
            if self.kind == "mllama":
                inputs["cross_attention_mask"] = _cross_attention_mask(
                    ids, self.image_token, output["num_tiles"], self.processor.max_image_tiles
                )
            if self.kind.startswith("qwen") or self.kind in ("paddleocr_vl", "glm4v", "glm46v", "gemma4"):
                inputs["mm_token_type_ids"] = (tokens == self.image_token).int()
        if self.kind == "gemma3":
            inputs["token_type_ids"] = (tokens == self.image_token).int()
        return inputs

    @torch.inference_mode()
    def generate(self, ids: list[int], images: list[Image.Image], count: int) -> list[int]:
        """Generate `count` greedy tokens; the end of text does not stop it."""
        inputs = self.inputs(ids, images)
        out = self.model.generate(
            **inputs,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, ids: list[int], images: list[Image.Image], answer: list[int]) -> torch.Tensor:
        """Logits (len(answer), vocabulary) before each token of `answer`, float32, in one pass."""
        inputs = self.inputs(ids + answer, images)
        if hasattr(self.model, "model") and hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        return self.model(**inputs).logits[0, len(ids) - 1 : -1].float()  # type: ignore[no-any-return]

"""The oracle for whole models: transformers' own model, image processor and greedy generation, in float32."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image

from tests.support.checkpoints import write

PIL_PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "llava": ("clip", "CLIPImageProcessorPil"),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
}


class Reference:
    """A checkpoint loaded by transformers.

    It cannot load InternVL's original layout. In its place it gets the same weights in its own layout.

    kind: model type of the checkpoint.
    image_token: id of the image token.
    """

    def __init__(self, folder: Path) -> None:
        if json.loads((folder / "config.json").read_text())["model_type"] == "internvl_chat":
            folder = write("internvl", folder / "for_transformers")
        config = json.loads((folder / "config.json").read_text())
        self.kind: str = config["model_type"]
        self.image_token: int = config.get("image_token_id", config.get("image_token_index"))
        self.model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        package, name = PIL_PROCESSORS[self.kind]
        module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
        self.processor = getattr(module, name).from_pretrained(folder)

    def inputs(self, ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
        """The arguments that transformers' own processor class would pass to the model for one request."""
        tokens = torch.tensor([ids])
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if images:
            nested = [images] if self.kind in ("idefics3", "smolvlm", "llava_onevision") else images
            options = {"crop_to_patches": True} if self.kind == "internvl" else {}
            output = self.processor(images=nested, return_tensors="pt", **options)
            inputs |= {k: v for k, v in output.items() if k not in ("rows", "cols", "num_patches")}
            if self.kind.startswith("qwen"):
                inputs["mm_token_type_ids"] = (tokens == self.image_token).int()
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

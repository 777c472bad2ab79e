"""Writes the averaged weights of a run as a Hugging Face checkpoint, and compares it with Hugging Face's
model.

python training/export.py --run runs/first [--random]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from batches import fit_image
from common import ASSETS
from evaluate import VIDEO
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from model import Fovea, patches
from packing import Packer, PromptMedia, collate, conversation
from several import group_frames, group_times


def load_average(run: str) -> Fovea:
    """The model with the averaged weights of a run's checkpoint."""
    model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    state = torch.load(Path(run) / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"], strict=False)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), state["averaged"], strict=False):
            parameter.copy_(value)
    print("step", state["step"], "images", state["images"], "seconds", round(state["seconds"]))
    return model


def export(model: Fovea, folder: Path) -> None:
    """Write model.safetensors in bf16, without the auxiliary heads."""
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name.startswith("model.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def difference(folder: Path) -> float:
    """The largest difference of logits between Hugging Face's model and the training model, in float32."""
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    mine = Fovea(json.loads((folder / "config.json").read_text())).eval()
    names = {name: value for name, value in theirs.state_dict().items() if name.startswith("model.")}
    mine.load_state_dict(names, strict=False)
    packer, size, grid, worst = Packer(str(folder / "tokenizer.json")), (224, 160), (5, 7), 0.0
    for index, kind in enumerate(("describe", "reading", "compare", "motion", "chat", VIDEO)):
        scenes, turns, _ = content("motion" if kind == VIDEO else kind, Random(index), size)
        pictures = [fit_image(draw(scene), size) for scene in scenes]
        media = PromptMedia(grid, len(scenes))
        if kind == VIDEO:
            pictures, media = group_frames(pictures), PromptMedia(grid, 0, group_times(len(scenes), 2.0))
        batch = collate([conversation(packer, list(turns), media, None, False)], [pictures], pad_to=1)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        with torch.no_grad():
            ours = mine.logits(mine.hidden(tensors)[0])
            other = theirs(**for_transformers(packer, tensors)).logits
        worst = max(worst, float((ours - other).abs().max()))
    return worst


def for_transformers(packer: Packer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model for a batch of one sequence without padding."""
    images, tokens = batch["images"][0], batch["tokens"]
    video = images.ndim == 5
    pixels = patches(images)
    # A patch has two frames; of a still image both are equal. In transformers, channels come before frames.
    pixels = pixels.expand(-1, -1, 2, -1).unflatten(-1, (3, -1)).transpose(2, 3).flatten(0, 1).flatten(1)
    count, rows, columns = len(images), images.shape[-3] // 16, images.shape[-2] // 16
    kinds = (tokens == packer.image).int() + 2 * (tokens == packer.video).int()
    common = {"input_ids": tokens, "mm_token_type_ids": kinds}
    if video:
        return common | {
            "pixel_values_videos": pixels,
            "video_grid_thw": torch.tensor([[count, rows, columns]]),
        }
    return common | {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]] * count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/first")
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--random", action="store_true", help="export random weights instead of a run's")
    options = parser.parse_args()
    if options.random:
        model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    else:
        model = load_average(options.run)
    export(model, options.out)
    print("parameters", sum(p.numel() for p in model.model.parameters()))
    print("largest difference of logits", difference(options.out))


if __name__ == "__main__":
    main()

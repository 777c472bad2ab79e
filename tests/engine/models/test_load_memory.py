"""Weights stream into place: the peak stays under 1.3 times the checkpoint, packing included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from tests.support.checkpoints import QWEN_TEMPLATE, VOCABULARY, tokenizer

# The peak is the kernel's own count for the process (VmHWM), reset to what the imports and one small load left. What stays is
# counted without files: the kernel may drop pages of libraries meanwhile, which once hid all of the weights.
LOAD = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field + ":"))
    return int(line.split()[1]) * 1024

settings = EngineConfig(dtype=sys.argv[3], device="cpu", quantization=sys.argv[4])
load_model(sys.argv[1], settings)
Path("/proc/self/clear_refs").write_text("5")
before, own = status("VmRSS"), status("RssAnon")
loaded = load_model(sys.argv[2], settings)
print(json.dumps({"rise": status("VmHWM") - before, "rest": status("RssAnon") - own}))
"""


def checkpoint(
    folder: Path, dtype: torch.dtype, *, hidden: int, layers: int, shards: int, mixed: bool = True
) -> int:
    """A Qwen3-VL of random weights, written shard by shard; returns its bytes.

    mixed: a layer's tensors are spread over the shards, so that none is whole before the last is read; else layer by
    layer, as checkpoints come.
    """
    words = tokenizer(QWEN_TEMPLATE)
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(token)
        for name, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"))
    }
    config = hf.Qwen3VLConfig(
        vision_config={
            "depth": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": hidden,
            "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        text_config={
            "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64,
            "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 128),
            "vocab_size": VOCABULARY, "max_position_embeddings": 512,
            "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]},
        },
        **ids,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.Qwen3VLForConditionalGeneration(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    folder.mkdir()
    config.save_pretrained(folder)
    words.save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    names, where = sorted(shapes), {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        share = -(-len(names) // shards)
        chosen = names[part::shards] if mixed else names[part * share : (part + 1) * share]
        where |= dict.fromkeys(chosen, file)
        save_file({name: torch.full(shapes[name], 0.01, dtype=dtype) for name in chosen}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(folder: Path, dtype: str, quantization: str) -> dict[str, int]:
    arguments = [
        sys.executable,
        "-c",
        LOAD,
        str(folder / "small"),
        str(folder / "large"),
        dtype,
        quantization,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc"
)


@LINUX
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_less_than_a_third_more_than_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    checkpoint(tmp_path / "small", kind, hidden=128, layers=1, shards=1)
    size = checkpoint(tmp_path / "large", kind, hidden=1024, layers=3 if dtype == "float32" else 6, shards=3)
    assert 140e6 < size < 300e6
    measured = measure(tmp_path, dtype, "none")
    assert measured["rise"] < 1.3 * size, f"{measured['rise'] / size:.2f} times the checkpoint"
    assert measured["rise"] > 0.6 * size, "the weights were not read, so nothing was measured"


@LINUX
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_layers_are_quantized_as_they_are_read(tmp_path: Path, dtype: str, quantization: str) -> None:
    """What stays is the quantized model, and the peak is that and a few layers. In float32 they are rounded by torch, which
    takes room for its steps."""
    checkpoint(tmp_path / "small", torch.bfloat16, hidden=128, layers=1, shards=1)
    size = checkpoint(tmp_path / "large", torch.bfloat16, hidden=1024, layers=10, shards=3, mixed=False)
    assert 200e6 < size < 300e6
    measured = measure(tmp_path, dtype, quantization)
    share = {"int8": 0.52, "int4": 0.28}[quantization]
    assert share - 0.05 < measured["rest"] / size < share + 0.07, "of the checkpoint"
    assert measured["rise"] < (share + 0.15 if dtype == "bfloat16" else 1.2) * size, "the peak"

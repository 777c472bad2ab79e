"""Weights stream into place: the peak stays under 1.3 times the checkpoint, packing included."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from tests.support.checkpoints import QWEN_TEMPLATE, VOCABULARY, tokenizer
from tests.support.forks import ONE_THREAD, Fork
from tests.support.quantized import SCHEMES, Scheme, awq, quantize_folder

pytestmark = pytest.mark.kernels

# The peak is the kernel's own count for the process (VmHWM), reset to what the imports and one small load
# left. What stays is counted without files: the kernel may drop pages of libraries meanwhile, which once hid
# all of the weights. One process imports everything; each measurement is a fork of it, so that none begins
# with what another one left.
LOAD = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field + ":"))
    return int(line.split()[1]) * 1024

def measure(small, large, dtype, quantization):
    settings = EngineConfig.of(dtype=dtype, device="cpu", quantization=quantization)
    load_model(small, settings)
    Path("/proc/self/clear_refs").write_text("5")
    before, own = status("VmRSS"), status("RssAnon")
    loaded = load_model(large, settings)
    print(json.dumps({"rise": status("VmHWM") - before, "rest": status("RssAnon") - own}), flush=True)

for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            measure(*arguments)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{arguments} failed")
"""


def checkpoint(
    folder: Path, dtype: torch.dtype, *, hidden: int, layers: int, shards: int, mixed: bool = True
) -> int:
    """A Qwen3-VL of random weights, written shard by shard; returns its bytes.

    mixed: a layer's tensors are spread over the shards, so that none is whole before the last is read; else
    layer by layer, as checkpoints come.
    """
    words = tokenizer(QWEN_TEMPLATE)
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(token)
        for name, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"))
    }
    config = hf.Qwen3VLConfig(
        vision_config={
            "depth": 2, "num_heads": 4, "hidden_size": 64,
            "intermediate_size": 128, "out_hidden_size": hidden,
            "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        text_config={
            "hidden_size": hidden, "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers, "head_dim": 64,
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


LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc"
)


@dataclass(frozen=True)
class Measured:
    """Bytes of a checkpoint, and of the process that loads it: how far the peak rises, and what stays."""

    size: int
    rise: int
    rest: int


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Measured]:
    """The default loads by (dtype, quantization), measured in one process."""
    return measure(tmp_path_factory.mktemp("checkpoints"), [("bfloat16", "none"), ("bfloat16", "int8")])


def measure(folder: Path, names: list[tuple[str, str]]) -> dict[tuple[str, str], Measured]:
    """Write the checkpoints of these (dtype, quantization), load them, and return what was measured."""
    small, ordered = folder / "small", folder / "ordered"
    checkpoint(small, torch.bfloat16, hidden=128, layers=1, shards=1)
    loads = {(dtype, kind): folder / dtype if kind == "none" else ordered for dtype, kind in names}
    sizes: dict[Path, int] = {}
    for dtype, kind in names:
        if kind == "none":
            layers = 5 if dtype == "float32" else 10
            sizes[folder / dtype] = checkpoint(
                folder / dtype, getattr(torch, dtype), hidden=640, layers=layers, shards=3
            )
    if ordered in loads.values():
        sizes[ordered] = checkpoint(ordered, torch.bfloat16, hidden=640, layers=14, shards=3, mixed=False)
    arguments = [(str(small), str(large), *pair) for pair, large in loads.items()]
    process = Fork(LOAD, [json.dumps(arguments)], os.environ | ONE_THREAD)
    out, err = process.communicate()
    assert process.returncode == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    return {
        pair: Measured(sizes[large], **result)
        for (pair, large), result in zip(loads.items(), results, strict=True)
    }


@LINUX
def test_loading_takes_less_than_a_third_more_than_the_checkpoint(
    measured: dict[tuple[str, str], Measured],
) -> None:
    assert_plain_peak(measured["bfloat16", "none"])


@LINUX
@pytest.mark.slow
def test_so_does_loading_float32(tmp_path: Path) -> None:
    (load,) = measure(tmp_path, [("float32", "none")]).values()
    assert_plain_peak(load)


def assert_plain_peak(load: Measured) -> None:
    assert 80e6 < load.size < 150e6
    assert load.rise < 1.3 * load.size, f"{load.rise / load.size:.2f} times the checkpoint"
    assert load.rise > 0.6 * load.size, "the weights were not read, so nothing was measured"


@LINUX
def test_layers_are_quantized_as_they_are_read(measured: dict[tuple[str, str], Measured]) -> None:
    assert_small_peak(measured["bfloat16", "int8"], "bfloat16", "int8")


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "int8"), ("float32", "int4"), ("bfloat16", "int4")]
)
def test_layers_are_quantized_in_slower_loads(tmp_path: Path, dtype: str, quantization: str) -> None:
    """For int4, torch tries twelve scales for every group of weights."""
    (load,) = measure(tmp_path, [(dtype, quantization)]).values()
    assert_small_peak(load, dtype, quantization)


def assert_small_peak(load: Measured, dtype: str, quantization: str) -> None:
    """The quantized model stays. The peak is that and a few layers, which are larger in float32."""
    assert 80e6 < load.size < 150e6
    share = {"int8": 0.52, "int4": 0.28}[quantization]
    assert share - 0.05 < load.rest / load.size < share + 0.07, "of the checkpoint"
    room = 0.15 if dtype == "bfloat16" else 0.5
    assert load.rise < (share + room) * load.size, (
        f"the peak: {load.rise / load.size:.2f} times the checkpoint"
    )


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "layers"), [(awq(group=128), 40), (SCHEMES["w8a8"], 20)], ids=["awq", "w8a8"]
)
def test_weights_that_are_quantized_already_take_little_more(
    scheme: Scheme, layers: int, tmp_path: Path
) -> None:
    """The peak is at most 1.15 times the size of the files. Codes are unpacked a layer at a time."""
    small, large = (quantized(tmp_path, scheme, *size) for size in ((128, 1), (640, layers)))
    arguments = [(str(small), str(large), "bfloat16", "none")]
    process = Fork(LOAD, [json.dumps(arguments)], os.environ | ONE_THREAD)
    out, err = process.communicate()
    assert process.returncode == 0, err
    size, rise = (large / "model.safetensors").stat().st_size, json.loads(out)["rise"]
    assert 50e6 < size < 150e6
    assert 0.6 * size < rise < 1.15 * size, f"the peak: {rise / size:.2f} times the checkpoint"


def quantized(folder: Path, scheme: Scheme, hidden: int, layers: int) -> Path:
    """Write a quantized checkpoint. Its tensors are sorted by type, as safetensors sorts them."""
    plain = folder / f"plain{hidden}"
    checkpoint(plain, torch.bfloat16, hidden=hidden, layers=layers, shards=1)
    (plain / "model-00001-of-00001.safetensors").rename(plain / "model.safetensors")
    (plain / "model.safetensors.index.json").unlink()
    return quantize_folder(plain, folder / f"quantized{hidden}", scheme)

"""Quantized checkpoints: tensors that do not fit each other, and wrong settings, give an error of Fovea.

The first line of an input is the configuration's quantization_config, the second one the header of the
safetensors file, without its length. The rest is the file's data.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from functools import cache
from math import prod
from pathlib import Path

import torch

from fovea.engine.models.quantized import open_weights
from tests.fuzz.refusals import note, refusals
from tests.support.quantized import SCHEMES

LONGEST = 8192
WORDS = (
    b'"quant_method"', b'"awq"', b'"gptq"', b'"fp8"', b'"bitsandbytes"', b'"compressed-tensors"',
    b'"group_size"', b'"bits"', b'"num_bits"', b'"strategy"', b'"weight_block_size"', b'"config_groups"',
    b'"group"', b'"channel"', b'"tensor"', b'"block"', b'"dynamic"', b'"shape"', b'"data_offsets"',
    b'"dtype"', b'"I32"', b'"I8"', b'"U8"', b'"F8_E4M3"', b'"BF16"', b"qweight", b"qzeros", b"scales",
    b"g_idx", b"weight_packed", b"weight_scale", b"weight_shape", b"weight_zero_point", b"weight_scale_inv",
    b"absmax",
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"[]", b"{}", b'""', b"99999999999999999999",
    b"\xff" * 4,
)  # fmt: skip
CHOSEN = (
    "w4a16", "w4a16-asymmetric", "w4a16-act-order", "w8a8-asymmetric", "fp8-dynamic", "mxfp8", "nvfp4", "awq",
    "gptq", "gptq-act-order", "fp8-blocks", "nf4", "nf4-nested", "llm-int8",
)  # fmt: skip
TYPES = {
    torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
MOST_VALUES = 16
"""Most values of a weight for each byte of the file: a word of codes of 2 bits has sixteen."""


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fovea-fuzz-"))


def target(data: bytes) -> None:
    settings, _, rest = data.partition(b"\n")
    header, _, body = rest.partition(b"\n")
    folder = _folder()
    (folder / "config.json").write_bytes(b'{"quantization_config": ' + settings + b"}")
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    with refusals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = open_weights(folder, None)
        note(f"{weights.quantization}, {sum(len(entries) for _, entries in weights.files)} tensors")
        try:
            for file, (_, entries) in enumerate(weights.files):
                for entry in entries:
                    if entry.name not in getattr(weights, "weights", ()):
                        continue
                    assert entry.shape is not None
                    assert prod(entry.shape) <= MOST_VALUES * len(data), "more values than the file can hold"
                    with refusals():
                        weights.read(file, entry, torch.empty(entry.shape))
                    if entry.coded:
                        with refusals():
                            note(f"{entry.coded}: {weights.codes(file, entry).bits}")
        finally:
            weights.close()


def seeds() -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    inputs = [b"{}\n{}\n", b'{"quant_method": "awq"}\n{}\n', b"\n\n"]
    for name in CHOSEN:
        made, _ = SCHEMES[name].make(torch.randn(32, 64, generator=generator))
        header, body = {}, b""
        for ending, part in made.items():
            content = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            place = [len(body), len(body) + len(content)]
            header[f"a{ending}"] = {
                "dtype": TYPES[part.dtype], "shape": list(part.shape), "data_offsets": place
            }  # fmt: skip
            body += content
        settings = json.dumps(SCHEMES[name].config).encode()
        inputs.append(settings + b"\n" + json.dumps(header).encode() + b"\n" + body)
    return [data for data in inputs if len(data) <= LONGEST]

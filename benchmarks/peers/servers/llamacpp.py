"""llama.cpp's own server, built by pip from the source distribution of llama-cpp-python.

That distribution also contains the converter.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from servers.base import INSIDE, Engine, Home, SetupError, Start, keep_to_avx2

DISTRIBUTION = "llama-cpp-python==0.3.36"
CMAKE = {
    "LLAMA_BUILD_TOOLS": "ON", "LLAMA_BUILD_SERVER": "ON", "LLAMA_TOOLS_INSTALL": "ON", "LLAVA_BUILD": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "GGML_NATIVE": "ON",
}  # fmt: skip
"""Build the server and its tools instead of the Python library; no web page, which would be downloaded."""
CMAKE_AVX2 = {
    **CMAKE, "GGML_NATIVE": "OFF",
    "GGML_AVX": "ON", "GGML_AVX2": "ON", "GGML_FMA": "ON", "GGML_F16C": "ON", "GGML_BMI2": "ON",
    "GGML_AVX_VNNI": "OFF", "GGML_AVX512": "OFF", "GGML_AVX512_VBMI": "OFF", "GGML_AVX512_VNNI": "OFF",
    "GGML_AVX512_BF16": "OFF", "GGML_AMX_TILE": "OFF", "GGML_AMX_INT8": "OFF", "GGML_AMX_BF16": "OFF",
}  # fmt: skip
"""The same for AVX2: llama.cpp decides at build time which instructions it uses."""
TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
ENCODER = "bf16"
SLOTS, SLOT_TOKENS = 8, 2048
KV_BYTES_PER_TOKEN = 24 * 2 * 2 * 64 * 2
"""Product of layers, 2 for keys and values, KV heads, head size, and 2 bytes of fp16."""


def install(home: Home, cmake: Mapping[str, str]) -> None:
    home.venv("transformers==5.23.0", "sentencepiece", "protobuf", "scikit-build-core")
    source = home.folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    home.run(str(home.python), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
             "--no-build-isolation", "--dest", str(source), DISTRIBUTION)  # fmt: skip
    archive = next(source.glob("*.tar.gz"))
    flags = " ".join(f"-D{name}={value}" for name, value in cmake.items())
    home.pip(str(archive), env={"CMAKE_ARGS": flags})
    shutil.unpack_archive(archive, source)
    archive.unlink()


def convert(home: Home, checkpoint: Path, precision: str) -> Path:
    models = home.models(checkpoint)
    full, encoder, target = models / "bf16.gguf", models / "encoder.gguf", models / f"{precision}.gguf"
    if not encoder.exists():
        _convert(home, checkpoint, full, "--outtype", "bf16")
        _convert(home, checkpoint, encoder, "--outtype", ENCODER, "--mmproj")
    if not target.exists():
        part = target.with_suffix(".part")
        home.run(
            str(_tool(home, "llama-quantize")),
            str(full),
            str(part),
            TYPES[precision],
            str(home.threads),
            env=_libraries(home),
        )
        part.rename(target)
    return target


def _convert(home: Home, checkpoint: Path, out: Path, *flags: str) -> None:
    script = next((home.folder / "source").glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
    part = out.with_suffix(".part")
    home.run(str(home.python), str(INSIDE / "convert_gguf.py"), str(script), str(checkpoint), *flags,
             "--outfile", str(part))  # fmt: skip
    part.rename(out)


def _tool(home: Home, name: str) -> Path:
    tool = home.packages / "bin" / name
    if not tool.exists():
        raise SetupError(f"the build of {DISTRIBUTION} did not install {name}")
    return tool


def _libraries(home: Home) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(home.packages / "lib")}


def start(home: Home, model: Path, precision: str, port: int) -> Start:
    command = (
        str(_tool(home, "llama-server")), "--model", str(model),
        "--mmproj", str(model.with_name("encoder.gguf")),
        "--host", "127.0.0.1", "--port", str(port), "--threads", str(home.threads), "--parallel", str(SLOTS),
        "--ctx-size", str(SLOTS * SLOT_TOKENS), "--jinja",
    )  # fmt: skip
    return Start(command, _libraries(home), SLOTS * SLOT_TOKENS * KV_BYTES_PER_TOKEN // 2**20)


ENGINE = Engine(
    title="llama.cpp server",
    precisions=TYPES,
    recipe=" ".join((DISTRIBUTION, *CMAKE, *CMAKE.values())),
    install=partial(install, cmake=CMAKE),
    convert=convert,
    start=start,
    versions=lambda home: {"llama-cpp-python": home.version("llama-cpp-python")},
)
AVX2 = keep_to_avx2(
    replace(
        ENGINE, folder="llamacpp-avx2", recipe=" ".join((DISTRIBUTION, *CMAKE_AVX2, *CMAKE_AVX2.values())),
        install=partial(install, cmake=CMAKE_AVX2),
    ),
    {}, "a build of its own with GGML_NATIVE, GGML_AVX512*, GGML_AVX_VNNI and GGML_AMX* off",
)  # fmt: skip

"""vLLM in float32, from the folder in which servers/vllm.py installs it.

Without AVX-512 its products are faster in float32 than in bf16, but a step of decoding reads twice the bytes.
So both are compared on a machine with AVX2.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from servers import vllm

DTYPE = "float32"
ENGINE = replace(
    vllm.ENGINE, title="vLLM (CPU), float32", precisions={"bf16": DTYPE}, folder="vllm",
    start=partial(vllm.start, dtype=DTYPE),
)  # fmt: skip
AVX2 = vllm.kept_to_avx2(ENGINE, DTYPE)

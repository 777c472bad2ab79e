"""Figures of the document about TensorRT: KV, speculation, levels of detail, precision, tables of speed."""

from __future__ import annotations

from tests.planner.documents.claim import Claim, Document
from tests.planner.documents.figures import (
    compute_seconds,
    kv_bytes,
    needed,
    read_seconds,
    saved,
    speculation_gain,
    tokens_per_pass,
    visual_tokens,
    weight_bytes,
)

_LEVELS = ((20, 400), (40, 200), (76, 64), (60, 16))
"""Patches and tokens of each, by level of detail."""
_MS_PER_TOKEN = 0.05
_VARIABLE = sum(patches * tokens for patches, tokens in _LEVELS) * _MS_PER_TOKEN
_H100_BANDWIDTH, _H100_FP8, _H100_BF16, _B200_BANDWIDTH = 3.35e12, 1978.9e12, 989.4e12, 8e12
_BLOCKS = 2048 * 16
_TOKEN = kv_bytes(1, 80, 8, 128)


def _speedups() -> tuple[Claim, ...]:
    rows = (("T4", 64, 18, 3.5, "rounded"), ("A100", 24, 6, 4.0, "right"), ("H100", 18, 2.5, 7.2, "right"))
    return tuple(
        Claim("Vision Encoder Benchmarks", f"{gpu}, {before} to {after} ms: {printed} times",
              f"{before} / {after}", before / after, printed, 1, verdict=verdict,
              why="3.56, cut off" if verdict == "rounded" else "")
        for gpu, before, after, printed, verdict in rows
    )  # fmt: skip


def _batches() -> tuple[Claim, ...]:
    rows = ((1, 2.5, 400), (4, 4.0, 1000), (16, 8.0, 2000), (64, 20.0, 3200))
    return tuple(
        Claim("Vision Encoder Benchmarks", f"batch of {batch} in {latency} ms: {printed:,} images/s",
              f"{batch} / {latency} ms", batch / latency * 1e3, printed, unit="images/s")
        for batch, latency, printed in rows
    )  # fmt: skip


def _levels() -> tuple[Claim, ...]:
    printed = (400, 400, 243, 48)
    return tuple(
        Claim("Variable LOD Execution", f"{patches} patches of {tokens} tokens: {each} ms",
              f"{patches} x {tokens} x 0.05", patches * tokens * _MS_PER_TOKEN, each, unit="ms")
        for (patches, tokens), each in zip(_LEVELS, printed, strict=True)
    )  # fmt: skip


TENSORRT = Document(
    "TensorRT for VLM Deployment: Production Inference Optimization",
    (
        Claim("Overview", "2 to 8 times less memory from FP16 to FP8 to INT4", "16 / 4", 16 / 4, 8,
              verdict="wrong", relation="at most", why="4 times; 8 times is from FP32 to INT4"),
        Claim("Challenges", "224x224 in patches of 16: a grid of 14x14", "224 // 16", 224 // 16, 14),
        Claim("CLIP", "224x224 in patches of 14: 256 tokens", "(224 // 14)^2", visual_tokens(224, 224), 256),
        Claim("CLIP", "256 tokens are a grid of 14x14 and 2 special ones", "14 x 14 + 2", 14 * 14 + 2, 256,
              verdict="wrong", why="The grid is 16x16; with the class token there are 257"),
        Claim("FP8", "3,958 TFLOP/s on H100", "3,957.8 / 2", _H100_FP8 / 1e12, 3958, unit="TFLOP/s",
              verdict="wrong", why="With sparsity; 989 in TF32 likewise, which is 495 dense"),
        Claim("Paged KV Cache", "Llama 70B: about 10 MB per token", "2 x 80 x 8 x 128 x 2", _TOKEN / 1e6, 10,
              unit="MB", relation="about", verdict="wrong",
              why="80 layers and 8 KV heads of 128: 327,680 bytes. Its own formula gives 1.3 MB"),
        Claim("Paged KV Cache", "2,048 tokens: 20 GB", "2,048 x 327,680", 2048 * _TOKEN / 1e9, 20, unit="GB",
              verdict="wrong", why="Derived from the 10 MB above"),
        Claim("Paged KV Cache", "2,048 blocks of 16 tokens, 64 heads: 85 GB",
              "2,048 x 16 x 80 x 2 x 64 x 128 x 2", kv_bytes(_BLOCKS, 80, 64, 128) / 1e9, 85, unit="GB",
              verdict="rounded", why="85.9, cut off; it is more than the H100 has"),
        Claim("Paged KV Cache", "such a pool of Llama 70B has 85 GB", "2,048 x 16 x 327,680",
              _BLOCKS * _TOKEN / 1e9, 85, unit="GB", verdict="wrong", why="It has 8 KV heads, not 64"),
        Claim("FlashAttention-3", "740 TFLOP/s are 75% of the peak", "740 / 989.4", 100 * 740e12 / _H100_BF16,
              75, unit="%"),
        Claim("Speculative Decoding", "K=4 at 75%: 3 tokens per pass", "(1 - 0.75^5) / (1 - 0.75)",
              tokens_per_pass(4, 0.75), 3,
              why="The expectation is 3.05, with the token that the target adds. K x a is 3 by chance"),
        Claim("Speculative Decoding", "K=4 at 75%: 3 drafts are accepted", "3.05 - 1",
              tokens_per_pass(4, 0.75) - 1, 3, verdict="wrong",
              why="A draft counts only if all before it were accepted"),
        Claim("Speculative Decoding", "by K x a, K=8 would give 6 tokens per pass",
              "(1 - 0.75^9) / (1 - 0.75)", tokens_per_pass(8, 0.75), 6, verdict="wrong",
              why="Even endless drafts give 1 / (1 - a) = 4"),
        Claim("Speculative Decoding", "2 to 3 times faster", "3.05 / (1 + 4 x 0.1)",
              speculation_gain(4, 0.75, 0.1), 2, relation="between", high=3,
              why="With a draft model of a tenth, and at small batches"),
        Claim("Mixed-Request Scheduling", "text is 5 to 10 times faster than image and text", "60 / 50",
              60 / 50,
              5, relation="between", high=10, verdict="wrong",
              why="By the times of the document about optimization"),
        Claim("Multi-GPU", "NVLink of A100: 600 GB/s both ways", "2 x 300", 2 * 300, 600, unit="GB/s"),
        Claim("Multi-GPU", "NVLink of H100: 900 GB/s both ways", "2 x 450", 2 * 450, 900, unit="GB/s"),
        Claim("Variable LOD Execution", "196 patches of 400 tokens: 3,920 ms", "196 x 400 x 0.05",
              196 * 400 * _MS_PER_TOKEN, 3920, unit="ms"),
        *_levels(),
        Claim("Variable LOD Execution", "together 196 patches", "20 + 40 + 76 + 60",
              sum(patches for patches, _ in _LEVELS), 196),
        Claim("Variable LOD Execution", "together 1,091 ms", "21,824 x 0.05", _VARIABLE, 1091, unit="ms"),
        Claim("Variable LOD Execution", "3.6 times faster", "3,920 / 1,091.2", 3920 / _VARIABLE, 3.6, 1),
        Claim("Quantization Strategy", "70 B in FP16: 140 GB", "70 x 10^9 x 2", weight_bytes(70e9, 16) / 1e9,
              140, unit="GB"),
        Claim("Quantization Strategy", "in FP8: 70 GB", "70 x 10^9", weight_bytes(70e9, 8) / 1e9, 70,
              unit="GB"),
        Claim("Quantization Strategy", "50% less", "1 - 70 / 140", 100 * saved(140, 70), 50, unit="%"),
        Claim("Quantization Strategy", "three scorers of 7 B in FP16: 42 GB", "3 x 7 x 10^9 x 2",
              weight_bytes(21e9, 16) / 1e9, 42, unit="GB"),
        Claim("Quantization Strategy", "in FP8: 21 GB", "3 x 7 x 10^9", weight_bytes(21e9, 8) / 1e9, 21,
              unit="GB"),
        Claim("Quantization Strategy", "all in FP16: 182 GB", "140 + 42", 140 + 42, 182, unit="GB"),
        Claim("Quantization Strategy", "it needs 3 H100", "182 / 80", needed(182, 80), 3),
        Claim("Quantization Strategy", "all in FP8: 91 GB", "70 + 21", 70 + 21, 91, unit="GB"),
        Claim("Quantization Strategy", "it fits on 2 H100", "91 / 80", needed(91, 80), 2),
        *_speedups(),
        *_batches(),
        Claim("Language Decoder Benchmarks", "18 ms per token: 55 tokens/s", "1 / 18 ms", 1 / 0.018, 55,
              unit="tokens/s", verdict="rounded", why="55.6, cut off"),
        Claim("Language Decoder Benchmarks", "18 ms per token of 70 B in FP8 on 8 H100",
              "70 GB / 8 / 3.35 TB/s",
              1e3 * read_seconds(70e9 / 8, _H100_BANDWIDTH), 18, unit="ms", relation="at least",
              why="Possible: reading the weights takes 2.6 ms"),
        Claim("Language Decoder Benchmarks", "2,048 tokens in 45 ms", "2 x 70 x 10^9 x 2,048 / 8 / 1,979 T",
              1e3 * compute_seconds(70e9, 2048, 8 * _H100_FP8), 45, unit="ms", relation="at least",
              why="Possible: 40% of the peak rate"),
        Claim("Language Decoder Benchmarks", "32 users: 1,760 tokens/s", "32 x 55", 32 * 55, 1760,
              unit="tokens/s"),
        Claim("Language Decoder Benchmarks", "FP4: 4 times less memory", "16 / 4", 16 / 4, 4,
              why="Without scales"),
        Claim("Language Decoder Benchmarks", "B200: 600 GB/s", "8 TB/s", _B200_BANDWIDTH / 1e9, 600,
              unit="GB/s", verdict="wrong", why="It is also less than an H100 has, 3,350 GB/s"),
        Claim("Language Decoder Benchmarks", "twice the bandwidth of H100", "8 / 3.35",
              _B200_BANDWIDTH / _H100_BANDWIDTH, 2, why="2.4 times"),
        Claim("End-to-End Benchmarks", "LLaVA-1.5-13B in FP16 on A100: 42 tokens/s", "1.555 TB/s / 26 GB",
              1 / read_seconds(weight_bytes(13e9, 16), 1.555e12), 42, unit="tokens/s", relation="at most",
              why="Possible: 70% of the bandwidth"),
        Claim("End-to-End Benchmarks", "in FP8 on H100: 95 tokens/s", "3.35 TB/s / 13 GB",
              1 / read_seconds(weight_bytes(13e9, 8), _H100_BANDWIDTH), 95, unit="tokens/s",
              relation="at most",
              why="Possible: 37% of the bandwidth"),
        Claim("End-to-End Benchmarks", "256 tokens in 8 ms: 32 tokens/ms", "256 / 8", 256 / 8, 32,
              unit="tokens/ms"),
    ),
)  # fmt: skip
"""The document about TensorRT."""

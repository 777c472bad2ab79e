"""Figures of the document about optimization: caches, KV, batches, precision, and sums of stages."""

from __future__ import annotations

from tests.planner.documents.claim import Claim, Document
from tests.planner.documents.figures import (
    compute_seconds,
    feature_bytes,
    kv_bytes,
    read_seconds,
    saved,
    tower_parameters,
    visual_tokens,
    weight_bytes,
)

_VISION, _TEXT = (kv_bytes(tokens, 80, 8, 128) / 1e9 for tokens in (256, 1792))
_FEATURES = [feature_bytes(1000, tokens, 1024) for tokens in (64, 256, 1024)]
_TOWER = tower_parameters(1024, 24, 4096, 14, 224)
_A100_BANDWIDTH, _A100_RATE = 2.039e12, 312e12
_KV = "The multiplication is wrong by a factor of 62; savings derived from it scale alike, ratios hold"
_BOUND = "70 B in 16 bits: every token reads all weights, here from an A100 with 80 GB"


def _batches() -> tuple[Claim, ...]:
    """Return the table of batch sizes: throughput is the batch divided by its latency."""
    rows = ((1, 78, 12.8), (4, 120, 33.3), (8, 180, 44.4), (16, 280, 57.1), (32, 480, 66.7))
    return tuple(
        Claim("Batch Size vs Latency", f"batch of {batch} in {latency} ms: {printed} req/s",
              f"{batch} / {latency} ms", batch / latency * 1e3, printed, 1, "req/s")
        for batch, latency, printed in rows
    )  # fmt: skip


OPTIMIZATION = Document(
    "VLM Inference Optimization: Production Deployment Strategies",
    (
        Claim("Precomputed Vision Features", "with a cache 50 instead of 58 ms: 13%", "1 - 50 / 58",
              100 * saved(58, 50), 13, unit="%", verdict="rounded", why="13.8, cut off"),
        Claim("Multi-Resolution Caching", "224x224: 64 tokens", "(224 // 14 // 2)^2",
              visual_tokens(224, 224, merge=2), 64),
        Claim("Multi-Resolution Caching", "448x448: 256 tokens", "(448 // 14 // 2)^2",
              visual_tokens(448, 448, merge=2), 256),
        Claim("Multi-Resolution Caching", "896x896: 1,024 tokens", "(896 // 14 // 2)^2",
              visual_tokens(896, 896, merge=2), 1024),
        Claim("Multi-Resolution Caching", "1,000 images of 64 tokens: 131 MB", "1,000 x 64 x 1,024 x 2",
              _FEATURES[0] / 1e6, 131, unit="MB"),
        Claim("Multi-Resolution Caching", "of 256 tokens: 524 MB", "1,000 x 256 x 1,024 x 2",
              _FEATURES[1] / 1e6, 524, unit="MB"),
        Claim("Multi-Resolution Caching", "of 1,024 tokens: 2.1 GB", "1,000 x 1,024 x 1,024 x 2",
              _FEATURES[2] / 1e9, 2.1, 1, "GB"),
        Claim("Multi-Resolution Caching", "the pyramid: 2.7 GB", "131 + 524 + 2,097 MB", sum(_FEATURES) / 1e9,
              2.7, 1, "GB", verdict="rounded", why="2.75, cut off"),
        Claim("KV cache breakdown", "KV of 256 visual tokens: 5.2 GB", "256 x 80 x 8 x 128 x 2 x 2", _VISION,
              5.2, 1, "GB", verdict="wrong", why=_KV),
        Claim("KV cache breakdown", "KV of 1,792 text tokens: 36.4 GB", "1,792 x 80 x 8 x 128 x 2 x 2", _TEXT,
              36.4, 1, "GB", verdict="wrong", why=_KV),
        Claim("KV cache breakdown", "KV of 2,048 tokens: 41.6 GB", "2,048 x 80 x 8 x 128 x 2 x 2",
              _VISION + _TEXT, 41.6, 1, "GB", verdict="wrong", why=_KV),
        Claim("Memory savings", "five queries without sharing: 26 GB", "5 x 0.0839 GB", 5 * _VISION, 26,
              unit="GB", verdict="wrong", why=_KV),
        Claim("Memory savings", "sharing saves 80% over five queries", "1 - 1 / 5", 100 * saved(5, 1), 80,
              unit="%"),
        Claim("Mixed-Request Scheduling", "image and text: 60 ms", "8 + 2 + 50", 8 + 2 + 50, 60, unit="ms"),
        Claim("Mixed-Request Scheduling", "a follow-up is 1.2 times faster", "60 / 50", 60 / 50, 1.2, 1),
        Claim("Continuous Batching", "static: 580 ms", "500 + 80", 500 + 80, 580, unit="ms"),
        Claim("Continuous Batching", "continuous: 130 ms", "50 + 80", 50 + 80, 130, unit="ms"),
        Claim("Continuous Batching", "4.5 times less latency", "580 / 130", 580 / 130, 4.5, 1),
        Claim("Continuous Batching", "1.3 times the throughput", "90% / 70%", 0.9 / 0.7, 1.3, 1),
        Claim("Vision Encoder Quantization", "CLIP ViT-L/14 in FP16: 427 MB", "303 million x 2 bytes",
              weight_bytes(_TOWER, 16) / 1e6, 427, unit="MB", verdict="wrong",
              why="427 million is about the number of parameters of image and text towers together"),
        Claim("Vision Encoder Quantization", "INT8 of 427 MB: 214 MB", "427 / 2", 427 / 2, 214, unit="MB",
              verdict="right"),
        Claim("Vision Encoder Quantization", "INT4 of 427 MB: 107 MB", "427 / 4", 427 / 4, 107, unit="MB"),
        Claim("Vision Encoder Quantization", "12 to 7 ms: 1.7 times", "12 / 7", 12 / 7, 1.7, 1),
        Claim("Vision Encoder Quantization", "12 to 4 ms: 3 times", "12 / 4", 12 / 4, 3),
        Claim("Vision Encoder Quantization", "12 to 5 ms: 2.4 times", "12 / 5", 12 / 5, 2.4, 1),
        Claim("Precision tradeoff", "70 B in FP16: 140 GB", "70 x 10^9 x 2", weight_bytes(70e9, 16) / 1e9,
              140,
              unit="GB"),
        Claim("Precision tradeoff", "vision in FP8, language in FP16: 120 GB", "140 - 0.303",
              (weight_bytes(70e9, 16) - weight_bytes(_TOWER, 8)) / 1e9, 120, unit="GB", verdict="wrong",
              why="20 GB less would need a tower of 20 B parameters; ViT-L/14 has 0.3 B"),
        Claim("Precision tradeoff", "vision in FP8, language in INT8: 90 GB", "70 x 10^9 x 1",
              weight_bytes(70e9, 8) / 1e9, 90, unit="GB", verdict="wrong",
              why="One byte for each of 70 x 10^9 parameters; the tower adds 0.3 GB"),
        Claim("Precision tradeoff", "all in INT4: 35 GB", "70 x 10^9 / 2", weight_bytes(70e9, 4) / 1e9, 35,
              unit="GB", why="Without scales: with one of 16 bits for 128 weights it is 36.1 GB"),
        Claim("KV cache quantization", "INT8 or FP8 saves 50%", "1 - 8 / 16", 100 * saved(16, 8), 50,
              unit="%",
              why="Without scales"),
        Claim("KV cache quantization", "INT8: 20.8 GB", "0.671 GB / 2", (_VISION + _TEXT) / 2, 20.8, 1, "GB",
              verdict="wrong", why=_KV),
        Claim("KV cache quantization", "vision in INT8, text in FP16: 39 GB", "0.0839 / 2 + 0.587 GB",
              _VISION / 2 + _TEXT, 39, unit="GB", verdict="wrong", why=_KV),
        Claim("KV cache quantization", "vision in INT8 saves 6%", "256 / 2,048 / 2",
              100 * saved(_VISION + _TEXT, _VISION / 2 + _TEXT), 6, unit="%"),
        Claim("Latency Breakdown", "first query: 78 ms", "2 + 8 + 2 + 15 + 50 + 1", 2 + 8 + 2 + 15 + 50 + 1,
              78,
              unit="ms", why="The sum is right; two of its terms are below"),
        Claim("Latency Breakdown", "a token of 70 B in 0.5 ms on an A100", "140 GB / 2.039 TB/s",
              1e3 * read_seconds(weight_bytes(70e9, 16), _A100_BANDWIDTH), 0.5, 1, "ms", verdict="wrong",
              why=_BOUND, relation="at least"),
        Claim("Precision tradeoff", "a token of 70 B in FP16 in 50 ms", "140 GB / 2.039 TB/s",
              1e3 * read_seconds(weight_bytes(70e9, 16), _A100_BANDWIDTH), 50, unit="ms", verdict="wrong",
              why=_BOUND, relation="at least"),
        Claim("Latency Breakdown", "333 tokens of 70 B in 15 ms on an A100", "2 x 70 x 10^9 x 333 / 312 T",
              1e3 * compute_seconds(70e9, 256 + 77, _A100_RATE), 15, unit="ms", verdict="wrong",
              why="Longer than this even at the peak rate", relation="at least"),
        Claim("Latency Breakdown", "follow-up: 61 ms", "10 + 50 + 1", 10 + 50 + 1, 61, unit="ms"),
        Claim("Latency Breakdown", "follow-up 1.3 times faster", "78 / 61", 78 / 61, 1.3, 1),
        Claim("Optimization priorities", "prefill 15 to 9 ms: 1.7 times", "15 / 9", 15 / 9, 1.7, 1),
        Claim("Optimization priorities", "optimized total: 41 ms", "2 + 4 + 2 + 9 + 25 + 1",
              2 + 4 + 2 + 9 + 25 + 1, 41, unit="ms", verdict="wrong",
              why="The 2 ms of preprocessing are left out"),
        Claim("Optimization priorities", "1.9 times faster", "78 / 43", 78 / 43, 1.9, 1, verdict="rounded",
              why="78 / 41 is 1.9; with preprocessing it is 1.8"),
        *_batches(),
        Claim("torch.compile", "7 + 1.5 + 12: 20.5 ms", "7 + 1.5 + 12", 7 + 1.5 + 12, 20.5, 1, "ms"),
        Claim("torch.compile", "1.4 times overall", "29 / 20.5", (12 + 2 + 15) / 20.5, 1.4, 1),
        Claim("Pipeline latency", "texture: 7 ms", "1 + 2 + 3 + 1", 1 + 2 + 3 + 1, 7, unit="ms"),
        Claim("Pipeline latency", "three scorers in parallel: 12 ms", "max(4, 3, 5)", max(4, 3, 5), 12,
              unit="ms", verdict="wrong",
              why="The words are swapped: 12 ms one after the other, 5 ms in parallel"),
        Claim("Pipeline latency", "encoding: 37 ms", "15 + 12 + 8 + 2", 15 + 12 + 8 + 2, 37, unit="ms"),
        Claim("Pipeline latency", "generation: 58 ms", "8 + 50", 8 + 50, 58, unit="ms"),
        Claim("Pipeline latency", "end to end: 122 ms", "7 + 12 + 2 + 1 + 37 + 58",
              7 + 12 + 2 + 1 + 37 + 58, 122,
              unit="ms", verdict="wrong", why="117 with scorers one after the other, 110 in parallel"),
        Claim("Pipeline latency", "196 patches of 400 tokens: 78,400 tokens", "224 x 224 pixels", 224 * 224,
              78400, verdict="wrong", relation="at most",
              why="The product is right, but 196 patches of 16x16 have only 50,176 pixels: no budget "
              "may be larger than what its region shows"),
        Claim("Pipeline latency", "2 times faster than 250 ms", "250 / 117", 250 / 117, 2),
        Claim("CUDA streams", "2.4 times faster scoring", "12 / 5", 12 / 5, 2.4, 1),
        Claim("CUDA streams", "6% less in all", "1 - 110 / 117", 100 * saved(117, 110), 6, unit="%"),
        Claim("Relevance-aware batching", "45 instead of 52 ms: 15% faster", "52 / 45 - 1",
              100 * (52 / 45 - 1), 15, unit="%", verdict="rounded", why="15.6, cut off; 13.5% less time"),
    ),
)  # fmt: skip
"""The document about optimization."""

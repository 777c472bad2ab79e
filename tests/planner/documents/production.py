"""Figures of the document about production: shares, costs, and the service levels that it sets as targets."""

from __future__ import annotations

from tests.planner.documents.claim import Claim, Document
from tests.planner.documents.figures import cost_per_request, saved, whole

_T4_HOUR = 0.59
"""US dollars of one hour of a T4 on demand (docs/planner-hardware.md)."""
_MIX = (20 * 400 + 40 * 200 + 76 * 64 + 60 * 16) / 196
"""Tokens per patch in the example of the document about TensorRT."""

PRODUCTION = Document(
    "Production VLM Deployment",
    (
        Claim("Caching Strategies", "the vision encoder is about 70% of the latency", "8 / 78", 100 * 8 / 78,
              70, unit="%", relation="about", verdict="wrong",
              why="By the times of the document about optimization; it depends on model, image and answer"),
        Claim("MIG Partitioning", "three instances of profile 9 on an A100 with 40 GB",
              "min(7 slices / 3, 40 GB / 20 GB)", min(whole(7, 3), whole(40, 20)), 3, verdict="wrong",
              why="Profile 9 is 3g.20gb, of which two fit"),
        Claim("Quantization Strategies", "FP16: 2 times less memory", "32 / 16", 32 / 16, 2,
              why="Against FP32"),
        Claim("Quantization Strategies", "FP8 on H100: 2 times the throughput", "1,978.9 / 989.4",
              1978.9 / 989.4, 2, why="Of the peak rate"),
        Claim("Batch Inference", "with batches, costs fall by 50 to 70%", "1 - 1 / 5", 100 * saved(5, 1), 50,
              unit="%", relation="between", high=70, verdict="wrong",
              why="5 to 10 times the throughput per GPU would be 80 to 90% less for each request"),
        Claim("Spot Instances", "one of five replicas may be missing: four run", "5 - 1", 5 - 1, 4),
        Claim("Spot Instances", "80% spot at 70% less: also 50 to 70%", "0.8 x 70%", 0.8 * 70, 50,
              unit="%", relation="between", high=70),
        Claim("Smart Caching", "30 to 40% of hits save 30 to 40% of the computing", "hits / requests", 35, 30,
              unit="%", relation="between", high=40, why="If hits cost as much to compute as misses"),
        Claim("Performance Targets", "30 to 50% fewer tokens than 256 per patch", "1 - 111.3 / 256",
              100 * saved(256, _MIX), 30, unit="%", relation="between", high=50, verdict="wrong",
              why="A target. The example with 196 patches saves more: 57%, and 72% of 400"),
        Claim("Performance Targets", "at most 0.02 dollars per request on a T4", "0.59 / 3,600 / 50",
              cost_per_request(_T4_HOUR, 50), 0.02, 2, "dollars", relation="at least",
              why="A target, and a loose one: 50 requests per second cost 0.0000033 dollars each"),
        Claim("Performance Targets", "at most 0.02 dollars with one request at a time, 200 ms each",
              "0.59 / 3,600 / 5",
              cost_per_request(_T4_HOUR, 5), 0.02, 2, "dollars", relation="at least",
              why="0.000033 dollars each"),
    ),
)  # fmt: skip
"""The document about production."""

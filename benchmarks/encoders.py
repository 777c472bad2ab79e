"""Time the vision encoder on one image, with every set of kernels and every kind of built encoder.

    python benchmarks/encoders.py [--sizes 448 896] [--dtypes bfloat16 float32] [--repeats 5] [--threads 2]
                                  [--folder PATH]

It uses the checkpoint of quick.py. Encoders are built first (minutes), into --engines, where later runs reuse
them. All candidates take turns, so that other processes on the machine disturb all of them alike; figures are
medians. A running stream waits for at most the longest slice. The difference is the largest difference from
plain torch, divided by torch's largest output. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint import write_checkpoint
from fovea.core.markdown import markdown_table
from fovea.core.media import Image, PixelBudget, content_identity
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.models.compile import describe_site, find_engines
from fovea.engine.vision.built.engines import Builder, largest_difference
from fovea.engine.vision.processor.base import ProcessedImage

BUILT = ("aot", "onnx")


@dataclass
class Candidate:
    """A model whose encoder is measured.

    name: title of its row.
    loaded: the model.
    seconds: by image size, the duration of each run.
    longest: by image size, the duration of each run's longest slice.
    difference: by image size, the largest relative difference from plain torch.
    """

    name: str
    loaded: LoadedModel
    seconds: dict[int, list[float]] = field(default_factory=dict)
    longest: dict[int, list[float]] = field(default_factory=dict)
    difference: dict[int, float] = field(default_factory=dict)

    @torch.inference_mode()
    def run(self, image: ProcessedImage) -> tuple[float, float, torch.Tensor]:
        slices, longest = self.loaded.model.encode_slices(image), 0.0
        started = last = time.perf_counter()
        while True:
            try:
                next(slices)
            except StopIteration as stop:
                ended = time.perf_counter()
                return ended - started, max(longest, ended - last), stop.value.embeds
            now = time.perf_counter()
            longest, last = max(longest, now - last), now


def picture(size: int) -> Image:
    rgb = np.random.default_rng(size).integers(0, 255, (size, size, 3), dtype=np.uint8).tobytes()
    return Image(content_identity("benchmark", size, size, rgb), size, size, rgb)


def build(folder: Path, out: Path, format: str, base: EngineConfig, sizes: list[int]) -> float:
    """Build encoders for the sizes. Returns the seconds that it took, or 0 if they are built already."""
    loaded = load_model(str(folder), base.changed(kernels="torch"))
    encoder = loaded.model.static_encoder()
    assert encoder is not None
    machine = describe_site(loaded.model, loaded.info.architecture)
    grids = {loaded.processor.plan(size, size, PixelBudget()).grid: [f"{size}x{size}"] for size in sizes}
    if (out / "manifest.json").is_file():
        engines = find_engines(str(out), folder, loaded.model, "none")
        if (
            engines
            and not engines.manifest.misfit(machine)
            and {grid.grid for grid in engines.manifest.grids} == set(grids)
        ):
            return 0.0
    started = time.perf_counter()
    model = loaded.model
    Builder(encoder, format, 1, model.device, model.dtype, machine, out, progress=print).build(grids)
    return time.perf_counter() - started


def candidates(
    folder: Path, engines: Path, dtype: str, args: argparse.Namespace
) -> tuple[list[Candidate], dict[str, float]]:
    """The candidates that run on this machine, and the build seconds of each format."""
    base = EngineConfig.of(dtype=dtype, device="cpu", threads=args.threads)
    build_s: dict[str, float] = {}
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": lambda: {"kernels": "torch"},
        "torch, compiled": lambda: {"kernels": "torch", "compile": "encoder=default,projector=default"},
        "onednn": lambda: {"kernels": "onednn"},
        "native": lambda: {"kernels": "native"},
    }
    for format in BUILT:
        out = engines / f"{dtype}-{format}"

        def build_settings(out: Path = out, format: str = format) -> dict[str, Any]:
            build_s[format] = build(folder, out, format, base, args.sizes)
            return {"kernels": "torch", "encoder_engines": str(out)}

        kinds[f"{format}, built"] = build_settings
    usable = []
    for name, settings in kinds.items():
        try:
            loaded = load_model(str(folder), base.changed(**settings()))
            loaded.model.decoder.layers = torch.nn.ModuleList()  # unused; without it, six models fit
            usable.append(Candidate(name, loaded))
        except Exception as error:  # noqa: BLE001 - print it, and measure the others
            print(f"{dtype}, {name}: not measured: {error}")
    return usable, build_s


def measure(candidates: list[Candidate], size: int, repeats: int) -> None:
    image = picture(size)
    processor = candidates[0].loaded.processor
    ready = processor.process(image, processor.plan(size, size, PixelBudget()))
    reference: torch.Tensor | None = None
    for repeat in range(repeats + 1):
        for candidate in candidates:
            seconds, longest, embeds = candidate.run(ready)
            if repeat:
                candidate.seconds.setdefault(size, []).append(seconds)
                candidate.longest.setdefault(size, []).append(longest)
            else:  # the first run compiles, and its output is compared
                reference = embeds if reference is None else reference
                candidate.difference[size] = largest_difference(embeds, reference)


def report(dtype: str, candidates: list[Candidate], sizes: list[int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    head = [dtype, *(title for size in sizes for title in (f"{size}x{size}", "longest slice", "difference"))]
    rows = []
    for candidate in candidates:
        cells, result = [], {}
        for size in sizes:
            times = sorted(1000 * second for second in candidate.seconds[size])
            median, longest = statistics.median(times), 1000 * statistics.median(candidate.longest[size])
            cells += [
                f"{median:.0f} ms ({times[0]:.0f}-{times[-1]:.0f})",
                f"{longest:.1f} ms",
                f"{candidate.difference[size]:.1g}",
            ]
            result[str(size)] = {
                "ms": median,
                "longest_slice_ms": longest,
                "difference": candidate.difference[size],
            }
        rows.append([candidate.name, *cells])
        results[candidate.name] = result
    print(f"\n{markdown_table(head, rows)}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[448, 896])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    parser.add_argument("--engines", type=Path, default=Path("/tmp/fovea-bench/encoders"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # warnings of torch's compiler about itself
    torch.set_num_threads(args.threads)
    folder = write_checkpoint(args.folder)
    results: dict[str, Any] = {"threads": args.threads}
    for dtype in args.dtypes:
        usable, build_s = candidates(folder, args.engines, dtype, args)
        for size in args.sizes:
            measure(usable, size, args.repeats)
        results[dtype] = report(dtype, usable, args.sizes)
        print(f"built in seconds: { {name: round(second, 1) for name, second in build_s.items()} }")
        results[dtype]["build_s"] = build_s
        del usable
    print(json.dumps(results))


if __name__ == "__main__":
    main()

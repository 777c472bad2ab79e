"""fovea build MODEL: compile vision encoders ahead of time, one per resolution, for --encoder-engines."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.cli.common import DEFAULT_MODEL, config_file, count
from fovea.core.errors import ConfigError, FoveaError, UnsupportedModel
from fovea.core.media import LEVELS, PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.vision.built.manifest import FORMATS, Manifest

if TYPE_CHECKING:
    from fovea.engine.load import LoadedModel
    from fovea.engine.vision.built.manifest import Grid

RESOLUTIONS = ("448x448", "896x896")
SETTINGS = ("dtype", "device", "threads", "revision")


def register(commands: Any) -> None:
    parser = commands.add_parser("build", description=f"{__doc__} See docs/engines.md.")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"a folder, a hub id, or {DEFAULT_MODEL} (default)"
    )
    parser.add_argument(
        "--resolutions", nargs="+", type=_resolution, metavar="WxH",
        default=[_resolution(text) for text in RESOLUTIONS],
        help=f"images to build for, width and height in pixels (default: {' '.join(RESOLUTIONS)})",
    )  # fmt: skip
    parser.add_argument(
        "--levels", nargs="+", choices=LEVELS, default=["high"],
        help="detail levels of these images (default: high)",
    )  # fmt: skip
    parser.add_argument("--format", choices=tuple(FORMATS), default="aot", help="(default: aot)")
    parser.add_argument(
        "--blocks-per-part", type=count, default=1, metavar="N",
        help="blocks of the encoder that run without a pause, while streams wait (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write (default: fovea-engines inside the checkpoint)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; flags and FOVEA_* override it"
    )
    skip = [name for name in options.setting_names(EngineConfig) if name not in SETTINGS]
    options.add_options(parser, "engine", EngineConfig, skip=skip)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file = config_file(args)
    # Parts are exported from plain weights. Settings that change weights or encoders are fixed here.
    config = options.settings(
        EngineConfig, args, {name: value for name, value in file.items() if name in SETTINGS},
        kernels="torch", quantization="none", encoder_engines="off", compile="off", embed_disk_dir="",
    )  # fmt: skip
    model = options.lookup("model", args, file)
    manifest, folder = _build(str(model[0]) if model else DEFAULT_MODEL, config, args)
    for grid in manifest.grids:
        print(
            f"{grid.grid[1]}x{grid.grid[2]} patches ({', '.join(grid.sources)}): {len(grid.parts)} parts in "
            f"{len(set(grid.parts))} files, {manifest.precision}, largest difference {grid.difference:.2g}"
        )
    size = sum((folder / name).stat().st_size for name in manifest.checksums)
    print(
        f"{folder}: {len(manifest.checksums)} files, {size / 1e6:.1f} MB; "
        f"use them with --encoder-engines {folder}"
    )
    return 0


def _build(name: str, config: EngineConfig, args: argparse.Namespace) -> tuple[Manifest, Path]:
    from fovea.engine.load import load_model, resolve
    from fovea.engine.models.compile import ENGINES_FOLDER, describe_site
    from fovea.engine.models.gguf.reader import holds_gguf
    from fovea.engine.vision.built.engines import Builder
    from fovea.engine.vision.built.formats import format_named
    from fovea.kernels.choose import set_threads

    set_threads(config.model.threads)
    path = resolve(name, config.model.revision)
    if holds_gguf(path):
        raise UnsupportedModel(
            f"{path} is in GGUF files, and encoders are built from plain weights; accepted: a folder with "
            "safetensors"
        )
    folder = args.out.expanduser() if args.out else path / ENGINES_FOLDER
    loaded = load_model(name, config)
    model = loaded.model
    format_named(args.format).check(model.device)
    encoder = model.static_encoder()
    if encoder is None:
        raise UnsupportedModel(
            f"no encoders can be built for {loaded.info.architecture}; "
            "accepted: Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
        )
    builder = Builder(
        encoder,
        args.format,
        args.blocks_per_part,
        model.device,
        model.dtype,
        describe_site(model, loaded.info.architecture),
        folder,
        progress=lambda line: print(line, file=sys.stderr),
    )
    return builder.build(_grids(loaded, encoder.tower.merge, args.resolutions, args.levels)), folder


def _grids(
    loaded: LoadedModel, merge: int, sizes: list[tuple[int, int]], levels: list[str]
) -> dict[Grid, list[str]]:
    """Return the grid of every size at every level, with the sizes and levels that lead to it.

    Of large images it is also the grid of the small view with which `relevance` begins.
    """
    grids: dict[Grid, list[str]] = {}
    for width, height in sizes:
        for level in levels:
            try:
                plan = loaded.processor.plan(width, height, PixelBudget(level))  # type: ignore[arg-type]
            except FoveaError as error:
                raise ConfigError(
                    f"--resolutions {width}x{height}: {error.message}", param="resolutions"
                ) from error
            grids.setdefault(plan.grid, []).append(f"{width}x{height} {level}")
            view = _first_view(plan.grid, merge)
            if view != plan.grid:
                grids.setdefault(view, []).append(f"{width}x{height} {level}, first view of relevance")
    return grids


def _first_view(grid: Grid, merge: int) -> Grid:
    """Return the grid of the view at which the model looks before `relevance` chooses regions."""
    from fovea.relevance.policy import look_shape

    rows, columns = look_shape((grid[1] // merge, grid[2] // merge))
    return 1, rows * merge, columns * merge


def _resolution(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels")
    return int(match[1]), int(match[2])

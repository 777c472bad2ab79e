"""fovea profile: where the time of requests goes, stage by stage."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.common import SINGLE_USER, add_engine_options, check_writable, config_file, engine_loader
from fovea.cli.text import HelpFormatter, fitted
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The requests whose time is measured."""

    image: Path | None = setting(None, "Image file of all requests; none: a generated image.")
    side: int | None = setting(
        None,
        "Width and height of the generated image in pixels. 0: no image. none: 448, or no image for a model "
        "that takes text alone.",
        low=0,
        high=8192,
    )
    text: str = setting("Describe the picture.", "The question.")
    tokens: int = setting(32, "Tokens of every answer.", low=2, high=10**5)
    repeats: int = setting(3, "Requests one after another.", low=1, high=1000)
    requests: int = setting(8, "Requests of the steady load. 0: no load.", low=0, high=10**5)
    concurrency: int = setting(4, "Simultaneous requests of the load.", low=1, high=1024)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.image is not None and self.side is not None:
            raise ConfigError("side is for a generated image, but a file is given", param="side")


def register(commands: Any) -> None:
    parser = commands.add_parser("profile", description=__doc__, usage="fovea profile [MODEL] [OPTIONS]")
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw stacked bars: .png, .svg or .pdf")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every span as a Chrome trace, for Perfetto"
    )
    parser.add_argument(
        "--save-hardware",
        type=Path,
        metavar="FILE",
        help="write this machine's rates and efficiencies, for `fovea plan --hardware-file`",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON in the last line")
    options.add_options(parser, "requests", ProfileSettings)
    add_engine_options(parser, model_flag=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.bench.plot import check_plot
    from fovea.cli.profile.measure import Profiler
    from fovea.cli.profile.report import as_dict, hardware_toml, table

    file = config_file(args)
    workload = options.settings(ProfileSettings, args, {})
    # Several tokens in a step would hide how long one takes.
    load = engine_loader(args, file, **SINGLE_USER, speculate="off")
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.plot, args.trace, args.save_hardware)):
        check_writable(path)
    profiler = Profiler(workload)
    profile = profiler.run(load())
    print(fitted(table(profile)))
    if args.trace:
        args.trace.write_text(json.dumps(profiler.trace(profile)) + "\n", encoding="utf-8")
    if args.plot:
        from fovea.cli.profile.report import draw

        draw(args.plot, profile)
    if args.save_hardware:
        args.save_hardware.write_text(hardware_toml(profile), encoding="utf-8")
    if args.json:
        print(json.dumps(as_dict(profile)))
    return 0

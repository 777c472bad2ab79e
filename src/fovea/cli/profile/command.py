"""fovea profile [MODEL]: where the time of a request goes, stage by stage, and the least that each stage could take.

A server of its own, in this process, is asked over a socket: some requests one after another, of which the one in the middle
is shown, then a steady load. A floor is the bytes that a stage must read over this machine's bandwidth, or its operations
over this machine's peak, whichever is more; both are measured first, with the kernels that are in use.

  fovea profile
  fovea profile ./checkpoint --threads 2 --quantization int8 --side 448 --tokens 64
  fovea profile --image photo.jpg --requests 16 --concurrency 8 --plot stages.png --trace stages.json

--trace is a file for https://ui.perfetto.dev. With --json the last line of stdout is everything as one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.common import ALONE, add_engine_options, check_writable, config_file, engine_loader
from fovea.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asked:
    """image: picture file of all requests (default: a generated one).
    side: pixels of the generated picture's sides; 0: no picture. [0, 8192].
    text: the question (default: "Describe the picture.").
    tokens: of every answer. [2, 10**5].
    repeats: requests one after another. [1, 1000].
    requests: of the steady load; 0 leaves it out. [0, 10**5].
    concurrency: requests at once under the load. [1, 1024].
    """

    image: Path | None = None
    side: int | None = None
    text: str = "Describe the picture."
    tokens: int = 32
    repeats: int = 3
    requests: int = 8
    concurrency: int = 4

    def __post_init__(self) -> None:
        if self.image is not None and self.side is not None:
            raise ConfigError("side is of a generated picture, and an image is given", param="side")
        for name, low, high in (
            ("side", 0, 8192),
            ("tokens", 2, 10**5),
            ("repeats", 1, 1000),
            ("requests", 0, 10**5),
            ("concurrency", 1, 1024),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; accepted: {low} to {high}", param=name)


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="where the time of a request goes, stage by stage",
        description=__doc__,
        usage="fovea profile [MODEL] [OPTIONS]",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw stacked bars: .png, .svg or .pdf")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every span as a Chrome trace, for Perfetto"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON in the last line")
    options.add_options(parser, "what is asked", Asked)
    add_engine_options(parser, model_flag=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.bench.plot import check_plot
    from fovea.cli.profile.measure import Profiler
    from fovea.cli.profile.report import as_dict, table

    file = config_file(args)
    asked: Asked = options.settings(Asked, args, {})
    load = engine_loader(args, file, **ALONE)
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.plot, args.trace)):
        check_writable(path)
    profiler = Profiler(asked)
    found = profiler.run(load())
    print(table(found))
    if args.trace:
        args.trace.write_text(json.dumps(profiler.trace(found)) + "\n", encoding="utf-8")
    if args.plot:
        from fovea.cli.profile.plot import draw

        draw(args.plot, found)
    if args.json:
        print(json.dumps(as_dict(found)))
    return 0

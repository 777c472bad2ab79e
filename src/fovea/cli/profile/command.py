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
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.common import SINGLE_USER, add_engine_options, check_writable, config_file, engine_loader
from fovea.cli.profile.settings import ProfileSettings


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
    options.add_options(parser, "requests", ProfileSettings)
    add_engine_options(parser, model_flag=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.bench.plot import check_plot
    from fovea.cli.profile.measure import Profiler
    from fovea.cli.profile.report import as_dict, table

    file = config_file(args)
    workload = options.settings(ProfileSettings, args, {})
    load = engine_loader(args, file, **SINGLE_USER)
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.plot, args.trace)):
        check_writable(path)
    profiler = Profiler(workload)
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

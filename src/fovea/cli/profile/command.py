"""fovea profile [MODEL]: where the time of a request goes, stage by stage, and how fast each stage could be.

The command starts a server in its own process and sends requests to it over a socket: first some one after
another, of which the median is shown, then a steady load. The lower bound of a stage is the larger of two
times: its bytes over this machine's bandwidth, and its operations over this machine's peak. Both are measured
with the kernels in use.

  fovea profile
  fovea profile ./checkpoint --threads 2 --quantization int8 --side 448 --tokens 64
  fovea profile --image photo.jpg --requests 16 --concurrency 8 --plot stages.png --trace stages.json

--trace writes a file for https://ui.perfetto.dev. With --json the last line of stdout has everything as one
JSON object.
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
    load = engine_loader(args, file, **SINGLE_USER)
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.plot, args.trace, args.save_hardware)):
        check_writable(path)
    profiler = Profiler(workload)
    profile = profiler.run(load())
    print(table(profile))
    if args.trace:
        args.trace.write_text(json.dumps(profiler.trace(profile)) + "\n", encoding="utf-8")
    if args.plot:
        from fovea.cli.profile.plot import draw

        draw(args.plot, profile)
    if args.save_hardware:
        args.save_hardware.write_text(hardware_toml(profile), encoding="utf-8")
    if args.json:
        print(json.dumps(as_dict(profile)))
    return 0

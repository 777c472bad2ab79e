"""fovea advise: which inference engine suits a situation, by rules with sources.

Fovea's own engine is one of eight, and is named only where it is the better
choice. `fovea gateway` works in front of any of them. docs/engine-advisor.md
tells how rules weigh and how to use your own.

  fovea advise --device x86-cpu --strangers true
  fovea advise --device nvidia-gpu --several-devices true --checkpoint fp8 --sources
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.planner.situation import Situation


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        description=__doc__,
        usage="fovea advise [SITUATION] [OPTIONS]",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_options(parser, "situation", Situation)
    parser.add_argument("--rules", type=Path, metavar="FILE", help="your own rules (docs/engine-advisor.md)")
    parser.add_argument("--sources", action="store_true", help="print every reason with its source and date")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fovea.cli.plan.advice import as_dict, show_advice
    from fovea.planner.advisor import advise, read_advice

    situation = options.flag_settings(Situation, args)
    found = advise(situation, advice=read_advice(args.rules) if args.rules else None)
    if args.json:
        print(json.dumps(as_dict(found)))
    else:
        show_advice(found, Console(file=sys.stdout, highlight=False), sources=args.sources)
    return 0 if found.best else 1

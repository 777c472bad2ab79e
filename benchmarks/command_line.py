"""Start times of libraries for command lines, with the flags of `fovea serve` declared in each.

    python -m benchmarks.command_line

Every library is installed into an environment of its own, with what it needs and nothing else. The flags come
from the settings classes (`core.settings`): name, type, help, bounds, accepted values, group. Printed are
processor times, the least of 7 runs, without the 10 to 20 ms of a Python that does nothing: of the import
alone, and of `--help` with all flags. docs/dependencies.md has the figures and the choice.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from fovea.cli.serve import ServeSettings
from fovea.core.settings import Setting, inner_type, settings_of
from fovea.engine.config import EngineConfig
from fovea.server.settings import ServerSettings

RUNS = 7
KINDS = {int: "int", float: "float", bool: "bool"}
READ = """import json
rows = json.load(open("rows.json"))
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
"""
# jsonargparse gets no bounds: its registry of types by bounds refuses a second name for the same ones.
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "argparse": ("", "argparse", """
import argparse
parser, groups = argparse.ArgumentParser(), {}
for row in rows:
    group = groups.setdefault(row["group"], parser.add_argument_group(row["group"]))
    group.add_argument("--" + row["name"].replace("_", "-"), metavar="X", help=row["help"].replace("%", "%%"))
parser.parse_args()
"""),
    "argcomplete": ("argcomplete==3.7.2", "argcomplete", ""),
    "shtab": ("shtab==1.13.0", "shtab", ""),
    "pydantic-settings": ("pydantic-settings==2.16.3", "pydantic_settings", """
from typing import Literal
from pydantic import Field, create_model
from pydantic_settings import BaseSettings, SettingsConfigDict
fields = {}
for row in rows:
    kind = Literal[tuple(row["choices"])] if row["choices"] else KINDS[row["kind"]]
    bounds = {} if row["low"] is None else {"ge": row["low"], "le": row["high"]}
    fields[row["name"]] = (kind | None, Field(None, description=row["help"], **bounds))
config = SettingsConfigDict(cli_parse_args=True, env_prefix="FOVEA_", cli_kebab_case=True)
create_model("Serve", __base__=type("Base", (BaseSettings,), {"model_config": config}), **fields)()
"""),
    "jsonargparse": ("jsonargparse==4.53.0", "jsonargparse", """
from jsonargparse import ArgumentParser
from typing import Literal, Optional
parser, groups = ArgumentParser(env_prefix="FOVEA", default_env=True), {}
parser.add_argument("--config", action="config")
for row in rows:
    group = groups.setdefault(row["group"], parser.add_argument_group(row["group"]))
    kind = Literal[tuple(row["choices"])] if row["choices"] else KINDS[row["kind"]]
    group.add_argument("--" + row["name"], type=Optional[kind], help=row["help"].replace("%", "%%"))
parser.parse_args()
"""),
    "typer": ("typer==0.29.2", "typer", """
import inspect
import typer
from typing import Annotated, Literal, Optional
parameters = []
for row in rows:
    kind = Literal[tuple(row["choices"])] if row["choices"] else KINDS[row["kind"]]
    option = typer.Option(help=row["help"], envvar="FOVEA_" + row["name"].upper(),
                          rich_help_panel=row["group"], min=row["low"], max=row["high"])
    parameters.append(inspect.Parameter(row["name"], inspect.Parameter.KEYWORD_ONLY, default=None,
                                        annotation=Annotated[Optional[kind], option]))
def serve(**values): pass
serve.__signature__ = inspect.Signature(parameters)
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
app = typer.Typer()
app.command()(serve)
app()
"""),
    "cyclopts": ("cyclopts==5.5.2", "cyclopts", """
import inspect
from cyclopts import App, Parameter
from cyclopts.config import Env, Toml
from cyclopts.validators import Number
from typing import Annotated, Literal, Optional
parameters = []
for row in rows:
    kind = Literal[tuple(row["choices"])] if row["choices"] else KINDS[row["kind"]]
    bounds = None if row["low"] is None else Number(gte=row["low"], lte=row["high"])
    option = Parameter(help=row["help"], group=row["group"], validator=bounds)
    parameters.append(inspect.Parameter(row["name"], inspect.Parameter.KEYWORD_ONLY, default=None,
                                        annotation=Annotated[Optional[kind], option]))
def serve(**values): pass
serve.__signature__ = inspect.Signature(parameters)
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
app = App(config=[Env("FOVEA_"), Toml("fovea.toml")])
app.default(serve)
app()
"""),
}  # fmt: skip
"""Per library: what is installed, the module, and a program with all flags."""


def rows() -> list[dict[str, object]]:
    """Return the declared settings of `fovea serve`. Lists and paths are texts here."""
    return [
        _row(cls.__name__, entry)
        for cls in (ServeSettings, EngineConfig, ServerSettings)
        for entry in settings_of(cls)
        if not entry.rule.internal
    ]


def _row(title: str, entry: Setting) -> dict[str, object]:
    hint = inner_type(entry.hint) if isinstance(entry.hint, types.UnionType) else entry.hint
    bounds = (entry.rule.low, entry.rule.high) if hint in (int, float) else (None, None)
    return {
        "name": entry.name, "kind": KINDS.get(hint, "str"), "help": entry.rule.help,
        "group": " ".join((title, *entry.subject)), "low": bounds[0], "high": bounds[1],
        "choices": [word for word in entry.rule.choices if word],
    }  # fmt: skip


def seconds(python: Path, folder: Path, *words: str) -> float:
    """Return the least processor time of a process, children not counted twice. Raises if it fails."""
    times = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([python, *words], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> int:
    """Measure every library and print a table."""
    declared = rows()
    print(f"{len(declared)} settings of fovea serve; milliseconds of processor time, the least of {RUNS}")
    print(f"{'library':18} {'packages':>8} {'import':>7} {'--help':>7}")
    for name, (package, module, program) in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "rows.json").write_text(json.dumps(declared), encoding="utf-8")
            (folder / "program.py").write_text(READ + program, encoding="utf-8")
            subprocess.run([sys.executable, "-m", "venv", folder / "v"], check=True)
            python = folder / "v" / "bin" / "python"
            if package:
                subprocess.run(
                    [python, "-m", "pip", "install", "-qq", package], check=True, stderr=subprocess.DEVNULL
                )
            listed = subprocess.run(
                [python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True
            )
            count = len(json.loads(listed.stdout)) - 2  # pip and setuptools
            empty = seconds(python, folder, "-c", "pass")
            loaded = seconds(python, folder, "-c", f"import {module}") - empty
            helped = (
                f"{(seconds(python, folder, 'program.py', '--help') - empty) * 1e3:.0f}" if program else "-"
            )
        print(f"{name:18} {count:8} {loaded * 1e3:7.0f} {helped:>7}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

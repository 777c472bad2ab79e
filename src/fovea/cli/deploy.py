"""fovea deploy: render the artefacts of a deployment from one spec, and check them."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.core.errors import ConfigError
from fovea.deploy import images
from fovea.deploy import target as checks
from fovea.deploy.read import KnownSettings, read_spec, unused_images
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import TARGETS, render, target
from fovea.deploy.write import write


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "deploy", description=f"{__doc__} docs/deployment.md describes the spec and every target."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    rendering = actions.add_parser("render", help="write the files of one target or more")
    _add_spec(rendering)
    rendering.add_argument("--out", required=True, metavar="DIR", help="folder for the files")
    rendering.add_argument(
        "--force", action="store_true", help="overwrite files that were edited since they were rendered"
    )
    rendering.set_defaults(run=run_render)
    checking = actions.add_parser("check", help="check rendered files with the targets' own tools")
    _add_spec(checking)
    checking.add_argument("folder", metavar="DIR", help="folder of the rendered files")
    checking.set_defaults(run=run_check)
    listing = actions.add_parser("targets", help="list the targets")
    listing.set_defaults(run=run_targets)
    versions = actions.add_parser("versions", help="list the container images of the services beside Fovea")
    versions.add_argument(
        "--digests",
        action="store_true",
        help="ask the registries by skopeo, crane or docker, and print the images with their digests as the "
        "table [images] of a spec",
    )
    versions.set_defaults(run=run_versions)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        required=True,
        action="append",
        metavar="NAME",
        help="a name of `fovea deploy targets`; may be given several times",
    )
    parser.add_argument("--spec", required=True, metavar="FILE", help="TOML file of the deployment")


def run_render(args: argparse.Namespace) -> int:
    """Render targets and write their files. Returns 0."""
    files = render(_spec(args), args.target)
    written = write(files, Path(args.out), force=args.force)
    for word, paths in (
        ("created", written.created),
        ("changed", written.changed),
        ("removed", written.removed),
    ):
        for path in paths:
            print(f"{word} {path}")
    print(f"{len(files)} files in {args.out}, {len(written.unchanged)} of them unchanged")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Check rendered files. Returns 1 if a check fails or no check could run, else 0."""
    spec, folder = _spec(args), Path(args.folder).absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; accepted: the folder of `fovea deploy render`", param="dir"
        )
    wanted = [each for name in args.target for each in target(name).load().checks(spec)]
    outcomes = [checks.run_check(each, folder) for each in dict.fromkeys(wanted)]
    for warning in images.old(images.used(render(spec, args.target).values()), datetime.date.today()):
        print(f"warning: {warning}", file=sys.stderr)
    for outcome in outcomes:
        print(f"{outcome.status:8}{outcome.check.subject} ({outcome.check.tool})")
        if outcome.status == "failed":
            print(outcome.output or "no output", file=sys.stderr)
        elif outcome.status == "skipped":
            print(f"        {outcome.output}")
    if not any(outcome.status == "passed" for outcome in outcomes):
        print("fovea: no check passed", file=sys.stderr)
        return 1
    return int(any(outcome.status == "failed" for outcome in outcomes))


def run_targets(args: argparse.Namespace) -> int:
    """Print the targets. Returns 0."""
    width = max(len(each.name) for each in TARGETS)
    for each in TARGETS:
        print(f"{each.name:{width}}  {each.text}")
    return 0


def run_versions(args: argparse.Namespace) -> int:
    """Print the table of images, or the table [images] of a spec with digests. Returns 0."""
    known, today = images.images().values(), datetime.date.today()
    if args.digests:
        lines = [f'{each.name} = "{images.with_digest(each.reference, checks.output_of)}"' for each in known]
        print("\n".join(["[images]", *lines]))
        return 0
    width = max(len(each.reference) for each in known)
    for each in known:
        print(f"{each.reference:{width}}  {each.released}  {each.days(today)} days ago")
    return 0


def _spec(args: argparse.Namespace) -> DeploySpec:
    for name in args.target:
        target(name)
    spec = read_spec(Path(args.spec), known_settings())
    for warning in unused_images(spec):
        print(f"warning: {warning}", file=sys.stderr)
    return spec


def known_settings() -> KnownSettings:
    """Return all settings that a spec may hold for engines and gateways, and the checks of their values."""
    from fovea.cli.serve import ServeSettings
    from fovea.engine.config import EngineConfig
    from fovea.gateway.settings import GatewaySettings
    from fovea.server.settings import ServerSettings

    engine = ServeSettings, EngineConfig, ServerSettings
    return KnownSettings(
        [*options.setting_names(*engine), "log_level"],
        [*options.setting_names(GatewaySettings), "log_level"],
        lambda values: options.wrong_values(values, *engine),
        lambda values: options.wrong_values(values, GatewaySettings),
    )

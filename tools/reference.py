"""Write the pages docs/reference-*.md: settings, metrics, error codes, routes and the names of the package.

python -m tools.reference [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import fovea
from fovea.cli.main import build_parser
from fovea.cli.metrics import Row, gateway_rows, server_rows
from fovea.gateway.app import APIS, Gateway
from fovea.server import routes
from tools.error_codes import MEANINGS, codes

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ("from_pretrained", "generate", "stream", "request", "iterate", "tokenize", "detokenize", "close",
    "shutdown",
)  # fmt: skip
"""Methods of `fovea.Engine` for programs; the others are for servers and tests."""
FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)", re.S)
HEAD = "Written by `python -m tools.reference`."
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z0-9])")
DEFAULT = re.compile(r" ?\(default: ([^;()]*)[^()]*\)$")


def pages() -> dict[str, str]:
    """Return the text of every page by its path in the repository."""
    return {
        "docs/reference-settings.md": settings(),
        "docs/reference-metrics.md": metrics(),
        "docs/reference-errors.md": errors(),
        "docs/reference-routes.md": http_routes(),
        "docs/reference-python.md": python_names(),
    }


def settings() -> str:
    """Return the page of settings: those of both commands, of the server alone, and of the gateway alone."""
    serve, gateway = _options("serve"), _options("gateway")
    both = {name for name in serve if name in gateway and serve[name][1] == gateway[name][1]}
    parts: dict[str, list[str]] = {}
    for commands, names, options in (
        ("serve and gateway", both, serve),
        ("serve", serve.keys() - both, serve),
        ("gateway", gateway.keys() - both, gateway),
    ):
        for name, (group, line) in options.items():
            if name in names:
                parts.setdefault(f"{commands}: {group}", []).append(line)
    opening = (
        f"{HEAD} The value in brackets is the default. `--max-queue` is `FOVEA_MAX_QUEUE` in the environment "
        "and `max_queue` in the file of `--config`. `fovea serve --help` and `fovea gateway --help` have the "
        "ranges and all details."
    )
    return _page("Settings of fovea serve and fovea gateway", opening, parts)


def _options(command: str) -> dict[str, tuple[str, str]]:
    """Return the group and the line of each flag of a command, by its name."""
    (commands,) = (
        action for action in build_parser(command)._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {
        action.dest: (_group(group.title or ""), _option(action))
        for group in commands.choices[command]._action_groups
        for action in group._group_actions
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS
    }


def _group(title: str) -> str:
    """Return the subject in the title of a group: media of "server media", general of "options"."""
    subject = re.sub(r"^(engine: |server|gateway) ?", "", title)
    return "general" if subject in ("", "options") else subject.replace("_", " ")


def _option(action: argparse.Action) -> str:
    """Return the line of a flag: its default, the first sentence of its help, and what 0 means."""
    text = (action.help or "").replace("%%", "%")
    found = DEFAULT.search(text)
    default = found[1].removesuffix(".0") if found and found[1] != "none" else ""
    first, *rest = SENTENCE.split(DEFAULT.sub("", text))
    meaning = " ".join([first, *(each for each in rest if each.startswith("0"))])
    shown = f" ({default})" if default else ""
    return f"`{action.option_strings[-1]}`{shown}: {meaning.rstrip('.')}".replace("<", "&lt;")


def metrics() -> str:
    """Return the page of metrics, with the names of vLLM and of other documents that are exported, too."""
    server, gateway = server_rows(), gateway_rows()
    shared = {row.name for row in server} & {row.name for row in gateway}
    parts = {
        "Server": [_metric(row) for row in server if row.name not in shared],
        "Gateway": [_metric(row) for row in gateway if row.name not in shared],
        "Both": [_metric(row) for row in server if row.name in shared],
    }
    opening = (
        f"{HEAD} Names that end in `_total` are counters. In braces: labels; after `=`: further names under "
        "which the same value is exported. `fovea metrics` prints types, units, and expressions for names of "
        "other systems."
    )
    return _page("Metrics", opening, parts)


def _metric(row: Row) -> str:
    labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
    others = (*row.alias_names(of_documents=False), *row.alias_names(of_documents=True))
    same = f" = {', '.join(f'`{name}`' for name in others)}" if others else ""
    kind = " (histogram)" if row.kind == "histogram" else ""
    return f"`{row.name}{labels}`{kind}{same}: {row.text}"


def errors() -> str:
    """Return the page of error codes."""
    lines = []
    for code, statuses in codes().items():
        shown = f" {', '.join(map(str, statuses))}" if statuses else ""
        lines.append(f"`{code}`{shown}: {MEANINGS[code]}")
    opening = (
        f"{HEAD} Each line has the `code` of an error, its status, and its meaning. The message of an error "
        "says what was wrong, where, and what is accepted. Codes without a status are in the `errors` of a "
        "batch, or have the status of a backend."
    )
    return _page("Error codes", opening, {"": lines})


def http_routes() -> str:
    """Return the page of routes."""
    opening = f"{HEAD} [Serving](serving.md#which-key-opens-what) says which key opens which path."
    return _page("Routes", opening, {"Server": _server_routes(), "Gateway": _gateway_routes()})


def _server_routes() -> list[str]:
    lines = []
    for module in pkgutil.iter_modules(routes.__path__):
        found = getattr(importlib.import_module(f"{routes.__name__}.{module.name}"), "routes", None)
        for route in found.all if found is not None else ():
            if route.method != "HEAD":
                lines.append(f"`{route.method} {_named(route.path)}`: {_first(route.handle)}")
    return sorted(lines, key=lambda line: line.split()[1])


def _gateway_routes() -> list[str]:
    gateway = Gateway(cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))
    lines = [f"`POST {path}`: Answer a request" for path in APIS]
    lines += [f"`{method} {path}`: {_first(call)}" for (method, path), call in gateway._routes.items()]
    lines.append("`GET /v1/models/NAME`: Describe a model")
    lines += [f"`GET {path}`: {_first(call)}" for path, call in gateway.pages.items()]
    lines += [f"`{method} {path}`: {_first(call)}" for method, path, call in gateway.administration.table]
    return sorted(lines, key=lambda line: line.split()[1])


def _named(path: str) -> str:
    """Return a path with its parameters in capitals: /v1/files/NAME."""
    return re.sub(r"{(\w+)(:path)?}", lambda found: found[1].upper(), path)


def _first(function: Any) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    lines = (function.__doc__ or "").strip().split("\n\n")[0].split("\n")
    return SENTENCE.split(" ".join(line.strip() for line in lines))[0].rstrip(".")


def python_names() -> str:
    """Return the page of the names that `import fovea` has."""
    opening = (
        f"{HEAD} The names of `fovea`, with their fields and defaults, and the methods for programs. "
        "[From Python](python.md) has examples. Every setting of the server is also an argument of "
        "`Engine.from_pretrained` ([settings](reference-settings.md))."
    )
    names = [name for name in fovea.__all__ if isinstance(getattr(fovea, name), type)]
    return _page("Python", opening, {name: _class(getattr(fovea, name)) for name in names})


def _class(kind: type) -> list[str]:
    """Return the lines of a class: its summary, its fields or its methods."""
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    if kind is fovea.Engine:
        return [_joined(paragraphs[0]), *(_method(kind, name) for name in ENGINE)]
    defaults = getattr(kind, "__dataclass_fields__", {})
    lines = []
    for paragraph in paragraphs:
        for entry in re.split(r"\n(?! )", paragraph) if FIELD.match(paragraph) else [paragraph]:
            found = FIELD.match(entry)
            lines.append(_field(found, defaults) if found else _joined(entry))
    makers = [name for name, value in vars(kind).items() if isinstance(value, classmethod)]
    return [*lines, *(_method(kind, name) for name in makers if not name.startswith("_"))]


def _field(found: re.Match[str], defaults: Mapping[str, Any]) -> str:
    """Return the line of a field: its names, their default, and the meaning."""
    names = found[1].split(", ")
    default = getattr(defaults.get(names[0]), "default", dataclasses.MISSING)
    shown = "" if default is dataclasses.MISSING else f" ({default!r})"
    return f"{', '.join(f'`{name}`' for name in names)}{shown}: {_joined(found[2])}"


def _method(kind: type, name: str) -> str:
    """Return the line of a method: its arguments without their types, and the first sentence about it."""
    arguments = []
    for each in inspect.signature(getattr(kind, name)).parameters.values():
        stars = "*" * (1 if each.kind is each.VAR_POSITIONAL else 2 if each.kind is each.VAR_KEYWORD else 0)
        default = "" if each.default is each.empty else f"={each.default!r}"
        arguments.append(f"{stars}{each.name}{default}")
    called, method = ", ".join(each for each in arguments if each != "self"), getattr(kind, name)
    before = "await " if inspect.iscoroutinefunction(method) else ""
    before = "async for delta in " if inspect.isasyncgenfunction(method) else before
    return f"`{before}{kind.__name__}.{name}({called})`: {_first(getattr(kind, name))}"


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines()).replace("<", "&lt;")


def _page(title: str, opening: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return a page: its title, a paragraph, and a list under each heading."""
    paragraph = textwrap.fill(opening, 130, break_on_hyphens=False, break_long_words=False)
    text = f"# {title}\n\n{paragraph}\n"
    for heading, lines in parts.items():
        text += f"\n## {heading}\n\n" if heading else "\n"
        text += "".join(f"- {line}\n" for line in lines)
    return text


def stale(root: Path = ROOT) -> list[str]:
    """Return the paths of the pages that are missing or differ."""
    return [
        path
        for path, text in pages().items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the pages. With --check: print those that differ, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        paths = stale()
        for path in paths:
            sys.stderr.write(f"{path} is not what the code says; run python -m tools.reference\n")
        return 1 if paths else 0
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

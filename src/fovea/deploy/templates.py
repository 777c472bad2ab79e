"""Fills templates of targets, which lie beside the targets' modules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).with_name("targets")


def fill(name: str, /, **values: Any) -> str:
    """Return a template with its values. A value that the template names and nobody gives is an error.

    name: path of the template beneath the folder of targets, such as "nginx/nginx.conf.j2".
    """
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )

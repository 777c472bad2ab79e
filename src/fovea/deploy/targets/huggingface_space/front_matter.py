"""Checks the front matter of a Space's README.md.

    python -m fovea.deploy.targets.huggingface_space.front_matter README.md

The keys and values are those of Hugging Face's Spaces Configuration Reference.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

COLOURS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
SDKS = ("gradio", "docker", "static")
KEYS = (
    "title", "emoji", "colorFrom", "colorTo", "sdk", "python_version", "sdk_version", "suggested_hardware",
    "suggested_storage", "app_file", "app_build_command", "app_port", "base_path", "fullWidth", "header",
    "short_description", "models", "datasets", "tags", "thumbnail", "pinned", "hf_oauth", "hf_oauth_scopes",
    "hf_oauth_expiration_minutes", "hf_oauth_authorized_org", "disable_embedding", "startup_duration_timeout",
    "custom_headers", "preload_from_hub", "license",
)  # fmt: skip
LONGEST_DESCRIPTION = 60
_LINE = re.compile(r"([A-Za-z_]+): (.+)")


def problems(text: str) -> list[str]:
    """Return what is wrong with the front matter of a README; empty if nothing is."""
    parts = text.split("---\n", 2)
    if len(parts) < 3 or parts[0]:
        return ["the file does not begin with a block between two lines ---"]
    values: dict[str, str] = {}
    found = []
    for line in parts[1].splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            found.append(f"{line!r} is not KEY: VALUE")
        else:
            values[match[1]] = match[2].strip('"')
    found += [f"unknown key {key!r}" for key in values if key not in KEYS]
    return found + _wrong_values(values)


def _wrong_values(values: Mapping[str, str]) -> list[str]:
    found = []
    if values.get("sdk") not in SDKS:
        found.append(f"sdk is {values.get('sdk')!r}; accepted: {', '.join(SDKS)}")
    for key in ("colorFrom", "colorTo"):
        if values.get(key, COLOURS[0]) not in COLOURS:
            found.append(f"{key} is {values[key]!r}; accepted: {', '.join(COLOURS)}")
    if values.get("sdk") == "docker" and not values.get("app_port", "7860").isdecimal():
        found.append(f"app_port is {values['app_port']!r}; accepted: a port")
    if len(values.get("short_description", "")) > LONGEST_DESCRIPTION:
        found.append(f"short_description is longer than {LONGEST_DESCRIPTION} characters")
    return found


def main() -> int:
    """Run the program. Returns 1 if something is wrong."""
    found = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for problem in found:
        print(f"{sys.argv[1]}: {problem}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

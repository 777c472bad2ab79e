"""Write the dashboards, rules and tests of rules, or check that they are up to date.

python -m tools.dashboards.generate [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.dashboards.outputs import ROOT, outputs


def stale(root: Path = ROOT) -> list[str]:
    """Return the paths of the generated files that are missing or differ."""
    return [
        path
        for path, text in outputs().items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the files. With --check: print those that differ, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        paths = stale()
        for path in paths:
            sys.stderr.write(f"{path} is not what tools/dashboards generates; run it without --check\n")
        return 1 if paths else 0
    for path, text in outputs().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the bill of materials of a release in CycloneDX's form: `make sbom`.

It lists the packages of an environment in which Fovea is installed with its extras for serving, and what the
wheel itself brings along: the Highway library, the DejaVu fonts and the bundled model.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
HIGHWAY = ROOT / "src/fovea/kernels/native/highway/hwy/base.h"


def bundled(version: str) -> list[dict[str, Any]]:
    """Return the components within Fovea's own wheel. version: of Fovea."""
    numbers = dict(re.findall(r"#define HWY_(MAJOR|MINOR|PATCH) (\d+)", HIGHWAY.read_text()))
    highway = ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))
    return [
        {
            "type": "library",
            "bom-ref": f"bundled:highway@{highway}",
            "name": "highway",
            "version": highway,
            "purl": f"pkg:github/google/highway@{highway}",
            "licenses": [{"expression": "Apache-2.0 OR BSD-3-Clause"}],
        },
        {
            "type": "data",
            "bom-ref": "bundled:dejavu-fonts",
            "name": "dejavu-fonts",
            "licenses": [{"license": {"name": "Bitstream Vera and Arev"}}],
        },
        {
            "type": "machine-learning-model",
            "bom-ref": f"bundled:fovea-tiny@{version}",
            "name": "fovea-tiny",
            "version": version,
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        },
    ]


def complete_bom(bom: dict[str, Any]) -> dict[str, Any]:
    """Return the bill of an environment with Fovea as its subject and with the bundled components.

    Raises ValueError if Fovea is not among the packages.
    """
    packages = bom.get("components", [])
    own = next((each for each in packages if each["name"].lower() == DISTRIBUTION), None)
    if own is None:
        raise ValueError(f"{DISTRIBUTION} is not installed in the environment")
    own = {**own, "type": "application"}
    parts = bundled(own["version"])
    others = [each for each in packages if each["name"].lower() not in (DISTRIBUTION, "pip", "setuptools")]
    known = {each["bom-ref"] for each in (own, *others, *parts)}
    depends = []
    for each in bom.get("dependencies", []):
        if each["ref"] not in known:
            continue
        on = [ref for ref in each.get("dependsOn", []) if ref in known]
        if each["ref"] == own["bom-ref"]:
            on += [part["bom-ref"] for part in parts]
        depends.append({"ref": each["ref"], **({"dependsOn": on} if on else {})})
    depends += [{"ref": part["bom-ref"]} for part in parts]
    metadata = {**bom.get("metadata", {}), "component": own}
    return {**bom, "metadata": metadata, "components": [*others, *parts], "dependencies": depends}


def validate(path: Path) -> None:
    """Raise ValueError if a file does not follow CycloneDX's schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text(encoding="utf-8"))
    if error is not None:
        raise ValueError(f"{path} does not follow CycloneDX 1.6: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", required=True, help="interpreter of the environment with Fovea")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    command = ["cyclonedx-py", "environment", "--spec-version", "1.6", "--output-reproducible", args.python]
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([str(tool), *command[1:]], check=True, capture_output=True, text=True)
    bom = complete_bom(json.loads(done.stdout))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
    validate(args.out)
    print(f"{args.out}: {len(bom['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())

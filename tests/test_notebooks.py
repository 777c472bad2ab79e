"""The notebooks in examples/notebooks run from start to end, and print what they show to a reader."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.notebooks import FOLDER, CellFailed, read, run

from tests.support.forks import Fork

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RUN = """import json, sys
from pathlib import Path
from tools.notebooks import run
print(json.dumps(run(Path(sys.argv[1]))))
"""
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    "FOVEA_THREADS": "1",
}
LARGEST = 96 * 1024
"""Bytes of a notebook with its outputs."""


def printed(notebook: dict[str, Any]) -> list[str]:
    """All that the cells print, without the figures, which differ from machine to machine."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    texts = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    return [re.sub(r"[\d.]+|#+| +", " ", text) for text in texts]


def pictures(notebook: dict[str, Any]) -> int:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", ()) for output in outputs)


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["ask", "budget", "serve"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_small(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is in the extra dev")
    nbformat.validate(nbformat.read(path, as_version=4))
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    """If a cell was changed, `python -m tools.notebooks` writes its new output."""
    process = Fork(RUN, [str(path)], ENVIRONMENT, ROOT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    ran, shown = json.loads(out), read(path)
    assert printed(ran) == printed(shown)
    assert pictures(ran) == pictures(shown)


def test_an_error_names_its_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["1 / 0"]},
        {"cell_type": "code", "source": ["x = 2\n", "x * 21"]},
        {"cell_type": "code", "source": ["x / 0"]},
    ]
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": cells[:2]}))
    (output,) = run(path)["cells"][1]["outputs"]
    assert output["data"] == {"text/plain": ["42"]}
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(CellFailed, match=r"broken\.ipynb, code cell 2: ZeroDivisionError"):
        run(path)

"""Run the notebooks in examples/notebooks and write what they print and show into them.

    python -m tools.notebooks [NAME ...]

A notebook is plain Python here: no magics, no extra packages. So its cells run in this process, one after
the other, and no Jupyter kernel is needed (ipykernel and nbclient would bring 20 packages, and a second of
processor time for each notebook). The value of a cell's last line is shown as in Jupyter: a picture as PNG,
anything else as text.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


class CellFailed(Exception):
    """A cell of a notebook raised an error."""


def read(path: Path) -> dict[str, Any]:
    """Return the content of a notebook."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell, which the file has as a list of lines."""
    return "".join(cell["source"])


def run(path: Path) -> dict[str, Any]:
    """Run a notebook in its own folder, and return it with the outputs of this run.

    Raises CellFailed, which names the notebook and the cell.
    """
    notebook = read(path)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with contextlib.chdir(path.parent):
        for number, cell in enumerate(cells, 1):
            try:
                cell["outputs"] = _run_cell(source(cell), f"{path.name}, code cell {number}", number, names)
            except Exception as error:
                raise CellFailed(f"{path.name}, code cell {number}: {error!r}") from error
            cell["execution_count"] = number
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook in the form that Jupyter writes."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run_cell(text: str, place: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell and return its outputs: what it printed, then the value of its last line."""
    tree = ast.parse(text, place)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, place, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        outputs.append(
            {"data": shown(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """Return a value by MIME type, as Jupyter shows it."""
    data: dict[str, Any] = {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    data["text/plain"] = [f"<{type(value).__name__}>" if data else repr(value)]
    return data


def main(arguments: Sequence[str]) -> None:
    """Run the named notebooks, or all of them, and write them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in arguments or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        write(path, run(path))
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])

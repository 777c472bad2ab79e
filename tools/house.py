"""Measure how large the code is, and how many files and functions one request passes.

    python -m tools.house            # a table; the last line is JSON

The request is a chat about an image, over HTTP, to a server of fovea-tiny in this process. Another one of
the same shape is answered before, so that nothing is loaded or compiled in the one that counts. What runs in
the sandboxed decoding processes is not seen. Lines of code are those that are neither empty, nor comments,
nor docstrings. Lambdas and comprehensions do not count as functions.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import tokenize
import urllib.request
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fovea"
SMALL = 20
"""Lines of code up to which a module counts as small."""
IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_STARTS = {"help": ("--help",), "version": ("--version",)}


def code_lines(text: str) -> int:
    """Count the lines of Python code in a text."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def imports(path: Path, modules: set[str]) -> set[str]:
    """Return those of `modules` that a file imports, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


def size() -> dict[str, float]:
    """Count files, folders, lines, imports and words."""
    files = sorted(SOURCE.rglob("*.py"))
    names = (".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in files)
    modules = {name.removesuffix(".__init__") for name in names}
    importers = Counter(name for path in files for name in imports(path, modules))
    lines = [code_lines(path.read_text()) for path in files]
    words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    helped = subprocess.run(
        [sys.executable, "-m", "fovea.cli.main", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {
        "files of Python": len(files),
        "folders with Python": len({path.parent for path in files}),
        "lines of code": sum(lines),
        "median of a file, lines of code": statistics.median(lines),
        f"files with at most {SMALL} lines of code": sum(count <= SMALL for count in lines),
        "modules that one other imports": sum(count == 1 for count in importers.values()),
        "words of docs/": words,
        "flags of fovea serve": len(set(re.findall(r"^  (--[a-z][\w-]+)", helped, re.MULTILINE))),
    }


def starts() -> dict[str, float]:
    """Measure the processor time of short commands in seconds, the least of three."""
    found = {}
    for name, words in _STARTS.items():
        spent = []
        for _ in range(3):
            before = os.times()
            subprocess.run([sys.executable, "-m", "fovea.cli.main", *words], capture_output=True, check=True)
            after = os.times()
            spent.append(after[2] + after[3] - before[2] - before[3])
        found[f"fovea --{name}, s of processor time"] = round(min(spent), 2)
    return found


class Trace:
    """Notes which functions of Fovea are called, in all threads that start after it."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[tuple[str, str]] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))


def ask(port: int, colour: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (96, 96), colour).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": "fovea-tiny", "messages": [{"role": "user", "content": content}], "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert b"[DONE]" in answer.read()


def request_path() -> dict[str, float]:
    """Count the files and functions that a streamed chat request about an image passes."""
    trace = Trace()
    from fovea import Engine
    from fovea.http.listener import bind
    from fovea.server.app import create_app
    from fovea.server.run import serve

    listener = bind("127.0.0.1", 0)[0]
    port = listener.getsockname()[1]
    listener.close()
    failed: list[BaseException] = []

    def client() -> None:
        try:
            ask(port, "red")
            time.sleep(0.5)
            trace.on = True
            ask(port, "blue")
            time.sleep(0.2)
            trace.on = False
        except BaseException as error:  # noqa: BLE001 - it is raised again by the main thread
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    engine = Engine.from_pretrained("fovea-tiny")
    thread = threading.Thread(target=client)
    serve(create_app(engine), "127.0.0.1", port, on_start=thread.start)
    thread.join()
    if failed:
        raise failed[0]
    return {
        "files that a request passes": len({file for file, _ in trace.functions}),
        "functions that a request passes": sum("<" not in name.split(".")[-1] for _, name in trace.functions),
    }


def main() -> None:
    figures = {**size(), **starts(), **request_path()}
    for name, value in figures.items():
        print(f"{name:45}{value:>12,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

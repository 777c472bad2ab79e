"""A folder of documents to JSON Lines, by the command of docs/integrations.md: `make test-recipes`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
from PIL import Image

from tests.clients.support import FOVEA, ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(
    "FOVEA_TEST_RECIPES" not in os.environ, reason="loads a model: make test-recipes"
)


def test_each_picture_and_page_becomes_a_line_of_the_schema(tmp_path: Path) -> None:
    papers, answers = tmp_path / "papers", tmp_path / "answers.jsonl"
    papers.mkdir()
    shutil.copy(ROOT / "examples" / "shapes.png", papers)
    pages = [Image.open(ROOT / "examples" / name).convert("RGB") for name in ("shapes.png", "colours.png")]
    pages[0].save(papers / "shapes.pdf", save_all=True, append_images=pages[1:], resolution=72.0)
    (schema,) = re.findall(r'^\{"type": "object".*\}$', PAGE, re.MULTILINE)
    (tmp_path / "form.json").write_text(schema)
    (command,) = re.findall(r"^fovea batch papers/ .*$", PAGE, re.MULTILINE)
    words = re.findall(r'"[^"]+"|\S+', command)[1:]
    done = subprocess.run(
        [FOVEA, *(word.strip('"') for word in words)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [each["id"] for each in lines] == ["shapes.pdf#page=1", "shapes.pdf#page=2", "shapes.png"]
    for each in lines:
        jsonschema.validate(json.loads(each["text"]), json.loads(schema))
    # The page is larger than the picture, and the answer the same.
    assert lines[0]["text"] == lines[2]["text"] == '{"count":3}'
    assert lines[0]["usage"]["prompt_tokens"] > 10 * lines[2]["usage"]["prompt_tokens"]

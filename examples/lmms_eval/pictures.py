"""Functions that pictures.yaml names, as lmms-eval calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).resolve().parent.parent
"""Folder of the questions and pictures."""


def without_tools(questions: Any) -> Any:
    """Leave out questions that need tools or a JSON Schema, which lmms-eval does not send."""
    return questions.filter(lambda question: not question.get("tools") and not question.get("schema"))


def images(question: dict[str, Any]) -> list[Image.Image]:
    """Return the pictures of a question."""
    return [Image.open(FOLDER / name).convert("RGB") for name in question["images"]]


def score(question: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1.0 if the answer is one of the known ones, 0.0 otherwise."""
    return {"right": float(results[0].strip() in question["answers"])}

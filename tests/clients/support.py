"""The server, the pictures, the questions and the tools that the tests of several clients share."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).resolve().parents[2]
FOVEA = Path(os.environ.get("FOVEA", ROOT / ".venv" / "bin" / "fovea"))
MODEL = "fovea-tiny"
LOAD_SECONDS = 300

Shape = Literal["circle", "square", "triangle", "diamond", "star", "cross"]
Colour = Literal["red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan"]
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "star", "cross")
PLACES: tuple[str, ...] = (
    "top left",
    "top center",
    "top right",
    "middle left",
    "center",
    "middle right",
    "bottom left",
    "bottom center",
    "bottom right",
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    url: its address, without a path
    """

    url: str

    @property
    def v1(self) -> str:
        """The address that clients of OpenAI's API expect."""
        return f"{self.url}/v1"


@contextmanager
def serve(*flags: str) -> Iterator[Server]:
    """Serve fovea-tiny on a free port until the end of the block."""
    with _run("serve", MODEL, "--lame-duck-s", "0", *flags) as server:
        yield server


@contextmanager
def gateway(backend: Server) -> Iterator[Server]:
    """Run a gateway in front of a server on a free port until the end of the block.

    The gateway forwards chat completions and completions, and translates the other APIs to them. It keeps no
    answers, so that each one comes from the server.
    """
    flags = ("--response-cache-mib", "0", "--lame-duck-s", "0")
    with _run("gateway", "--backend", backend.url, *flags) as server:
        yield server


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def _run(command: str, *words: str) -> Iterator[Server]:
    port = free_port()
    process = subprocess.Popen([str(FOVEA), command, *words, "--port", str(port), "--log-level", "warning"])
    try:
        server = Server(f"http://127.0.0.1:{port}")
        _wait_until_ready(server, process)
        yield server
        assert process.poll() is None, f"fovea {command} ended with {process.returncode}"
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LOAD_SECONDS
    while not _is_ready(server):
        assert process.poll() is None, f"it ended with {process.returncode} before it was ready"
        assert time.monotonic() < deadline, f"it was not ready after {LOAD_SECONDS} s"
        time.sleep(0.2)


def _is_ready(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True, slots=True)
class Case:
    """A question about pictures of examples/.

    pictures: names of files
    answers: every text that is right
    """

    pictures: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


def _cases() -> Mapping[str, Case]:
    lines = (ROOT / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return {
        entry["id"]: Case(tuple(entry["images"]), entry["question"], tuple(entry["answers"]))
        for entry in entries
    }


CASES = _cases()
COUNT_SHAPES = CASES["shapes"]
READ_SIGN = CASES["sign"]


def base64_png(name: str) -> str:
    """The bytes of a picture of examples/ in base64."""
    return base64.b64encode((ROOT / "examples" / name).read_bytes()).decode()


def data_url(name: str) -> str:
    """A picture of examples/ as a data: URL."""
    return f"data:image/png;base64,{base64_png(name)}"


def user(text: str, *pictures: str) -> dict[str, Any]:
    """A message with pictures of examples/ before its text, as OpenAI's chat completions take it."""
    images = [{"type": "image_url", "image_url": {"url": data_url(name)}} for name in pictures]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def user_asks(case: Case) -> dict[str, Any]:
    """The case as a message of OpenAI's chat completions."""
    return user(case.question, *case.pictures)


class Count(BaseModel):
    """The number of objects."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(ge=0, le=99)


class Item(BaseModel):
    """An object in the image."""

    model_config = ConfigDict(extra="forbid")

    shape: Shape
    color: Colour


COUNT = Case(("form.png",), CASES["form"].question, ())
"""A question whose answer is a Count."""
TRIANGLES = Count(count=3)
ITEM = Case(
    ("corner.png",), 'What is in the top center? Reply as JSON {"shape": string, "color": string}', ()
)
"""A question whose answer is an Item."""
BLUE_STAR = Item(shape="star", color="blue")


def schema_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A tool, and a request that needs it.

    schema: JSON Schema of the arguments
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    picture: str
    question: str

    def check(self, name: str | None, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Assert that a call names this tool and has arguments of its schema; return the arguments."""
        assert name == self.name
        values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        jsonschema.validate(values, self.schema)
        return values

    @property
    def chat(self) -> dict[str, Any]:
        """The tool as OpenAI's chat completions take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}

    @property
    def responses(self) -> dict[str, Any]:
        """The tool as OpenAI's responses take it."""
        return {"type": "function", **self.chat["function"], "strict": True}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The tool as Anthropic's messages take it."""
        return {"name": self.name, "description": self.description, "input_schema": dict(self.schema)}


SAVE_COUNT = ToolCase(
    "save_count",
    "Saves how many objects of a shape there are.",
    schema_of(
        {"shape": {"type": "string", "enum": list(SHAPES)}, "count": {"type": "integer", "minimum": 0}}
    ),
    "shapes.png",
    "Save the number of circles.",
)
LOOK_UP = ToolCase(
    "look_up",
    "Looks up what is known about a code.",
    schema_of({"code": {"type": "string"}}),
    "sign.png",
    "Look up the code.",
)
POINT_AT = ToolCase(
    "point_at",
    "Points at a place in the image.",
    schema_of({"position": {"type": "string", "enum": list(PLACES)}}),
    "corner.png",
    "Point at the blue star.",
)
TOOLS = (SAVE_COUNT, LOOK_UP, POINT_AT)
BY_NAME = {tool.name: tool for tool in TOOLS}

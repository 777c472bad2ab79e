"""fovea chat [IMAGE...]: a conversation about images in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from typing import Any

from fovea.cli.ask import stats_table, write_text
from fovea.cli.common import (
    SINGLE_USER,
    add_engine_options,
    add_sampling_options,
    config_file,
    load_engine,
    pixel_budget,
    sampling_values,
    utf8,
)
from fovea.core.errors import FoveaError
from fovea.core.types import AnswerBuilder, ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image

HELP = "/image FILE...  add images    /clear  start over    /stats  figures    /quit"


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        description=__doc__,
        usage="fovea chat [OPTIONS] [IMAGE ...]",
        epilog=f"In the conversation: {HELP}",
    )
    parser.add_argument("words", nargs="*", metavar="IMAGE", help="images of the first message")
    parser.add_argument("--system", help="a system message")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file, params = config_file(args), sampling_values(args)
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and a history
    with load_engine(args, file, **SINGLE_USER) as engine:
        chat = _Chat(engine, args, params)
        for path in args.words:
            chat.add_image(path)
        if typed:
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if typed else "").strip()
            except (EOFError, KeyboardInterrupt):
                if typed:
                    print()
                return 0
            except UnicodeDecodeError:
                print("fovea: that line is not UTF-8 text", file=sys.stderr)
                continue
            if line in ("/quit", "/exit"):
                return 0
            if line:
                chat.handle(line)


class _Chat:
    """A conversation: its messages, and the images that wait for the next message."""

    def __init__(self, engine: Any, args: argparse.Namespace, params: dict[str, Any]) -> None:
        self._engine = engine
        self._params = params
        self._budget = pixel_budget(args)
        self._system = [Message("system", (TextPart(args.system),))] if args.system else []
        self._messages = list(self._system)
        self._pending: list[ImagePart] = []
        self._stats = False

    def handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/image":
            self._add_images(rest)
        elif command == "/clear":
            self._messages, self._pending = list(self._system), []
            _say_aside("a new conversation")
        elif command == "/stats":
            self._stats = not self._stats
            _say_aside(f"figures {'on' if self._stats else 'off'}")
        elif command.startswith("/"):
            print(HELP, file=sys.stderr)
        else:
            self._say(line)

    def _add_images(self, words: str) -> None:
        """Add files, split as in a shell. A quote without its partner is part of a name, as in `it's.png`."""
        try:
            paths = shlex.split(words)
        except ValueError:
            paths = words.split()
        if not paths:
            _say_aside("/image needs a file")
        for path in paths:
            self.add_image(path)

    def add_image(self, path: str) -> None:
        try:
            self._engine.info.check_media("image", path, f"{path}: ")
            image = to_image(path)
        except FoveaError as error:
            print(f"fovea: {error.message}", file=sys.stderr)
            return
        self._pending.append(ImagePart(image, self._budget))
        _say_aside(f"{path}: {image.width}x{image.height}, goes with the next message")

    def _say(self, text: str) -> None:
        """Send a message and print the answer. An error or interrupt leaves the conversation as before."""
        answer = AnswerBuilder(1)
        try:
            message = Message("user", (*self._pending, TextPart(utf8(text))))
            request = self._engine.request(ChatPrompt((*self._messages, message)), **self._params)
            for delta in self._engine.iterate(request):
                answer.add(delta)
                write_text(delta.text)
        except FoveaError as error:
            print(f"fovea: {error.message}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(" (stopped)")
            return
        print()
        done = answer.build()
        self._messages += [message, Message("assistant", (TextPart(done.text),))]
        self._pending = []
        if self._stats:
            stats_table(done)


def _say_aside(text: str) -> None:
    """Print to stderr, so that stdout has the answers alone."""
    print(f"  {text}", file=sys.stderr)

"""fovea chat [IMAGE...]: a conversation about images in the terminal."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from fovea.cli.common import (
    add_engine_options,
    add_sampling_options,
    config_file,
    load_engine,
    pixel_budget,
    sampling_values,
)
from fovea.cli.show import stats_table
from fovea.core.answer import AnswerBuilder
from fovea.core.errors import FoveaError
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.inputs import to_image

HELP = "/image FILE...  add pictures to the next message    /clear  start over    /stats  toggle figures    /quit"


def register(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk about images in the terminal", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="pictures that the first message is about")
    parser.add_argument("--system", help="a system message")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with load_engine(args, config_file(args)) as engine:
        chat = _Chat(engine, args)
        for path in args.images:
            chat.add_image(path)
        print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line in ("/quit", "/exit"):
                return 0
            if line:
                chat.handle(line)


class _Chat:
    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self._engine = engine
        self._params = sampling_values(args)
        self._budget = pixel_budget(args)
        self._system = [Message("system", (TextPart(args.system),))] if args.system else []
        self._messages = list(self._system)
        self._pending: list[ImagePart] = []
        self._stats = False

    def handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/image":
            for path in shlex.split(rest):
                self.add_image(path)
        elif command == "/clear":
            self._messages, self._pending = list(self._system), []
        elif command == "/stats":
            self._stats = not self._stats
        elif command.startswith("/"):
            print(HELP, file=sys.stderr)
        else:
            self._say(line)

    def add_image(self, path: str) -> None:
        try:
            self._pending.append(ImagePart(to_image(path), self._budget))
        except FoveaError as error:
            print(f"fovea: {error.message}", file=sys.stderr)

    def _say(self, text: str) -> None:
        """An error or an interrupt takes the message back; the conversation goes on from before it."""
        asked = Message("user", (*self._pending, TextPart(text)))
        answer = AnswerBuilder(1)
        try:
            request = self._engine.request(ChatPrompt((*self._messages, asked)), **self._params)
            for delta in self._engine.iterate(request):
                answer.add(delta)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except FoveaError as error:
            print(f"fovea: {error.message}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(" (stopped)")
            return
        print()
        done = answer.build()
        self._messages += [asked, Message("assistant", (TextPart(done.text),))]
        self._pending = []
        if self._stats:
            stats_table(done)

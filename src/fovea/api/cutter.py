"""Cuts a JSON text into a small skeleton and its long strings, while it arrives.

Python's JSON parser reads a whole text in one call, and no other client is served meanwhile: 64 MiB of nested
lists take seconds. So it never gets a large text. The skeleton has the structure and the short
strings of the text, and a placeholder for every long string. It is counted before it is parsed:

    {"messages": [{"role": "user", "content": [{"image_url": {"url": "data:image/png;base64,iVBOR..."}}]}]}
    {"messages": [{"role": "user", "content": [{"image_url": {"url": "5d1f...e0:0"}}]}]}

Regular expressions and searches, which are written in C, look at every byte, a slice of the text at a time. A
slice that ends within a string, an escape or a character is continued by the next one.
"""

from __future__ import annotations

import re
import secrets
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fovea.api.wire import MAX_VALUES, too_many_values
from fovea.core.errors import InvalidRequest

SHORT = 256
"""Longest string that stays in the skeleton, in bytes, if it has no escapes."""
MAX_SKELETON = 2 * 1024 * 1024
MAX_DEPTH = 100
MAX_ENTRIES = 200_000
"""Most commas, which is about the number of token ids."""
MAX_DIGITS = 512
"""Most digits of a number: the time to read one grows with their square."""

# Anything up to the first string that is long, or that does not end in this slice.
_STRUCTURE = re.compile(
    rb'(?:[^"]++|"[^"\\]{0,%d}+(?:\\.[^"\\]{0,%d}+){0,32}+")*+' % (SHORT, SHORT), re.DOTALL
)
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_CONTROLS = bytes(range(32))
_SPACE = 32
_MANY = 4096
"""Bytes from which on numpy is faster than `bytes.translate`."""
_BACKSLASH = ord("\\")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))


class Cut(NamedTuple):
    """A text whose long strings were cut out.

    skeleton: the text with a placeholder for each of them.
    strings: the strings by placeholder, as the text has them between its quotes: UTF-8 with escapes.
    """

    skeleton: bytearray
    strings: dict[str, bytearray]


def has_controls(text: bytes) -> bool:
    """Return whether a text has a character below the space. numpy looks at many bytes at a time."""
    if len(text) < _MANY:
        return len(text.translate(None, _CONTROLS)) < len(text)
    return int(np.frombuffer(text, np.uint8).min()) < _SPACE


def _is_plain_url(text: bytearray) -> bool:
    return text.startswith(b"data:") and b"\\" not in text and text.isascii()


class Cutter:
    """Cuts one JSON text. It does not check the syntax; the parser of the skeleton does.

    size: bytes fed so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._skeleton = bytearray()
        self._strings: dict[str, bytearray] = {}
        self._nonce = ""
        self._open: bytearray | None = None
        self._escape = False
        self._depth = self._commas = self._pairs = self._containers = self._count = 0
        self._digits = 0  # at the end of the structure so far: the next slice may continue the number

    def feed(self, data: bytes) -> None:
        """Add the next slice of the text.

        Raises InvalidRequest for control characters in strings, and for a text over one of the limits.
        """
        self.size += len(data)
        at = 0 if self._open is None else self._continue(data, 0)
        while at < len(data):
            run = _STRUCTURE.match(data, at)
            assert run is not None  # it matches the empty text
            if run.end() > at:
                self._keep(run.group())
            at = run.end()
            if at < len(data):
                self._open = bytearray()
                at = self._continue(data, at + 1)
        if len(self._skeleton) > MAX_SKELETON:
            raise InvalidRequest(
                f"the body has more than {MAX_SKELETON} bytes besides its long strings",
                code="body_too_complex",
            )

    @property
    def text_bytes(self) -> int:
        """Bytes that have to be parsed or decoded: all but strings that look like plain data: URLs."""
        texts = (len(text) for text in self._strings.values() if not _is_plain_url(text))
        return len(self._skeleton) + sum(texts) + len(self._open or b"")

    def finish(self) -> Cut:
        """Return the cut text. To be called once, after the last slice."""
        if self._open is not None:
            self._skeleton += b'"'  # the parser reports that the string has no end
        return Cut(self._skeleton, self._strings)

    def _continue(self, data: bytes, at: int) -> int:
        """Add the next bytes of the open string, and return the position behind them."""
        start = at
        if self._escape:
            at += 1
            self._escape = False
        quote = data.find(b'"', at)
        end = len(data) if quote < 0 else quote
        if data.find(b"\\", at, end) >= 0:
            text = _STRING.match(data, at)
            assert text is not None
            end = text.end()
            if end < len(data) and data[end] == _BACKSLASH:
                end += 1
                self._escape = True
        part = data[start:end]
        if has_controls(part):
            raise InvalidRequest("the body is not JSON: Invalid control character", code="invalid_json")
        assert self._open is not None
        self._open += part
        if end == len(data):
            return end
        self._close(self._open)
        return end + 1

    def _close(self, string: bytearray) -> None:
        self._open = None
        self._count += 1
        if len(string) <= SHORT:
            self._skeleton += b'"%b"' % bytes(string)
            return
        if not self._nonce:  # nobody can send a string that is a placeholder
            self._nonce = secrets.token_hex(16)
        name = f"{self._nonce}:{len(self._strings)}"
        self._skeleton += b'"%b"' % name.encode()
        self._strings[name] = string

    def _keep(self, run: bytes) -> None:
        """Add structure and short strings to the skeleton, and count them."""
        self._skeleton += run
        plain = run.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in run else run
        pieces = plain.split(b'"')
        outside = b"".join(pieces[::2])
        opened = outside.count(b"{") + outside.count(b"[")
        self._nest(outside, opened)
        self._commas += outside.count(b",")
        self._pairs += outside.count(b":")
        self._containers += opened
        self._count += len(pieces) // 2
        if self._pairs > MAX_VALUES or self._containers > MAX_VALUES or self._count > 2 * MAX_VALUES:
            raise too_many_values()
        if self._commas > MAX_ENTRIES:
            raise InvalidRequest(
                f"the body's lists have more than {MAX_ENTRIES} entries", code="body_too_complex"
            )
        digits = b"0" * self._digits + outside.translate(_DIGITS)
        if b"0" * (MAX_DIGITS + 1) in digits:
            raise InvalidRequest(
                f"the body holds a number with too many digits; accepted: at most {MAX_DIGITS}",
                code="invalid_json",
            )
        self._digits = len(digits) - len(digits.rstrip(b"0"))

    def _nest(self, outside: bytes, opened: int) -> None:
        if self._depth + opened <= MAX_DEPTH:  # whatever their order
            self._depth += opened - outside.count(b"}") - outside.count(b"]")
            return
        steps = map(_STEP.__getitem__, outside.translate(None, _NOT_BRACKETS))
        depth = self._depth
        for depth in accumulate(steps, initial=self._depth):
            if depth > MAX_DEPTH:
                raise InvalidRequest(
                    f"the body is nested too deeply; accepted: at most {MAX_DEPTH} levels",
                    code="invalid_json",
                )
        self._depth = depth

"""The keys that are valid now: those of flags, and those of a keys file that is read again when it changes.

The table of keys is replaced as a whole, in the event loop. A thread of its own looks after the file, so that
a slow disk delays no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from fovea.access.keys import (
    LONGEST_KEY,
    Key,
    KeyFile,
    Keys,
    check_private,
    keys_of_file,
    keys_of_flags,
    read_key_file,
)
from fovea.core.errors import ConfigError
from fovea.core.private_files import is_mounted_alone

L = TypeVar("L")
CHECK_S = 1.0
"""Seconds between two looks at the keys file."""
Version = tuple[int, int, int, int]


class KeyTable(Generic[L]):
    """All keys that are valid now.

    keys: the table, which is replaced when the file changes.
    longest: bytes of the longest key that can be in it.
    """

    def __init__(
        self,
        path: Path | None,
        limits: type[L],
        *,
        api: Iterable[str] = (),
        admin: Iterable[str] = (),
        metrics: Iterable[str] = (),
        check: Callable[[KeyFile[L]], None] = lambda file: None,
        log: logging.Logger,
    ) -> None:
        """Read the file.

        path: the keys file; None: there is none.
        limits: the settings class of the limits in the file; keys of flags have its defaults.
        api, admin, metrics: keys of flags.
        check: raises ConfigError if the contents of a file cannot be used.
        log: gets a line when the file was read again or cannot be used.
        Raises ConfigError if the file cannot be used.
        """
        api, admin, metrics = tuple(api), tuple(admin), tuple(metrics)
        self._path, self._limits, self._check, self._log = path, limits, check, log
        self._fixed: tuple[Key[L], ...] = tuple(keys_of_flags(api, admin, metrics, limits()))
        self.longest = max((LONGEST_KEY, *(len(key.encode()) for key in (*api, *admin, *metrics))))
        self._version: Version | None = None
        self._complaint = ""
        self._thread: ThreadPoolExecutor | None = None
        self.keys: Keys[L] = Keys(self._fixed) if path is None else self._read(path)
        if path is not None and is_mounted_alone(path):
            log.warning(
                "the keys file %s is mounted alone (a bind mount of one file). If it is replaced on the "
                "host, this process keeps the old file, and revoked keys stay valid; mount its folder "
                "instead",
                path,
            )

    @property
    def broken(self) -> bool:
        """Whether the file could not be used at the last look, so that the keys stayed what they were."""
        return bool(self._complaint)

    def reload(self) -> bool:
        """Read the keys file if it has changed. Returns whether other keys are used now.

        A file that cannot be used is logged, and the keys stay what they were.
        """
        return self._apply(self._look())

    async def refresh(self) -> bool:
        """Do what `reload` does, in the thread that `watching` uses, so that looks have one order."""
        return self._apply(await asyncio.get_running_loop().run_in_executor(self._thread, self._look))

    @asynccontextmanager
    async def watching(
        self, use: Callable[[Keys[L]], None], each: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        """Look after the keys file until the block ends.

        use: gets the new keys after a change.
        each: is called before every look.
        """
        with ThreadPoolExecutor(1, "fovea-keys") as self._thread:
            task = asyncio.create_task(self._watch(self._thread, use, each))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _watch(
        self, thread: ThreadPoolExecutor, use: Callable[[Keys[L]], None], each: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            each()
            if self._path is not None and self._apply(await loop.run_in_executor(thread, self._look)):
                use(self.keys)

    def _look(self) -> Keys[L] | None:
        """Return all keys if the keys file has changed and can be used, otherwise None.

        A file that cannot be used is read again at every look: its disk may have failed only for a moment.
        """
        if self._path is None or (_version(self._path) == self._version and not self._complaint):
            return None
        try:
            keys = self._read(self._path)
        except ConfigError as error:
            if error.message != self._complaint:
                self._log.error("the keys stay what they were: %s", error.message)
            self._complaint = error.message
            return None
        self._complaint = ""
        return keys

    def _apply(self, keys: Keys[L] | None) -> bool:
        if keys is None:
            return False
        self.keys = keys
        self._log.info("the keys file was read again: %d keys", len(keys) - len(self._fixed))
        return True

    def _read(self, path: Path) -> Keys[L]:
        self._version = _version(path)  # taken before reading: a change meanwhile is seen at the next look
        check_private(path)
        file = read_key_file(path, self._limits)
        self._check(file)
        return Keys((*self._fixed, *keys_of_file(file)))


def _version(path: Path) -> Version | None:
    """Return a value that differs after the file was changed or replaced; None: it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

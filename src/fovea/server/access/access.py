"""Decides for every request whether its key opens its route, and who its client is.

Keys can change while the server runs. The table of keys is replaced as a whole, in the event loop. A
thread of its own looks after the keys file, so that a slow disk delays no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fovea.access.audit import Audit
from fovea.access.keyfile import KeyFile, check_private, digest, fingerprint, read_key_file
from fovea.access.keys import LONGEST_KEY, Key, Keys, keys_of_file, keys_of_flags
from fovea.access.log import AccessLog
from fovea.core.errors import ConfigError, Unauthorized
from fovea.server.access.caller import Caller
from fovea.server.access.client import Client
from fovea.server.access.limits import NO_LIMITS, Limits
from fovea.server.access.rules import Rules, noun

if TYPE_CHECKING:
    from fovea.server.settings import ServerSettings

log = logging.getLogger("fovea.server")
CHECK_S = 1.0
"""Seconds between two looks at the keys file."""
Version = tuple[int, int, int, int]


class Access:
    """The keys, clients, rules and logs of one server.

    rules: which keys open which routes.
    fair: whether a client leaves places to others: there are several, and no fixed number of places per key.
    usual_places: places of a client without a limit of its own; 0: no fixed number.

    Raises ConfigError if the keys file or the access log cannot be used.
    """

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        access = settings.access
        self.usual_places = access.max_places_per_key
        self.audit = Audit(clock)
        self.log = AccessLog(access.access_log)
        self._path = access.keys_file
        file = self._path is not None
        self.rules = Rules(
            api=bool(settings.api_keys) or file,
            admin=bool(settings.admin_keys) or file,
            metrics=bool(access.metrics_keys) or file,
            open_metrics=access.open_metrics,
            docs=access.docs,
        )
        self._scoped = settings.cache_scope == "key"
        self._clock, self._now = clock, now
        self._fixed: tuple[Key[Limits], ...] = tuple(
            keys_of_flags(settings.api_keys, settings.admin_keys, access.metrics_keys, NO_LIMITS)
        )
        flags = (*settings.api_keys, *settings.admin_keys, *access.metrics_keys)
        self._longest = max((LONGEST_KEY, *(len(key.encode()) for key in flags)))
        self._clients: dict[str, Client] = {}
        self._shares: dict[str, float] = {}
        self._version: Version | None = None
        self._complaint = ""
        self._use(Keys(self._fixed) if self._path is None else self._read(self._path))

    @property
    def fair(self) -> bool:
        return not self.usual_places and self._api_clients > 1

    def authenticate(self, path: str, authorization: bytes, caller: Caller) -> None:
        """Check the key of a request.

        authorization: the header.
        caller: gets client, tenant and fingerprint.
        Raises Unauthorized if the path needs a key and the header has none that opens it.
        """
        roles = self.rules.roles(path)
        if roles:
            key = self._key(authorization, roles, caller)
            caller.client = self._clients[key.name]
            caller.tenant = key.tenant if self._scoped else ""
            caller.holder = key.tenant

    def caller_of(self, holder: str) -> Caller | None:
        """Return a caller by its `holder`, "" without keys; None: none of its keys is left."""
        if not self.rules.api:
            return Caller() if not holder else None
        keys = (key for key in self._keys if key.tenant == holder and "api" in key.roles)
        key = next((key for key in keys if key.expires is None or self._now() < key.expires), None)
        if key is None:
            return None
        return Caller(self._clients[key.name], key.tenant if self._scoped else "", holder=holder)

    def stats(self) -> dict[str, float]:
        """Figures by the names of `observe.table`."""
        return {"keys": len(self._keys), "keys_file_broken": float(bool(self._complaint))}

    def share_of(self, tenant: str) -> float:
        """Return the part of each cache that the entries of a tenant may fill; 1 for an unknown one."""
        return self._shares.get(tenant, 1.0)

    def reload(self) -> bool:
        """Read the keys file if it has changed. Returns whether other keys are used now.

        A file that cannot be used is logged, and the keys stay what they were.
        """
        return self._apply(self._look())

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look after the keys file and the audit log until the block ends."""
        with ThreadPoolExecutor(1, "fovea-keys") as thread:
            task = asyncio.create_task(self._watch(thread))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self.audit.flush(final=True)
        self.log.close()

    async def _watch(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            self.audit.flush()
            if self._path is not None:
                self._apply(await loop.run_in_executor(thread, self._look))

    def _look(self) -> Keys[Limits] | None:
        """Return all keys if the keys file has changed and can be used, otherwise None.

        A file that cannot be used is read again at every look: its disk may have failed only for a moment.
        """
        if self._path is None or (_version(self._path) == self._version and not self._complaint):
            return None
        try:
            keys = self._read(self._path)
        except ConfigError as error:
            if error.message != self._complaint:
                log.error("the keys stay what they were: %s", error.message)
            self._complaint = error.message
            return None
        self._complaint = ""
        return keys

    def _apply(self, keys: Keys[Limits] | None) -> bool:
        if keys is None:
            return False
        self._use(keys)
        log.info("the keys file was read again: %d keys", len(keys) - len(self._fixed))
        return True

    def _read(self, path: Path) -> Keys[Limits]:
        self._version = _version(path)  # taken before reading: a change meanwhile is seen at the next look
        check_private(path)
        file = read_key_file(path, Limits)
        self._check_shares(file)
        return Keys((*self._fixed, *keys_of_file(file)))

    def _check_shares(self, file: KeyFile[Limits]) -> None:
        for record in file.records:
            if record.limits.cache_share < 1 and not self._scoped:
                raise ConfigError(
                    f"key {record.name!r}: cache_share is {record.limits.cache_share:g}, but the clients "
                    "share the caches; accepted: 1, or cache_scope key",
                    param="keys_file",
                )

    def _use(self, keys: Keys[Limits]) -> None:
        """Replace the table. Clients that stay keep what they have used of their limits."""
        limits: dict[str, Limits] = {key.name: key.limits for key in keys}
        for name, values in limits.items():
            if name in self._clients:
                self._clients[name].change_limits(values)
            else:
                self._clients[name] = Client(name, values, self._clock)
        for name in self._clients.keys() - limits.keys():
            del self._clients[name]
        self._shares = {key.tenant: key.limits.cache_share for key in keys}
        self._api_clients = len({key.name for key in keys if "api" in key.roles})
        self._keys = keys

    def _key(self, authorization: bytes, roles: frozenset[str], caller: Caller) -> Key[Limits]:
        scheme, _, text = authorization.partition(b" ")
        text, kind = text.strip(), noun(roles)
        if scheme.lower() != b"bearer" or not text:
            article = "an" if kind[0] in "aA" else "a"
            raise Unauthorized(
                f"{article} {kind} is required: Authorization: Bearer KEY", code="missing_api_key"
            )
        wrong = Unauthorized(f"the {kind} is not valid here")
        if len(text) > self._longest:  # no key is that long, and hashing would take time
            raise wrong
        hashed = digest(text)
        caller.fingerprint = fingerprint(hashed)
        key = self._keys.find(hashed)
        if key is None or not key.roles & roles:
            raise wrong
        if key.expires is not None and self._now() >= key.expires:
            raise Unauthorized("the key has expired", code="expired_api_key")
        return key


def _version(path: Path) -> Version | None:
    """Return a value that differs after the file was changed or replaced; None: it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

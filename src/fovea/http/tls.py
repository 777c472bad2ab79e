"""The certificate of the server, which is read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.http.settings import HttpSettings

log = logging.getLogger("fovea.server")
PERIOD_S = 5.0
"""Seconds between two looks at the files."""


class Certificate:
    """A certificate with its key.

    cert, key: their PEM files.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self.cert = cert
        self.key = key
        self._state = self._read_state()

    @classmethod
    def of(cls, settings: HttpSettings) -> Certificate | None:
        """Return the certificate of some settings; None: plain HTTP."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key)

    def context(self) -> ssl.SSLContext:
        """Read the files and return a context for TLS 1.2 and later.

        Raises ConfigError, which names the file and the reason, if they cannot be used.
        """
        for name, path in (("tls_cert", self.cert), ("tls_key", self.key)):
            try:
                text = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}", param=name) from error
            if b"-----BEGIN " not in text:
                raise ConfigError(
                    f"{path} is not a PEM file; accepted: a file with a line -----BEGIN ...-----", param=name
                )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key, password=self._refuse_password)
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            if "MISMATCH" in reason:
                raise ConfigError(
                    f"{self.key} is not the key of the certificate {self.cert}", param="tls_key"
                ) from error
            raise ConfigError(
                f"{self.cert} with {self.key} cannot be used: {reason}", param="tls_cert"
            ) from error
        self._warn_of_mode()
        return context

    def changed(self) -> bool:
        """Tell whether a file has changed since the last look."""
        before, self._state = self._state, self._read_state()
        return before != self._state

    async def watch(self, install: Callable[[ssl.SSLContext], None], period_s: float = PERIOD_S) -> None:
        """Look at the files every few seconds, and install a new context when they change.

        Files that do not fit each other are logged, and the old certificate stays in use.
        """
        while True:
            await asyncio.sleep(period_s)
            try:
                context = await asyncio.to_thread(self._context_if_changed)
            except ConfigError as error:
                log.error("the old certificate stays in use: %s", error.message)
                continue
            if context is not None:
                install(context)
                log.info("%s: new connections get the new certificate", self.cert)

    def _context_if_changed(self) -> ssl.SSLContext | None:
        return self.context() if self.changed() else None

    def _refuse_password(self) -> str:
        raise ConfigError(f"{self.key} is encrypted; accepted: a key without a password", param="tls_key")

    def _read_state(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_file_state(path) for path in (self.cert, self.key))

    def _warn_of_mode(self) -> None:
        if stat.S_IMODE(self.key.stat().st_mode) & 0o077:
            log.warning("%s can be read by other users of this machine; chmod 600 protects it", self.key)


def _file_state(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

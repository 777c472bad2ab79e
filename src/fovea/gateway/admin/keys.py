"""Keys by the API: lists them, makes them, revokes them, and changes limits, roles and ends.

They are written to the gateway's keys file, as `fovea keys` does, under the same lock. This worker uses the
change at once; other workers, and gateways that read the same file, see it within about a second. Every
change is a line of the audit log. A new key is in the answer that makes it, and nowhere else.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fovea.access.audit import Audit
from fovea.access.key_edit import Draft, editing
from fovea.access.keys import ROLES, Key, KeyRecord, check_name, fingerprint
from fovea.core.config_files import check_keys
from fovea.core.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from fovea.core.settings import Setting, build_settings, flat_values, settings_of, type_in_words
from fovea.gateway.tenants.keys import TenantLimits, Tenants

What = dict[str, Any]
"""What an edit has done, by name."""
MOST_KEYS = 1000
"""Keys that a list shows at most."""
_LIMITS = settings_of(TenantLimits)
_NAMES = tuple(entry.name for entry in _LIMITS)
_USUAL = flat_values(TenantLimits())


class Operator(NamedTuple):
    """The caller of an administrative route, for the audit log.

    name, fingerprint: of its key; "": the gateway has no keys.
    address: of the client. request_id: of its request.
    """

    name: str
    fingerprint: str
    address: str
    request_id: str


@dataclass(frozen=True, slots=True)
class KeyDesk:
    """Lists and changes the keys of a gateway.

    tenants: has the keys that are valid now, and the path of the file.
    audit: gets a line for each change.
    now: returns the seconds of the epoch.
    turn: one edit at a time waits for the file, so that the threads of the process stay free for others.
    """

    tenants: Tenants
    audit: Audit
    now: Callable[[], float]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def listed(self) -> dict[str, Any]:
        """Return all keys without their secrets, and the limits that there are."""
        keys = list(self.tenants.keys)
        return {
            "keys": [self._shown(key) for key in keys[:MOST_KEYS]],
            "total": len(keys),
            "writable": self._writable(),
            "roles": list(ROLES),
            "limits": [_described(entry) for entry in _LIMITS],
        }

    def _writable(self) -> bool:
        """Whether there is a keys file that this process may replace. It may be mounted to be read alone."""
        path = self.tenants.keys_file
        return path is not None and os.access(path, os.W_OK) and os.access(path.resolve().parent, os.W_OK)

    async def create(self, operator: Operator, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a key: {"name", "roles", "expires", "limits"}. The answer has the key, once."""
        with _as_request():
            check_keys("the body", body, ("name", "roles", "expires", "limits"), "field")
            name, roles = check_name(body.get("name")), _roles(body)
            expires = self._expires(body.get("expires"))
            given = {limit: value for limit, value in _limits(body).items() if value is not None}

        keys: list[str] = []

        def work(draft: Draft[TenantLimits]) -> What:
            keys.append(draft.add(name, roles, expires, given))
            return {**_of(draft.file.records[-1]), "expires": _text(expires), "limits": given}

        return {**await self._edit(operator, "key_created", work), "key": keys[-1]}

    async def revoke(self, operator: Operator, digits: str) -> dict[str, Any]:
        """Remove one key. digits: its fingerprint."""

        def work(draft: Draft[TenantLimits]) -> What:
            record = _find(draft, digits)
            draft.revoke([record])
            self._check_admin_left(draft)
            return _of(record)

        return await self._edit(operator, "key_revoked", work)

    async def change(self, operator: Operator, digits: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change one key: {"roles", "expires"}. null as the end: it never expires."""
        with _as_request():
            check_keys("the body", body, ("roles", "expires"), "field")
            if not body:
                raise ConfigError("the body is empty; accepted: roles, expires")
            values: dict[str, Any] = {}
            if "roles" in body:
                values["roles"] = _roles(body)
            if "expires" in body:
                values["expires"] = self._expires(body["expires"])

        def work(draft: Draft[TenantLimits]) -> What:
            draft.change([_find(draft, digits)], values)
            self._check_admin_left(draft)
            shown = {"expires": _text(values["expires"])} if "expires" in values else {}
            return {**_of(_find(draft, digits)), **shown}

        return await self._edit(operator, "key_changed", work)

    async def limit(self, operator: Operator, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change limits that all keys of a tenant share: {"limits": {NAME: VALUE}}. null: the usual value."""
        with _as_request():
            check_keys("the body", body, ("limits",), "field")
            values = _limits(body)
            if not values:
                raise ConfigError(f"limits is empty; accepted: {', '.join(_NAMES)}", param="limits")

        def work(draft: Draft[TenantLimits]) -> What:
            records = draft.named(name)
            if not records:
                raise _unknown(f"the keys file has no key of {name[:100]!r}")
            draft.change(records, values)
            limits = draft.named(name)[0].limits
            return {"name": name, "limits": {limit: getattr(limits, limit) for limit in values}}

        return await self._edit(operator, "limits_changed", work)

    async def _edit(
        self, operator: Operator, event: str, work: Callable[[Draft[TenantLimits]], What]
    ) -> What:
        """Do something with a draft of the file in a thread, write it, and use the new keys.

        work: returns what it has done, for the audit log and the answer. The thread writes the line, too: if
        the request is cut because the gateway ends, the thread still changes the file.
        """
        path = self.tenants.keys_file
        if path is None:
            raise InvalidRequest(
                "this gateway has no keys file, so its keys cannot be changed here; accepted: --keys-file at "
                "its start",
                code="no_keys_file",
            )

        def edit() -> What:
            what = _edited(path, work)
            self._note(operator, event, what)
            return what

        async with self.turn:
            what = await asyncio.to_thread(edit)
        await self.tenants.refresh()
        return what

    def _check_admin_left(self, draft: Draft[TenantLimits]) -> None:
        """Raise ConfigError if nobody could open /admin any more."""
        if any("admin" in key.roles for key in self.tenants.keys if ":" in key.name):  # of a flag
            return
        for record in draft.file.records:
            if "admin" in record.roles and (record.expires is None or record.expires > self.now()):
                return
        raise ConfigError("no key with the role admin would be left; accepted: make another one before")

    def _note(self, operator: Operator, event: str, what: What) -> None:
        """Write the line of the audit log."""
        who = {
            "by": operator.name,
            "by_key": operator.fingerprint,
            "address": operator.address,
            "id": operator.request_id,
        }
        self.audit.changed(self.now(), {"event": event, **who, **what})

    def _expires(self, value: Any) -> datetime.date | None:
        """Return the day or the time from which a key is refused. Raises ConfigError."""
        if value is None:
            return None
        accepted = "a later day, as 2027-01-31, or a time with its zone, as 2027-01-31T12:00:00Z, or null"
        try:
            day = datetime.date.fromisoformat(value) if len(value) == 10 else None
            at = day or _in_utc(datetime.datetime.fromisoformat(value))
        except (TypeError, ValueError, OverflowError):
            shown = str(value)[:40]
            raise ConfigError(f"expires is {shown!r}; accepted: {accepted}", param="expires") from None
        begin = (
            at
            if isinstance(at, datetime.datetime)
            else datetime.datetime(at.year, at.month, at.day, tzinfo=datetime.UTC)
        )
        if begin.timestamp() <= self.now():
            raise ConfigError(f"expires is {value!r}; accepted: {accepted}", param="expires")
        return at

    def _shown(self, key: Key[TenantLimits]) -> dict[str, Any]:
        expires = None if key.expires is None else datetime.datetime.fromtimestamp(key.expires, datetime.UTC)
        return {
            "name": key.name,
            "fingerprint": fingerprint(key.digest),
            "roles": sorted(key.roles),
            "expires": _text(expires),
            "expired": key.expires is not None and self.now() >= key.expires,
            "fixed": ":" in key.name,
        }


def own_limits(limits: TenantLimits) -> dict[str, Any]:
    """Return the limits that are not the usual ones."""
    values = flat_values(limits)
    return {name: value for name, value in values.items() if value != _USUAL[name]}


@contextmanager
def _as_request() -> Iterator[None]:
    """Turn what is wrong with a value into an error of the request."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequest(error.message, param=error.param) from error


def _edited(path: Path, work: Callable[[Draft[TenantLimits]], What]) -> What:
    """Do something with a draft and write it. Raises InvalidRequest, NotFound, Unavailable."""
    try:
        with editing(path, TenantLimits) as draft:
            with _as_request():
                result = work(draft)
            draft.write()
            return result
    except ConfigError as error:
        raise Unavailable(error.message, code="keys_file_unusable") from error


def _find(draft: Draft[TenantLimits], digits: str) -> KeyRecord[TenantLimits]:
    found = [record for record in draft.file.records if record.fingerprint == digits]
    if len(found) != 1:
        many = "several keys" if found else "no key"
        raise _unknown(f"the keys file has {many} with the fingerprint {digits[:100]!r}")
    return found[0]


def _unknown(message: str) -> NotFound:
    return NotFound(f"{message}; accepted: those of GET /admin/keys", code="unknown_key")


def _roles(body: Mapping[str, Any]) -> tuple[str, ...]:
    roles = body.get("roles", [])
    wrong = not isinstance(roles, list) or any(role not in ROLES for role in roles)
    if wrong or ("roles" in body and not roles):
        accepted = f"a list of {', '.join(ROLES)}"
        raise ConfigError(f"roles is {str(roles)[:100]}; accepted: {accepted}", param="roles")
    return tuple(sorted(set(roles)))


def _limits(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits in a body; None for one that is to be the usual one. Raises ConfigError."""
    values = body.get("limits", {})
    if not isinstance(values, dict):
        raise ConfigError("limits is not an object; accepted: limits by name, as {...}", param="limits")
    check_keys("limits", values, _NAMES, "limit")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    build_settings(TenantLimits, {name: value for name, value in given.items() if value is not None})
    return given


def _described(entry: Setting) -> dict[str, Any]:
    return {
        "name": entry.name,
        "default": entry.default,
        "help": entry.rule.help,
        "accepted": entry.rule.accepted or type_in_words(entry.hint),
    }


def _of(record: KeyRecord[TenantLimits]) -> dict[str, Any]:
    return {"name": record.name, "fingerprint": record.fingerprint, "roles": sorted(record.roles)}


def _in_utc(at: datetime.datetime) -> datetime.datetime:
    """Return a time in UTC. Raises ValueError without a zone, and OverflowError outside of the calendar."""
    if at.tzinfo is None:
        raise ValueError("no zone")
    return at.astimezone(datetime.UTC)


def _text(expires: datetime.date | None) -> str | None:
    return None if expires is None else expires.isoformat().replace("+00:00", "Z")

"""Texts that a spec may hold: names, addresses, images.

Each check returns an empty text, or the accepted values in words.
"""

from __future__ import annotations

import ipaddress
import re

from fovea.core.errors import ConfigError

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_IMAGE = re.compile(
    r"(?:[a-z0-9]+(?:[.-][a-z0-9]+)*:[0-9]{1,5}/)?[a-z0-9]+(?:[._/-][a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MODEL = re.compile(r"[A-Za-z0-9/~][A-Za-z0-9._/~-]{0,254}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}|")
_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9._~/%-]*)?|")
_FILE = re.compile(r"(/[A-Za-z0-9._-]+)+|")
_ADDRESSES = "http://HOST:PORT/PATH or https://HOST/PATH"
_MACHINE = re.compile(r"[a-z0-9.-]{0,64}")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,128}|")


def check_label(value: str) -> str:
    """A DNS label of at most 30 characters, so that names with suffixes stay within 63."""
    words = (
        "1 to 30 lower-case letters, digits and hyphens, beginning with a letter, not ending with a hyphen"
    )
    return "" if _LABEL.fullmatch(value) else words


def check_optional_label(value: str) -> str:
    """A label, or nothing."""
    return check_label(value) if value else ""


def check_host(value: str) -> str:
    """A DNS name."""
    return "" if _HOST.fullmatch(value) else "a DNS name, such as vlm.example.com"


def check_image(value: str) -> str:
    """A reference of a container image."""
    return "" if _IMAGE.fullmatch(value) else "an image, such as registry.example.com/fovea:1.0"


def check_model(value: str) -> str:
    """A folder or a hub id."""
    accepted = _MODEL.fullmatch(value) and ".." not in value
    return "" if accepted else "fovea-tiny, a hub id, or an absolute folder"


def check_model_name(value: str) -> str:
    """A model's name for clients, or nothing."""
    return "" if _MODEL_NAME.fullmatch(value) else "letters, digits, dots, hyphens, underscores, slashes"


def check_url(value: str) -> str:
    """A URL without user, query and fragment, or nothing."""
    return "" if _URL.fullmatch(value) else f"{_ADDRESSES}, without user, query and fragment"


def check_webhook(value: str) -> str:
    """A URL as `check_url` wants it. Raises ConfigError without what may be a secret: all but the host."""
    if not (words := check_url(value)):
        return ""
    found = re.match(r"(https?://)(?:[^/?#]*@)?([^/?#@]*)", value)
    raise ConfigError(
        f"alert_webhook is {found[1] + found[2] + '/...' if found else 'no URL'!r}; accepted: {words}. A URL "
        "with a secret belongs into a file: alert_webhook_file",
        param="alert_webhook",
    )


def check_file(value: str) -> str:
    """An absolute path, or nothing."""
    return "" if _FILE.fullmatch(value) and ".." not in value else "an absolute path, such as /etc/vlm/alerts"


def check_machine_type(value: str) -> str:
    """A machine type of a cloud, or nothing."""
    return "" if _MACHINE.fullmatch(value) else "a machine type, such as g2-standard-8 or ml.g5.xlarge"


def check_role(value: str) -> str:
    """An ARN of a role, or nothing."""
    return "" if _ROLE.fullmatch(value) else "an ARN, such as arn:aws:iam::123456789012:role/NAME"


def check_optional_image(value: str) -> str:
    """A reference of a container image, or nothing."""
    return check_image(value) if value else ""


def check_proxy(value: str) -> str:
    """An IP address or a network."""
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return "addresses and networks, such as 10.0.0.7 or 10.0.0.0/8"
    return ""


_ENDPOINT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-f:]+\]):[0-9]{1,5}|")


def check_endpoint(value: str) -> str:
    """HOST:PORT, or nothing."""
    accepted = _ENDPOINT.fullmatch(value) and int(value.rpartition(":")[2] or 1) in range(1, 65536)
    return "" if accepted else "HOST:PORT, such as tempo.example.com:4317"

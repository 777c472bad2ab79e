"""Checks of exposure. Each of them tries what an attacker would try, with one small request.

An own server always listens on the loopback interface alone. So `exposure/port` judges the address in its
settings; with a URL it connects to the addresses of this machine.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fovea.doctor.check import TEXT_ALONE, Check, Verdict, failed, not_applicable, passed, warned
from fovea.doctor.machine import is_loopback
from fovea.doctor.pictures import ImageHosts
from fovea.doctor.server import Answer, NoAnswer, Server
from fovea.doctor.subject import Subject

INSIDE = ("http://127.0.0.1/image.png", "http://169.254.169.254/latest/meta-data")
"""Addresses on a usual port that must not be contacted for strangers: this machine, and a cloud's secrets."""
FILE = "file:///etc/hostname"
FORBIDDEN = 403


def port(subject: Subject) -> Verdict:
    """Is the server closed to other machines that have no key?"""
    if subject.live is None:
        host = str(subject.setting("host"))
        closed = bool(subject.setting("api_keys")) or subject.setting("keys_file") is not None
        if is_loopback(host):
            return passed(f"the settings listen on {host} alone")
        if not closed:
            return failed(
                f"the settings listen on {host}, without keys",
                "every machine that reaches it may use it",
                "--keys-file FILE, or --host 127.0.0.1",
            )
        return passed(f"the settings listen on {host}, with keys")
    reached = _reached(subject, subject.live)
    if not reached:
        return passed("only this machine can connect")
    if _is_open(subject.live):
        return failed(
            f"{', '.join(reached)}: open, no key is asked for",
            "every machine that reaches it may use it",
            "--keys-file FILE, or --host 127.0.0.1 behind a proxy that checks keys",
        )
    return passed(f"{', '.join(reached)}: open, and a key is asked for")


def api(subject: Subject) -> Verdict:
    """Is a request without a key refused?"""
    return _closed(subject, "/v1/models", "every program that reaches the port may use the model")


def admin(subject: Subject) -> Verdict:
    """Is /admin closed to requests without a key?"""
    return _closed(subject, "/admin/caches", "everyone may see requests, and clear caches")


def metrics(subject: Subject) -> Verdict:
    """Is /metrics closed to requests without a key?"""
    return _closed(subject, "/metrics", "everyone may see how many requests come, and for which models")


def private_images(subject: Subject) -> Verdict:
    """Does the server refuse to fetch an image from a private address?"""
    server = subject.server
    if not server.takes_images:
        return not_applicable(TEXT_ALONE)
    with ImageHosts() as hosts:
        answers = [server.ask("What is this?", [f"{hosts.url}/good"])]
        hits = hosts.hits.total()
    if hits:
        return failed(
            "it fetched an image from a loopback address",
            "clients reach services that only this machine should reach",
            "--allow-private-hosts false, or --allowed-hosts",
        )
    answers += [server.ask("What is this?", [url]) for url in INSIDE]
    return _judge(answers, "private addresses")


def files(subject: Subject) -> Verdict:
    """Does the server refuse to read its own files for a client?"""
    if not subject.server.takes_images:
        return not_applicable(TEXT_ALONE)
    answer = subject.server.ask("What is this?", [FILE])
    if subject.settings is not None and subject.setting("file_root") is not None:
        return warned(
            f"files under {subject.setting('file_root')} are read for clients",
            "whoever has a key may ask about every picture there",
            "--file-root none, if clients do not need it",
        )
    return _judge([answer], "file:// URLs")


def transport(subject: Subject) -> Verdict:
    """Are keys and images encrypted on their way?"""
    if subject.live is not None:
        parts = urlsplit(subject.live.url)
        near, safe = is_loopback(parts.hostname or ""), parts.scheme == "https"
    else:
        near, safe = is_loopback(str(subject.setting("host"))), subject.setting("tls_cert") is not None
    if safe:
        return passed("TLS")
    if near:
        return passed("plain HTTP, on the loopback interface")
    return warned(
        "plain HTTP", "keys can be read on the way", "--tls-cert FILE --tls-key FILE, or a proxy with TLS"
    )


def browsers(subject: Subject) -> Verdict:
    """Are answers closed to pages of other sites in a user's browser?"""
    server = subject.server
    answer = server.web.request(
        "GET", server.url + "/v1/models", headers={"Origin": "https://attacker.invalid"}
    )
    allowed = answer.headers.get("access-control-allow-origin", "")
    if allowed in ("*", "https://attacker.invalid"):
        return warned(
            f"Access-Control-Allow-Origin: {allowed}",
            "every page may read answers with its visitors' access",
            "--cors-origins https://your.site",
        )
    return passed("no other site's pages")


def _closed(subject: Subject, path: str, harm: str) -> Verdict:
    server = subject.server
    answer = server.get(path, "")
    figure = f"{path} without a key: {answer.status}"
    if answer.status == 404:
        return not_applicable(f"the server has no {path}")
    if answer.status in (401, 403):
        return passed(figure)
    if subject.live is None and is_loopback(str(subject.setting("host"))):
        return warned(figure, f"on this machine, {harm}", "--keys-file FILE")
    if subject.live is not None and not _reached(subject, server):
        return warned(figure, f"on this machine, {harm}", "--keys-file FILE")
    return failed(figure, harm, "--keys-file FILE")


def _reached(subject: Subject, server: Server) -> list[str]:
    """Return the addresses at which other machines reach a server."""
    parts = urlsplit(server.url)
    host, number = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if not is_loopback(host):
        return [host]
    return [address for address in subject.machine.addresses() if subject.machine.connects(address, number)]


def _is_open(server: Server) -> bool:
    try:
        return server.get("/v1/models", "").status == 200
    except NoAnswer:
        return False


def _judge(answers: list[Answer], noun: str) -> Verdict:
    """Judge the answers to requests that must be refused before anything is fetched or read."""
    statuses = ", ".join(str(answer.status) for answer in answers)
    if all(answer.status == FORBIDDEN for answer in answers):
        return passed(f"refused with {statuses}")
    if any(answer.status == 200 for answer in answers):
        return failed(
            f"accepted with {statuses}",
            f"it answered about {noun} instead of refusing them",
            "--allow-private-hosts false, --file-root none",
        )
    return warned(
        f"answered {statuses}",
        f"no picture was used, but the server may have tried {noun} first: "
        + next(answer.message for answer in answers if answer.status != FORBIDDEN),
        "refuse them before they are tried; Fovea answers 403",
    )


CHECKS = (
    Check("exposure", "port", "open port", port),
    Check("exposure", "api", "/v1 without a key", api),
    Check("exposure", "admin", "/admin without a key", admin),
    Check("exposure", "metrics", "/metrics without a key", metrics),
    Check("exposure", "private-images", "images at private addresses", private_images),
    Check("exposure", "files", "file:// URLs", files),
    Check("exposure", "transport", "encryption", transport),
    Check("exposure", "browsers", "pages of other sites", browsers),
)

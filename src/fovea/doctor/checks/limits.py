"""Checks of settings: keys, queues, times, and where strangers' files are decoded."""

from __future__ import annotations

from fovea.doctor.check import Check, Need, Verdict, failed, not_applicable, passed, warned
from fovea.doctor.machine import is_loopback
from fovea.doctor.subject import Subject

SHORT_KEY = 16
"""Characters below which a key can be guessed or is a word."""


def keys(subject: Subject) -> Verdict:
    """Are there keys, and are they hard to guess?"""
    found = [
        *subject.setting("api_keys"), *subject.setting("admin_keys"), *subject.setting("metrics_keys"),
    ]  # fmt: skip
    file = subject.setting("keys_file")
    figure = f"{len(found)} keys in settings, keys file: {file or 'none'}"
    short = [key for key in found if len(key) < SHORT_KEY]
    if short:
        return failed(
            f"{len(short)} keys of fewer than {SHORT_KEY} characters",
            "they can be guessed",
            "fovea keys new --name CLIENT",
        )
    if not subject.setting("api_keys") and file is None:
        if is_loopback(str(subject.setting("host"))):
            return warned(figure, "every program of this machine may use the server", "--keys-file FILE")
        return failed(figure, "every machine that reaches the port may use the server", "--keys-file FILE")
    return passed(figure)


def keys_file(subject: Subject) -> Verdict:
    """Can only the server's user read the keys file?"""
    file = subject.setting("keys_file")
    if file is None:
        return not_applicable("there is no keys file")
    mode = subject.machine.mode(str(file))
    if mode is None:
        return failed(str(file), "it does not exist", "fovea keys new --name CLIENT")
    if mode & 0o077:
        return warned(f"mode {mode:03o}", "others may read or change it", f"chmod 600 {file}")
    return passed(f"mode {mode:03o}")


def admin_key(subject: Subject) -> Verdict:
    """Has /admin a key of its own?"""
    if subject.setting("admin_keys") or subject.setting("keys_file") is not None:
        return passed("yes")
    if not subject.setting("api_keys"):
        return not_applicable("there are no keys: see limits/keys")
    return warned("no", "every API key may clear caches and profile the server", "FOVEA_ADMIN_KEY")


def queue(subject: Subject) -> Verdict:
    """Is the queue bounded, so that overload is refused and not stored?"""
    bound = int(subject.setting("max_queue"))
    if not bound:
        return failed(
            "no bound", "under overload every request waits until its client has gone", "--max-queue 256"
        )
    return passed(f"{bound} requests")


def request_timeout(subject: Subject) -> Verdict:
    """Do requests end at some time, whatever their clients ask for?"""
    seconds = float(subject.setting("request_timeout"))
    if not seconds:
        return failed("none", "a request may hold its KV for ever", "--request-timeout 600")
    return passed(f"{seconds:g} s")


def drain_time(subject: Subject) -> Verdict:
    """Have running requests time to finish when the server is replaced?"""
    drain, lame = float(subject.setting("drain_seconds")), float(subject.setting("lame_duck_s"))
    figure = f"{drain:g} s, after {lame:g} s in which load balancers notice"
    if not drain:
        return failed(figure, "every update of the server breaks off answers", "--drain-seconds 30")
    if not lame:
        return warned(figure, "load balancers still send requests to a closed port", "--lame-duck-s 5")
    return passed(figure)


def decoders(subject: Subject) -> Verdict:
    """Are strangers' files decoded in processes without rights?"""
    workers = {name: int(subject.setting(f"{name}_workers")) for name in ("image", "video")}
    figure = ", ".join(f"{name}s: {count} processes" for name, count in workers.items())
    inside = [name for name, count in workers.items() if not count]
    if inside:
        return failed(
            figure, f"a hole in a decoder of {inside[0]}s is a hole in the server", f"--{inside[0]}-workers 2"
        )
    return passed(figure)


def image_size(subject: Subject) -> Verdict:
    """Can the pixels of one request be decoded in the memory that decoders get?"""
    pixels, memory = int(subject.setting("max_pixels")), int(subject.setting("decode_memory_mib"))
    figure = f"up to {pixels / 1e6:g} megapixels in {memory} MiB"
    # An estimate: a picture with four bytes a pixel, and a converted copy of it.
    if 8 * pixels > memory << 20:
        return warned(
            figure, "larger images are accepted than can be decoded", f"--max-pixels {(memory << 20) // 8}"
        )
    return passed(figure)


def slow_log(subject: Subject) -> Verdict:
    """Are slow requests logged with their stages?"""
    whole, first = float(subject.setting("slow_request_s")), float(subject.setting("slow_ttft_s"))
    figure = f"from {whole:g} s, or {first:g} s to the first token"
    if not whole and not first:
        return warned("none", "the log does not tell why a request was slow", "--slow-request-s 30")
    return passed(figure)


CHECKS = tuple(
    Check("limits", name, title, run, (Need.SETTINGS,))
    for name, title, run in (
        ("keys", "keys", keys),
        ("keys-file", "mode of the keys file", keys_file),
        ("admin-key", "key of /admin", admin_key),
        ("queue", "bound of the queue", queue),
        ("request-timeout", "timeout of requests", request_timeout),
        ("drain-time", "time to finish at an update", drain_time),
        ("decoders", "processes that decode", decoders),
        ("image-size", "pixels of an image", image_size),
        ("slow-log", "log of slow requests", slow_log),
    )
)

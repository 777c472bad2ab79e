"""Checks by faults: SIGTERM, requests that are too large, broken hosts of images, SIGKILL, damaged files.

The drain comes first, because it ends the server with the user's settings. The others disturb one that
`launch.FAULT_FLAGS` prepare for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from fovea.doctor.check import (
    TEXT_ALONE,
    Check,
    Need,
    Verdict,
    failed,
    not_applicable,
    passed,
    plural,
    warned,
)
from fovea.doctor.load import IN_TIME_S, Streams, ask_together, tokens_per_word
from fovea.doctor.machine import is_loopback
from fovea.doctor.pictures import FAULTS, ImageHosts, bomb, data_url, png
from fovea.doctor.server import Answer, NoAnswer, Server, answer_text
from fovea.doctor.subject import Subject

MOST_REQUESTS = 16
"""Most requests of a crowd, if the context is much shorter than the KV pool."""
MOST_CROWD = 1 << 16
"""Tokens of a live server's KV pool above which it is not filled."""
QUESTION = "Which colour is this picture?"
PICTURE = data_url(png(224, 224, (200, 40, 40)))
REFUSALS = (400, 408, 413, 422, 429)


def _pictures(server: Server) -> list[str]:
    """The images of a question; none for a model that takes text alone."""
    return [PICTURE] if server.takes_images else []


def drain(subject: Subject) -> Verdict:
    """After SIGTERM under load, is every accepted request answered in the drain time of the settings?"""
    assert subject.launcher is not None
    launcher = subject.launcher
    streams = Streams(launcher.plain())
    running = streams.begin()
    launcher.terminate()
    ends = streams.end()
    status = launcher.wait()
    whole = sum(isinstance(end, Answer) and b"[DONE]" in end.body for end in ends)
    figure = f"{whole} of {plural(len(ends), 'stream')} complete, exit status {status}"
    if not running:
        return failed(figure, "the streams did not begin", "read the server's log")
    if whole < len(ends):
        return failed(figure, "accepted requests were lost", "--drain-seconds 30")
    if status != 0:
        return failed(figure, "the server did not end in order", "read the server's log")
    return passed(figure)


def prompt_too_long(subject: Subject) -> Verdict:
    """Is a prompt that cannot fit into the memory for KV refused, and does the server live on?"""
    server = _server(subject)
    context = int(server.card().get("max_model_len") or 32768)
    return _refusal(server, lambda: server.ask("word " * (context + 1000)), "a prompt")


def image_too_large(subject: Subject) -> Verdict:
    """Is an image of billions of pixels refused before they are decoded?"""
    server = _server(subject)
    if not server.takes_images:
        return not_applicable(TEXT_ALONE)
    return _refusal(server, lambda: server.ask(QUESTION, [data_url(bomb())]), "an image")


def crowd(subject: Subject) -> Verdict:
    """Are more requests than the KV pool holds answered one after the other, or refused?"""
    server = _server(subject)
    values = server.metrics() if server.is_fovea else {}
    tokens = int(values.get("fovea:kv_blocks_total", 0) * values.get("fovea:kv_block_tokens", 0))
    if not tokens:
        return not_applicable("the size of the KV pool is not known")
    if subject.launcher is None and tokens > MOST_CROWD:
        return not_applicable(f"filling a pool of {tokens} tokens would take a live server for long")
    share = min(tokens // 4, int(server.card().get("max_model_len") or tokens) * 3 // 4)
    count = min(MOST_REQUESTS, -(-3 * tokens // (2 * share)))
    words = int(share / tokens_per_word(server))
    answers = ask_together(server, [f"{number}:" + " word" * words for number in range(count)])
    good = sum(isinstance(answer, Answer) and answer.status == 200 for answer in answers)
    refused = sum(isinstance(answer, Answer) and answer.status in (429, 503) for answer in answers)
    figure = f"{count} requests of {share} tokens, for a pool of {tokens}: {good} answered, {refused} refused"
    if not server.lives():
        return failed(figure, "then the server was gone", "read the server's log")
    if good + refused < count or not good:
        ends = {
            str(end) if isinstance(end, NoAnswer) else f"status {end.status} {end.message}" for end in answers
        }
        return failed(figure, ", ".join(sorted(ends)), "read the server's log")
    return passed(figure)


def timeout(subject: Subject) -> Verdict:
    """Does a request end when its own timeout is over?"""
    server = _server(subject)
    if not server.is_fovea:
        return not_applicable("OpenAI's API has no timeout in requests")
    begun = subject.clock()
    answer = server.ask(QUESTION, _pictures(server), max_tokens=512, ignore_eos=True, timeout=0.1)
    figure = f"status {answer.status} after {subject.clock() - begun:.1f} s, with a timeout of 0.1 s"
    if answer.status != 408:
        return failed(figure, "the request went on for a client that had given up", "report it")
    if not server.lives():
        return failed(figure, "then the server was gone", "read the server's log")
    return passed(figure)


def image_hosts(subject: Subject) -> Verdict:
    """Are images of slow and failing hosts answered with an error, in time?"""
    server = _server(subject)
    if not server.takes_images:
        return not_applicable(TEXT_ALONE)
    if not is_loopback(urlsplit(server.url).hostname or ""):
        return not_applicable("the server runs on another machine, which cannot reach hosts of this one")
    with ImageHosts() as hosts:
        good = server.ask(QUESTION, [f"{hosts.url}/good"])
        if good.status == 403:
            return not_applicable("the server fetches no images from this machine, as it should")
        if good.status != 200:
            return failed(f"a good host: status {good.status}", good.message, "read the server's log")
        wrong, slowest = {}, 0.0
        for fault in FAULTS:
            begun = subject.clock()
            try:
                status = server.ask(QUESTION, [f"{hosts.url}/{fault}"], patience=IN_TIME_S).status
            except NoAnswer as error:
                wrong[fault] = str(error)
                continue
            slowest = max(slowest, subject.clock() - begun)
            if not 400 <= status < 500:
                wrong[fault] = f"status {status}"
    figure = f"{len(FAULTS) - len(wrong)} of {len(FAULTS)} refused, the slowest after {slowest:.1f} s"
    if wrong:
        named = ", ".join(f"{fault}: {text}" for fault, text in wrong.items())
        return failed(figure, named, "--fetch-timeout-s 10")
    if not server.lives():
        return failed(figure, "then the server was gone", "read the server's log")
    return passed(figure)


def kill_and_restart(subject: Subject) -> Verdict:
    """After SIGKILL under load, does the server start again on its caches, with the same answers?"""
    assert subject.launcher is not None
    launcher = subject.launcher
    server = launcher.disturbed()
    before = answer_text(server.ask(QUESTION, _pictures(server)))
    streams = Streams(launcher.disturbed())
    running = streams.begin()
    launcher.kill()
    streams.end()
    server = launcher.disturbed()
    after = answer_text(server.ask(QUESTION, _pictures(server)))
    figure = f"ready again after {launcher.ready_seconds:.1f} s"
    if before is None or after is None:
        return failed(figure, "a question about an image is not answered", "read the server's log")
    if before != after:
        return failed(figure, f"another answer: {after!r} in place of {before!r}", "report it")
    if not running:
        return warned(figure, "the streams had not begun when it was killed", "a machine that is less busy")
    return passed(f"{figure}, the same answer")


def damaged_entry(subject: Subject) -> Verdict:
    """Is a damaged file of the disk cache noticed, and the answer the same?"""
    assert subject.launcher is not None
    launcher = subject.launcher
    server = launcher.disturbed()
    before = answer_text(server.ask(QUESTION, _pictures(server)))
    if not _until(subject, lambda: bool(_entries(launcher.cache_folder))):
        return not_applicable("this model's encoder outputs are not kept on disk")
    launcher.terminate()
    launcher.wait()
    damaged = [_damage(path) for path in _entries(launcher.cache_folder)]
    server = launcher.disturbed()
    after = answer_text(server.ask(QUESTION, _pictures(server)))
    noticed = int(server.metrics().get("fovea:embed_disk_corrupt_total", 0))
    figure = f"{plural(len(damaged), 'damaged file')}, {noticed} noticed"
    if after is None or before != after:
        return failed(figure, f"another answer: {after!r} in place of {before!r}", "report it")
    if not noticed:
        return failed(figure, "the damaged file was read as if it were whole", "report it")
    return passed(f"{figure}, the same answer")


def _server(subject: Subject) -> Server:
    """Return the server that is disturbed: the own one, or the live one."""
    return subject.server if subject.launcher is None else subject.launcher.disturbed()


def _refusal(server: Server, send: Callable[[], Answer], noun: str) -> Verdict:
    """Judge a request that is too large for the server. noun: what is too large."""
    try:
        answer = send()
    except NoAnswer as error:
        return failed("no answer", f"{noun} that is too large ended the connection: {error}", "report it")
    figure = f"status {answer.status}"
    if not server.lives():
        return failed(figure, f"{noun} that is too large ended the server", "report it")
    if answer.status == 200:
        return failed(figure, f"{noun} that is too large was cut or accepted silently", "report it")
    if answer.status not in REFUSALS:
        return failed(figure, answer.message, "the server should answer 400, 413 or 429")
    if not answer.message:
        return warned(figure, "the client is not told what was too large", "update the server")
    return passed(figure, answer.message)


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file() and not path.name.startswith("."))


def _damage(path: Path) -> Path:
    """Flip bits in the last bytes of a file, which hold values and not the header."""
    content = bytearray(path.read_bytes())
    for place in range(max(0, len(content) - 64), len(content)):
        content[place] ^= 0xFF
    path.write_bytes(content)
    return path


def _until(subject: Subject, condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true, for at most five seconds. Returns whether it became true."""
    end = subject.clock() + 5.0
    while not condition():
        if subject.clock() > end:
            return False
        subject.sleep(0.05)
    return True


CHECKS = (
    Check("faults", "drain", "SIGTERM under load", drain, (Need.OWN,)),
    Check("faults", "prompt-too-long", "a prompt that is too long", prompt_too_long, (Need.DISTURB,)),
    Check("faults", "image-too-large", "an image that is too large", image_too_large, (Need.DISTURB,)),
    Check("faults", "crowd", "more requests than the memory holds", crowd, (Need.DISTURB,)),
    Check("faults", "timeout", "a request with a timeout", timeout, (Need.DISTURB,)),
    Check("faults", "image-hosts", "slow and failing hosts of images", image_hosts, (Need.DISTURB,)),
    Check("faults", "kill-and-restart", "SIGKILL under load", kill_and_restart, (Need.OWN,)),
    Check("faults", "damaged-entry", "a damaged file of the cache", damaged_entry, (Need.OWN,)),
)

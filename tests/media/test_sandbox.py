"""Decoding in processes of its own: equal results, and what happens when a decoder crashes, hangs or lies."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import pytest

from fovea.core.errors import InvalidImage, InvalidVideo, Unavailable
from fovea.core.media import Abandoned
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.media.sandbox import decoder as decoder_module
from fovea.media.sandbox import process as process_module
from fovea.media.sandbox.decoder import LocalDecoder, SandboxedDecoder
from fovea.media.sandbox.pool import WorkerPool
from fovea.media.sandbox.process import WorkerCrashed, WorkerProcess
from fovea.media.video import VideoHeader, check_work, frames_to_decode, open_video
from tests.media.samples import FORMATS, png_header, sample
from tests.support.clips import clip

LIMITS = MediaLimits(image_workers=1, video_workers=1)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxedDecoder]:
    decoder = SandboxedDecoder(LIMITS)
    yield decoder
    decoder.close()


def decode(decoder: SandboxedDecoder | LocalDecoder, data: bytes) -> bytes:
    return decoder.decode_image(data, probe(data, LIMITS))


@pytest.mark.parametrize("kind", FORMATS)
def test_images_are_those_of_this_process(sandbox: SandboxedDecoder, kind: str) -> None:
    data = sample(kind, width=1500, height=1100)  # more than a band of rows
    assert decode(sandbox, data) == decode(LocalDecoder(LIMITS), data)


def test_videos_are_those_of_this_process(sandbox: SandboxedDecoder) -> None:
    data = clip(96, rate=24)
    video, local = sandbox.open_video(data), open_video(data, LIMITS)
    assert video == local
    assert list(video.source.read([0, 5, 5, 90])) == list(local.source.read([0, 5, 5, 90]))


def test_errors_are_those_of_this_process(sandbox: SandboxedDecoder) -> None:
    for data in (sample()[:-20], png_header(9, 9)):
        with pytest.raises(InvalidImage) as local:
            decode(LocalDecoder(LIMITS), data)
        with pytest.raises(InvalidImage) as remote:
            decode(sandbox, data)
        assert (remote.value.message, remote.value.code) == (local.value.message, local.value.code)
    with pytest.raises(InvalidVideo) as error:
        sandbox.open_video(b"hello there, not a video")
    assert error.value.code == "unsupported_video_type"


def test_a_crash_harms_its_own_file_only(sandbox: SandboxedDecoder) -> None:
    """A defect of a decoder library once took the whole server with it."""
    assert sandbox.images is not None
    crashes, ended = sandbox.images.crashes, sandbox.images.ended
    with sandbox.images.lease() as worker:
        answers = worker.ask({"ask": "image"}, sample(), 20, room=40 * 30 * 3)
        os.kill(worker.pid, signal.SIGSEGV)
        with pytest.raises(WorkerCrashed, match="the decoder crashed while it read the file .SIGSEGV."):
            next(answers)
    assert decode(sandbox, sample()) == decode(LocalDecoder(LIMITS), sample())
    assert (sandbox.images.crashes, sandbox.images.ended) == (crashes + 1, ended)


def test_a_file_that_crashes_its_decoder_is_tried_twice_and_refused(
    sandbox: SandboxedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WorkerProcess] = []

    def crash(self: WorkerProcess, *_: Any, **__: Any) -> Iterator[Any]:
        asked.append(self)
        self.end()
        raise WorkerCrashed("the decoder crashed while it read the file (SIGSEGV)")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "ask", crash)
        with pytest.raises(InvalidImage, match="image/png cannot be decoded: the decoder crashed while it"):
            decode(sandbox, sample())
    assert len(set(asked)) == 2
    assert decode(sandbox, sample())


def test_a_worker_that_was_killed_while_it_was_free_is_replaced(sandbox: SandboxedDecoder) -> None:
    """For example by the kernel, for want of memory. The next file is not to blame."""
    assert sandbox.images is not None
    decode(sandbox, sample())
    (worker,) = sandbox.images.processes
    os.kill(worker.pid, signal.SIGKILL)
    assert decode(sandbox, sample()) == decode(LocalDecoder(LIMITS), sample())


class Worker:
    """A worker without a process, which notes whose files it decodes. born: all workers, in order."""

    born: ClassVar[list[Worker]] = []

    def __init__(self, kind: str, limits: MediaLimits, tenant: str = "") -> None:
        self.tenant, self.answered, self.crashed, self.alive = tenant, 0, False, True
        self.tenants: set[str] = set()
        Worker.born.append(self)

    def end(self) -> None:
        self.alive = False


def test_a_decoder_never_sees_files_of_two_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that a file of one tenant had taken over could read and change the pictures of the next.

    Idle decoders are used again for their own tenant. If the pool is full, the one that was idle for longest
    is replaced. Without tenants nothing is.
    """
    monkeypatch.setattr("fovea.media.sandbox.pool.WorkerProcess", Worker)
    monkeypatch.setattr(Worker, "born", [])

    def serve(pool: WorkerPool, tenant: str) -> Worker:
        with pool.lease(tenant=tenant) as worker:
            assert isinstance(worker, Worker)
            assert worker.tenant == tenant
            worker.tenants.add(tenant)
            worker.answered += 1
        return worker

    pool = WorkerPool("image", 2, LIMITS)
    a, b = serve(pool, "a"), serve(pool, "b")
    assert serve(pool, "a") is a
    assert serve(pool, "c") not in (a, b)
    settle()
    assert (a.alive, b.alive) == (True, False)
    rng = random.Random(3)
    for _ in range(200):
        serve(pool, rng.choice("abcd"))
        settle()
        assert sum(bool(worker.tenants) and worker.alive for worker in Worker.born) <= 2
    assert all(len(worker.tenants) <= 1 for worker in Worker.born)
    pool.close()
    settle()
    born = len(Worker.born)
    alone = WorkerPool("image", 2, LIMITS)
    assert {serve(alone, "") for _ in range(50)} == set(Worker.born[born:])
    assert len(Worker.born) == born + 1


def test_a_tenant_that_replaces_another_one_does_not_wait_for_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more tenants than workers, each file waited 0.1 s. Now one more process is kept ready."""
    monkeypatch.setattr("fovea.media.sandbox.pool.WorkerProcess", Worker)
    monkeypatch.setattr(Worker, "born", [])
    pool = WorkerPool("image", 1, LIMITS)
    for number, tenant in enumerate("abca"):
        known = list(Worker.born)
        with pool.lease(tenant=tenant) as worker:
            assert isinstance(worker, Worker)
            assert worker.answered == 0
            assert (worker in known) == (number > 1), "it was started ahead, but for the first two"
            worker.answered += 1
        settle()
    spare = pool._spare
    assert len(pool.processes) == 2
    pool.close()
    assert isinstance(spare, Worker)
    assert not spare.alive


def settle() -> None:
    """Wait until no process is being replaced."""
    for thread in threading.enumerate():
        if thread.name == "fovea-decoder":
            thread.join()


class Obstacle:
    """Lets a function fail the first `times` times."""

    def __init__(self, error: OSError, times: int, function: Callable[..., Any]) -> None:
        self.error, self.left, self.function = error, times, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return self.function(*args, **options)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("subprocess.Popen", OSError(errno.EAGAIN, "Resource temporarily unavailable"),
         "could not be started: Resource temporarily unavailable"),
        ("socket.socketpair", OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        ("SharedMemory", OSError(errno.ENOMEM, "Cannot allocate memory"),
         "no memory to share with it: Cannot allocate memory"),
    ],
)  # fmt: skip
def test_a_file_is_not_blamed_for_a_decoder_that_does_not_start(
    name: str, error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused with 400, as if it were damaged. Now a second process is tried, then it is a 503."""
    target = f"fovea.media.sandbox.process.{name}"
    decoder = SandboxedDecoder(LIMITS)
    try:
        for times in (1, 2):
            if decoder.images:
                decoder.images._end_free()
            with monkeypatch.context() as patch:
                patch.setattr(target, Obstacle(error, times, attrgetter(name)(process_module)))
                if times == 1:
                    assert decode(decoder, sample())
                    continue
                with pytest.raises(Unavailable, match=message) as caught:
                    decode(decoder, sample())
        assert (caught.value.code, caught.value.scope) == ("decoder_unavailable", "request")
        assert "the image is not the cause" in caught.value.message
        assert decode(decoder, sample())
    finally:
        decoder.close()


def test_a_jail_that_cannot_be_set_up_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    decoder = SandboxedDecoder(LIMITS)
    with pytest.raises(Unavailable, match="it ended before it was ready .exit status 1.; the image is not"):
        decode(decoder, sample())


def test_a_file_is_not_blamed_for_decoders_that_the_system_kills(
    sandbox: SandboxedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, for example. It was answered as if the file crashed its decoder, with 400."""
    ask, killed = WorkerProcess.ask, []

    def kill_first(self: WorkerProcess, *args: Any, **options: Any) -> Any:
        os.kill(self.pid, signal.SIGKILL)
        killed.append(self)
        return ask(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "ask", kill_first)
        with pytest.raises(Unavailable, match="the system killed the decoder.*the image is not the cause"):
            decode(sandbox, sample())
    assert len(set(killed)) == 2
    assert decode(sandbox, sample())


def test_a_decoder_that_hangs_is_ended(sandbox: SandboxedDecoder) -> None:
    assert sandbox.images is not None
    decode(sandbox, sample())
    (worker,) = sandbox.images.processes
    os.kill(worker.pid, signal.SIGSTOP)
    impatient = SandboxedDecoder(replace(LIMITS, image_decode_s=0.2))
    assert impatient.images is not None
    impatient.images = sandbox.images
    crashes, ended = sandbox.images.crashes, sandbox.images.ended
    with pytest.raises(InvalidImage, match="cannot be decoded: decoding the file takes longer than 0.2 s"):
        decode(impatient, sample())
    assert not worker.alive
    assert (sandbox.images.crashes, sandbox.images.ended) == (crashes, ended + 1)
    assert decode(sandbox, sample())


def test_an_image_that_needs_too_much_memory_is_refused() -> None:
    """The limit holds for the address space of the process, so the server's memory is never in danger."""
    limits = replace(LIMITS, decode_memory_mib=64)
    small = SandboxedDecoder(limits)
    try:
        data = sample("PNG", width=4800, height=4800)
        with pytest.raises(InvalidImage, match="not enough memory"):
            small.decode_image(data, probe(data, limits))
        assert decode(small, sample())
    finally:
        small.close()


def test_nobody_waits_for_an_abandoned_video(sandbox: SandboxedDecoder) -> None:
    """One 7 MiB webm was decoded for five minutes after its client had gone."""
    video = sandbox.open_video(clip(96, rate=24))
    assert sandbox.videos is not None
    (worker,) = sandbox.videos.processes
    before = sandbox.stats()
    os.kill(worker.pid, signal.SIGSTOP)  # decoding takes for ever
    gone = threading.Event()
    threading.Timer(0.1, gone.set).start()
    with pytest.raises(Abandoned):
        list(video.source.read([0, 90], gone.is_set))
    assert not worker.alive
    after = sandbox.stats()
    assert after["decoder_crashes"] == before["decoder_crashes"], "clients that left counted as crashes"
    assert after["decoder_ended"] == before["decoder_ended"] + 1
    assert len(list(video.source.read([0, 90]))) == 2


def test_a_reader_that_waits_for_a_worker_may_leave(sandbox: SandboxedDecoder) -> None:
    video = sandbox.open_video(clip(24))
    assert sandbox.videos is not None
    with sandbox.videos.lease(), pytest.raises(Abandoned):
        list(video.source.read([0], lambda: True))


def test_frames_to_decode_are_counted_before_any_is_decoded() -> None:
    """36,000 frames of 2944x2944 pixels with one key frame stopped all images for 307 seconds."""
    header = VideoHeader("webm", 2944, 2944, 0, 60.0, tuple(range(36_000)), (0,))
    assert frames_to_decode(header, [0]) == 1
    assert frames_to_decode(header, [35_999]) == 36_000
    assert frames_to_decode(header, [10, 10, 20]) == 21
    with pytest.raises(InvalidVideo, match="36000 frames of 2944x2944 have to be decoded, 312016 megapixels"):
        check_work(header, [0, 35_999], LIMITS)
    keyed = replace(header, keys=tuple(range(0, 36_000, 100)))
    assert frames_to_decode(keyed, [0, 350, 360, 35_999]) == 1 + 51 + 10 + 100
    check_work(keyed, [0, 350, 360, 35_999], LIMITS)


def test_a_video_whose_key_frames_are_invented_is_given_up() -> None:
    """A container may call every frame a key frame. Then far more frames are decoded than were counted."""
    video = open_video(clip(96, rate=24), LIMITS)
    source: Any = video.source
    header = replace(source.header, keys=source.header.stamps)
    liar = replace(source, header=header)
    module = sys.modules["fovea.media.video"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SPARE_FRAMES", 2)
        with pytest.raises(InvalidVideo, match="key frames are not where its header states"):
            list(liar.read([95]))


@pytest.mark.parametrize(
    "change",
    [{"width": 10**6}, {"width": -1}, {"stamps": [2, 1]}, {"stamps": ["a"]}, {"fps": 0},
     {"fps": float("nan")}, {"container": "exe"}, {"rotation": 45}, {"more": 1}, {"stamps": []},
     {"keys": [True]}],
)  # fmt: skip
def test_a_worker_that_lies_about_a_video_is_not_believed(change: dict[str, Any]) -> None:
    """A decoder that was taken over can answer whatever it wants."""
    good = {
        "container": "mp4",
        "width": 64,
        "height": 48,
        "rotation": 0,
        "fps": 12.0,
        "stamps": [0, 1],
        "keys": [0],
    }
    assert decoder_module.checked_header(good, LIMITS).width == 64
    with pytest.raises(InvalidVideo, match="impossible header"):
        decoder_module.checked_header(good | change, LIMITS)


def test_a_closed_decoder_refuses_and_leaves_no_process() -> None:
    decoder = SandboxedDecoder(LIMITS)
    decode(decoder, sample())
    assert decoder.images is not None
    (worker,) = decoder.images.processes
    decoder.close()
    with pytest.raises(Unavailable, match="shutting down"):
        decode(decoder, sample())
    assert worker._process.wait(20) == -signal.SIGKILL


def test_a_server_without_videos_keeps_no_process_for_them(caplog: pytest.LogCaptureFixture) -> None:
    """It took 65 MiB. That it can be started is still found out at the start of the server."""
    decoder = SandboxedDecoder(LIMITS)
    with caplog.at_level("INFO", "fovea.media"):
        decoder.warm_up()
    assert "images are decoded in processes with" in caplog.text
    assert "videos are decoded in processes with" in caplog.text
    assert decoder.images is not None
    assert decoder.videos is not None
    assert (len(decoder.images.processes), len(decoder.videos.processes)) == (1, 0)
    assert decoder.open_video(clip(24)).frames == 24
    assert len(decoder.videos.processes) == 1
    decoder.close()


def test_without_workers_this_process_decodes() -> None:
    decoder = SandboxedDecoder(replace(LIMITS, image_workers=0, video_workers=0))
    assert decode(decoder, sample()) == decode(LocalDecoder(LIMITS), sample())
    assert decoder.open_video(clip(24)).frames == 24
    assert decoder.stats()["decoder_processes"] == 0


JAILED = """
import os, socket, sys
from fovea.media.sandbox import jail
measures = jail.enter(256 << 20)
def refused(action):
    try:
        action()
    except (OSError, MemoryError) as error:
        return type(error).__name__
    return "allowed"
report = [
    refused(lambda: open("/etc/hostname")), refused(lambda: open("/tmp/made", "w")),
    refused(lambda: socket.socket()), refused(lambda: os.fork()), refused(lambda: os.kill(os.getppid(), 0)),
    refused(lambda: os.execv("/bin/true", ["true"])), refused(lambda: bytearray(1 << 30)), os.geteuid() == 0,
]
os.write(1, repr((measures, report)).encode())
"""


def test_the_jail() -> None:
    """A decoder that was taken over reads no file, opens no connection, and starts and reaches no process."""
    done = subprocess.run([sys.executable, "-c", JAILED], capture_output=True, timeout=60)
    measures, report = eval(done.stdout)
    assert "resource limits" in measures
    assert report[6:] == ["MemoryError", False]
    if "seccomp" in measures:
        assert report[:6] == ["PermissionError"] * 6


def test_a_worker_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_API_KEY", "secret")
    worker = WorkerProcess("image", LIMITS)
    try:
        with open(f"/proc/{worker.pid}/environ", "rb") as file:
            assert b"secret" not in file.read()
        assert {os.readlink(f"/proc/{worker.pid}/fd/{n}").split(":")[0] for n in range(3)} == {"/dev/null"}
        assert len(os.listdir(f"/proc/{worker.pid}/fd")) == 4
    finally:
        worker.end()


def test_a_worker_ends_with_its_server() -> None:
    """Killed servers leave no decoders behind: their sockets close."""
    code = (
        "import sys, time\n"
        "from fovea.media.limits import MediaLimits\n"
        "from fovea.media.sandbox.process import WorkerCrashed, WorkerProcess\n"
        "print(WorkerProcess('image', MediaLimits()).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and b"\nState:\tZ" not in status(pid):
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.01)


def status(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return file.read()
    except OSError:
        return b"\nState:\tZ"

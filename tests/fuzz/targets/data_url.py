"""URLs of images and videos: parsing, data URLs, and the check of remote URLs."""

from __future__ import annotations

from fovea.media.fetch.url import parse_remote
from fovea.media.limits import IMAGE, VIDEO, MediaLimits
from fovea.media.source import InlineSource, parse_source
from tests.fuzz.refusals import note, refusals, text_of

LONGEST = 4096
WORDS = (
    b"data:", b"image/png", b"video/mp4", b";base64,", b";", b",", b"=", b"==", b"http://", b"https://",
    b"file:///", b"fovea-image://", b"%41", b"@", b":80", b"[::1]", b"[::ffff:127.0.0.1]", b"127.0.0.1",
    b"0x7f.1", b"\\", b"#", b"?", b"xn--", b"\xe3\x80\x82", b"\xef\xbc\x8e", b"..", b"\0", b"\r\n",
    b"\xed\xa0\x80",
)  # fmt: skip
LIMITS = MediaLimits(max_bytes=1024, max_video_bytes=1024)


def target(data: bytes) -> None:
    text = text_of(data)
    for kind in (IMAGE, VIDEO):
        with refusals():
            source = parse_source(text, LIMITS, kind)
            note(type(source).__name__)
            if isinstance(source, InlineSource):
                content = source.read(LIMITS)
                assert len(content) <= 1024
    with refusals():
        parse_remote(text, LIMITS)
        note("remote")


def seeds() -> list[bytes]:
    return [
        b"data:image/png;base64,iVBORw0KGgo=", b"data:video/mp4;base64,AAAA", b"data:;base64,",
        b"data:image/png,abc", b"data:image/png" + b";" * 500 + b"base64,AAAA", b"data:image/png;base64,A===",
        b"data:image/png;base64,AA A=\n=", b"http://user:pass@127.0.0.1:80/a?b#c",
        b"https://[::ffff:10.0.0.1]/", b"http://2130706433/", b"http://0x7f.1/", b"http://example.com:99999/",
        b"https://EXAMPLE.com./%2e%2e/a", "http://bücher.example/ü".encode(), b"file:///etc/passwd",
        b"file://host/a", b"fovea-image://abc", b"iVBORw0KGgoAAAANSUhEUg", b"\xed\xa0\x80http://a",
        b"http://\xe3\x80\x82/", b"gopher://a/",
    ]  # fmt: skip

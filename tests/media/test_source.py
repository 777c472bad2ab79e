"""Values of image_url.url that are accepted, and the errors for all others."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from fovea.core.errors import Forbidden, FoveaError, InvalidImage
from fovea.media.limits import MediaLimits
from fovea.media.source import FileSource, InlineSource, RemoteSource, parse_source
from tests.media.samples import expect_error, sample

LIMITS = MediaLimits()
PNG = sample()
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:IMAGE/PNG;BASE64,{BASE64}",
        f"  data:image/png;charset=utf-8;base64,{BASE64}\n",
        f"data:image/jpeg;base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:;name=a.png;base64,{BASE64}",
        "data:image/png;base64," + "\n".join(BASE64[at : at + 76] for at in range(0, len(BASE64), 76)),
        "data:image/png;base64," + "\r\n\t ".join(BASE64[at : at + 3] for at in range(0, len(BASE64), 3)),
    ],
)
def test_data_urls(url: str) -> None:
    source = parse_source(url, LIMITS)
    assert isinstance(source, InlineSource)
    assert source.read(LIMITS) == PNG


def test_remote_urls() -> None:
    assert parse_source(" HTTPS://example.com/a.png ", LIMITS) == RemoteSource("HTTPS://example.com/a.png")


@pytest.mark.parametrize(
    ("url", "kind", "fragment"),
    [
        ("", InvalidImage, "the image URL is empty; accepted: data:image/"),
        ("   ", InvalidImage, "empty"),
        (BASE64, InvalidImage, "looks like bare base64; put data:image/png;base64,"),
        ("cat.png", InvalidImage, "'cat.png' has no scheme"),
        ("//example.com/a.png", InvalidImage, "has no scheme"),
        ("/etc/passwd", InvalidImage, "has no scheme"),
        ("ftp://example.com/a.png", InvalidImage, "the scheme 'ftp'"),
        ("javascript:alert(1)", InvalidImage, "the scheme 'javascript'"),
        ("s3://bucket/a.png", InvalidImage, "the scheme 's3'"),
        ("C:\\cat.png", InvalidImage, "the scheme 'c'"),
        ("data:image/png;base64", InvalidImage, "no comma"),
        ("data:,text", InvalidImage, "is not base64; accepted: data:;base64,"),
        (f"data:base64,{BASE64}", InvalidImage, "'base64'; accepted: image/*, or no media type"),
        (f"data:text/html;base64,{BASE64}", InvalidImage, "'text/html'; accepted: image/*"),
        (f"data:application/octet-stream;base64,{BASE64}", InvalidImage, "accepted: image/*"),
        ("data:image/svg+xml,%3Csvg%3E", InvalidImage, "is not base64; accepted: data:image/svg+xml;base64"),
        (f"data:image/png;base64;x=1,{BASE64}", InvalidImage, "is not base64"),
        ("file:///etc/passwd", Forbidden, "file:// URLs are not accepted here"),
    ],
)
def test_refuses_to_parse(url: str, kind: type[FoveaError], fragment: str) -> None:
    expect_error(parse_source, kind, [fragment], url, LIMITS)


@pytest.mark.parametrize(
    ("encoded", "fragment"),
    [
        ("", "no data after its comma"),
        (" \n", "no data after its comma"),
        ("iVBORw0KGg", "wrong base64 padding or is cut off: 10 characters"),
        ("iVBORw0KGgo", "wrong base64 padding"),
        ("iVBO=w0K", "is not base64"),
        ("====", "is not base64"),
        ("iVBO====", "excess padding"),
        ("iVBORw0_Gg==", "'_' at character 7"),
        ("iVBORw0K%3D%3D", "'%' at character 8"),
        ("iVBORw0K\u00a0\u00a0\u00a0\u00a0", "is not base64"),
        ("iVBORw0K\x1c\x1c\x1c\x1c", "is not base64"),
    ],
)
def test_refuses_broken_base64(encoded: str, fragment: str) -> None:
    source = InlineSource("image/png", encoded.encode())
    expect_error(source.read, InvalidImage, [fragment], LIMITS)


def test_size_is_checked_before_decoding() -> None:
    exactly = InlineSource("image/png", base64.b64encode(bytes(100)))
    assert exactly.read(MediaLimits(max_bytes=100)) == bytes(100)
    error = expect_error(
        exactly.read, InvalidImage, ["holds 100 bytes", "at most 99"], MediaLimits(max_bytes=99)
    )
    assert error.code == "image_too_large"
    garbage = InlineSource("image/png", b"!" * 400)  # the size is checked before the content
    expect_error(garbage.read, InvalidImage, ["holds 300 bytes"], MediaLimits(max_bytes=99))


def test_accepted_schemes_can_be_restricted() -> None:
    only_data = MediaLimits(allowed_schemes=("data",))
    error = expect_error(
        parse_source, Forbidden, ["https: URLs", "accepted: data"], "https://a.example/", only_data
    )
    assert error.code == "url_not_allowed"
    no_remote = MediaLimits(allow_remote=False)
    expect_error(parse_source, Forbidden, ["turned off", "data: URL"], "https://a.example/", no_remote)


def test_an_error_shortens_a_long_url() -> None:
    error = expect_error(parse_source, InvalidImage, ["..."], "x." * 100_000, LIMITS)
    assert len(error.message) < 200


# ---- files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(PNG)
    (folder / "sub" / "b c.png").write_bytes(PNG)
    (folder / "big.png").write_bytes(bytes(5000))
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "outside.png").symlink_to(tmp_path / "secret.png")
    (folder / "way").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "images2").mkdir()
    (tmp_path / "images2" / "a.png").write_bytes(PNG)
    return folder


def read(url: str, limits: MediaLimits) -> bytes:
    source = parse_source(url, limits)
    assert isinstance(source, FileSource)
    return source.read(limits)


@pytest.mark.parametrize(
    "path", ["a.png", "sub/b%20c.png", "inside.png", "sub/../a.png", "./sub//../a.png", "%61.png"]
)
def test_files_beneath_the_root(root: Path, path: str) -> None:
    limits = MediaLimits(file_root=root)
    assert read(f"file://{root}/{path}", limits) == PNG
    assert read(f"file://localhost{root}/{path}", limits) == PNG


@pytest.mark.parametrize(
    ("path", "kind", "fragment"),
    [
        ("/../secret.png", Forbidden, "leaves the folder"),
        ("/../no-such-file.png", Forbidden, "leaves the folder"),
        ("/%2e%2e/secret.png", Forbidden, "leaves the folder"),
        ("/sub/../../images2/a.png", Forbidden, "leaves the folder"),
        ("2/a.png", Forbidden, "leaves the folder"),
        ("/outside.png", Forbidden, "leaves the folder"),
        ("/way/secret.png", Forbidden, "leaves the folder"),
        ("/loop", FoveaError, ""),
        ("/pipe", Forbidden, "not a regular file"),
        ("/sub", Forbidden, "not a regular file"),
        ("/", Forbidden, "not a regular file"),
        ("/none.png", InvalidImage, "No such file"),
        ("/a.png/deeper", InvalidImage, "Not a directory"),
        ("/a.png%00.txt", InvalidImage, "no absolute path"),
        ("/a.png?x=1", InvalidImage, "write ? as %3F"),
        ("/a.png#x", InvalidImage, "# as %23"),
        ("/" + "x" * 5000, FoveaError, ""),
        ("/big.png", InvalidImage, "holds 5000 bytes; accepted: at most 4096"),
    ],
)
def test_files_refused(root: Path, path: str, kind: type[FoveaError], fragment: str) -> None:
    limits = MediaLimits(file_root=root, max_bytes=4096)
    with pytest.raises(kind) as caught:
        read(f"file://{root}{path}", limits)
    assert fragment in caught.value.message
    assert "secret" not in caught.value.message


def test_file_urls_of_other_hosts(root: Path) -> None:
    limits = MediaLimits(file_root=root)
    expect_error(parse_source, Forbidden, ["'fileserver'"], f"file://fileserver{root}/a.png", limits)
    expect_error(parse_source, InvalidImage, ["malformed"], "file://[/a.png", limits)
    expect_error(parse_source, InvalidImage, ["no absolute path"], "file:a.png", limits)


def test_a_link_created_after_the_check_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race: the path had no link when `resolve` ran, and has one when it is opened."""
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: self)
    limits = MediaLimits(file_root=root)
    for path in ("outside.png", "way/secret.png"):
        with pytest.raises(InvalidImage, match="cannot be read"):
            read(f"file://{root}/{path}", limits)

"""Names the type of data that is not an accepted image, so that an error can say more than "invalid"."""

from __future__ import annotations

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"%PDF", "a PDF document; render the page to a PNG first"),
    (0, b"II*\0", "a TIFF image; convert it to PNG"),
    (0, b"MM\0*", "a TIFF image; convert it to PNG"),
    (4, b"ftypavif", "an AVIF image; convert it to PNG or JPEG"),
    (4, b"ftypheic", "a HEIC image; convert it to JPEG"),
    (4, b"ftypmif1", "a HEIF image; convert it to JPEG"),
    (4, b"ftyp", "an MP4 or QuickTime video"),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska video"),
    (0, b"\0\0\x01\0", "an icon file"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL image; convert it to PNG or JPEG"),
    (0, b"\xff\x0a", "a JPEG XL image; convert it to PNG or JPEG"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 image; convert it to PNG or JPEG"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "gzip-compressed data"),
    (8, b"WAVE", "a WAV sound"),
    (0, b"ID3", "an MP3 sound"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file it points to"),
)
_TEXTS: tuple[tuple[bytes, str], ...] = (
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<svg", "an SVG drawing; render it to a PNG first"),
    (b"<?xml", "an XML document or SVG drawing; render it to a PNG first"),
    (b"data:", "a data: URL inside the data"),
    (b"{", "JSON text"),
    (b"[", "JSON text"),
)


def describe(data: bytes) -> str:
    """Return a noun phrase: "an HTML page", "plain text", "unknown data that begins with 0x00ff..."."""
    if not data:
        return "empty"
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset):
            return name
    start = data[:512].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, name in _TEXTS:
        if start.startswith(prefix):
            return name
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in data[:64]):
        return "plain text"
    return f"unknown data that begins with 0x{data[:8].hex()}"

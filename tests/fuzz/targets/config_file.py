"""The TOML file of --config: wrong files and values give a ConfigError that names them."""

from __future__ import annotations

import argparse
import tempfile
from functools import cache
from pathlib import Path

from fovea.cli import options
from fovea.engine.config import EngineConfig
from fovea.server.settings import ServerSettings
from tests.fuzz.refusals import note, refusals

LONGEST = 4096


@cache
def known() -> list[str]:
    return options.setting_names(ServerSettings, EngineConfig)


WORDS = (
    b" = ", b"\n", b"true", b"false", b'"none"', b"[]", b"[1, 2]", b'["a"]', b"{}", b"0", b"-1", b"1e400",
    b"nan", b"inf", b"1979-05-27", b"07:32:00", b"0x7fffffffffffffff", b"9" * 400, b'"""', b"'", b"#",
    b"[table]", b"[[array]]", b"a.b.c", b"\\ud800", b"\\u0000", b"max_queue", b"kv_cache_mib",
    b"allowed_hosts", b"file_root", b"api_key", b"trusted_proxies",
)  # fmt: skip


@cache
def _file() -> Path:
    return Path(tempfile.mkdtemp(prefix="fovea-fuzz-")) / "fovea.toml"


def target(data: bytes) -> None:
    _file().write_bytes(data)
    with refusals():
        values = options.read_file(str(_file()), known())
        note(" ".join(sorted(values)))
        for cls in (ServerSettings, EngineConfig):
            options.settings(cls, argparse.Namespace(), values)


def seeds() -> list[bytes]:
    return [
        b"", b'model = "fovea-tiny"\nport = 8000', b"max_queue = 64\nkv_cache_mib = 2048",
        b'max_queue = "many"', b"max_queue = 9" + b"9" * 300, b"max_que = 1", b"\xff", b"[table]\na = 1",
        b"a.b = 1", b"max_queue = nan", b"allowed_hosts = [1]", b'allowed_hosts = ["*"]',
        b'file_root = "/nowhere"', b'file_root = "a\\u0000b"', b"decode_threads = 1e400",
        b"drain_seconds = inf", b'trusted_proxies = ["10.0.0.0/99"]', b"a = " + b"[" * 1500,
        b"a = " + b"{a=" * 900, b'max_queue = """\n1"""', b"max_queue = 1979-05-27T07:32:00Z",
        *(name.encode() + b" = []" for name in known()[:12]),
    ]  # fmt: skip

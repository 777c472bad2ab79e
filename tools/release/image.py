"""The container image of a release: its Dockerfile is checked, and its base images are pinned by digest.

`python -m tools.release.image` asks the registries for the digests of the base images and writes them into
`tools/release/Dockerfile` (`make pin-image`). The digest is that of the list of all platforms.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

DOCKERFILE = Path(__file__).with_name("Dockerfile")
_FROM = re.compile(
    r"^FROM (?P<image>[^\s@]+)(?P<digest>@sha256:[0-9a-f]{64})?(?P<rest>(?: AS \S+)?)$", re.MULTILINE
)
_KINDS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"

HUB = "registry-1.docker.io"
"""The registry of names without one."""

Ask = Callable[[str, Mapping[str, str]], tuple[Mapping[str, str], bytes]]
"""Sends a request (address, headers), and returns the headers and the body of the answer."""


def bases(text: str) -> list[tuple[str, str]]:
    """Return the base images of a Dockerfile with their digests ("": none), without its own stages."""
    made = {rest.split()[-1] for _, _, rest in _FROM.findall(text) if rest}
    return [(image, digest) for image, digest, _ in _FROM.findall(text) if image not in made]


def unpinned(text: str) -> Iterator[str]:
    """Yield a line about every base image without a digest."""
    for image in dict(bases(text)):
        if any(not digest for name, digest in bases(text) if name == image):
            yield f"{DOCKERFILE.name}: {image} has no digest; `make pin-image` writes it"


def pin(text: str, digest_of: Callable[[str], str]) -> str:
    """Return a Dockerfile with the present digests of its base images.

    digest_of: returns the digest of an image's name, such as sha256:0123...
    """
    known = {image: digest_of(image) for image in dict(bases(text))}

    def line(found: re.Match[str]) -> str:
        digest = known.get(found["image"])
        return f"FROM {found['image']}{f'@{digest}' if digest else ''}{found['rest']}"

    return _FROM.sub(line, text)


def digest(image: str, ask: Ask) -> str:
    """Return the digest of an image in its registry; without a registry in its name, in Docker Hub.

    Raises ValueError if the registry's answer has none.
    """
    name, _, tag = image.partition(":")
    host, _, path = name.partition("/") if "." in name.split("/")[0] else (HUB, "", name)
    if "/" not in path:
        path = f"library/{path}"
    headers = {"Accept": _KINDS}
    if host == HUB:
        scope = f"https://auth.docker.io/token?service=registry.docker.io&scope=repository:{path}:pull"
        headers["Authorization"] = f"Bearer {json.loads(ask(scope, {})[1])['token']}"
    answer, _ = ask(f"https://{host}/v2/{path}/manifests/{tag or 'latest'}", headers)
    found = {name.lower(): value for name, value in answer.items()}.get("docker-content-digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
        raise ValueError(f"{image}: the registry answered without a digest: {found!r}")
    return found


def _ask(url: str, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=60) as answer:
        return dict(answer.headers), answer.read()


def problems(text: str) -> Iterator[str]:
    """Yield what hadolint finds in the release's Dockerfile."""
    tool = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(tool), "--no-color", "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        yield from (f"{DOCKERFILE.name}: {line}" for line in (done.stdout + done.stderr).splitlines())


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    try:
        DOCKERFILE.write_text(pin(DOCKERFILE.read_text(), lambda image: digest(image, _ask)))
    except (urllib.error.URLError, ValueError) as error:
        print(f"no digest could be read: {error}", file=sys.stderr)
        return 1
    print(*(f"{image}{digest}" for image, digest in bases(DOCKERFILE.read_text())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

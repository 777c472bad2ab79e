"""Container images of the services beside Fovea: versions, days of release and digests, in one table.

The table is images.toml. `[images]` of a spec replaces single images. An image whose release is older than
MOST_DAYS is worth a look: such releases have had holes that newer ones close.
"""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from fovea.core.errors import ConfigError
from fovea.deploy.accepted import DIGEST

MOST_DAYS = 120
"""Days after its release for which an image counts as current."""
RESOLVERS = (
    ("skopeo", "inspect", "--format", "{{.Digest}}", "docker://{image}"),
    ("crane", "digest", "{image}"),
    ("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", "{image}"),
)
"""Commands that ask a registry for the digest of an image. The first program that is installed is used."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the table.

    name: name of the service.
    released: day of the release.
    digest: digest of the index of all platforms, "sha256:..."; "": not known.
    source: where version and day were read.
    """

    name: str
    repository: str
    tag: str
    released: datetime.date
    digest: str
    source: str

    @property
    def reference(self) -> str:
        """The image by tag, and by digest if it is known."""
        return f"{self.repository}:{self.tag}" + (f"@{self.digest}" if self.digest else "")

    def days(self, today: datetime.date) -> int:
        """Return the days since the release."""
        return (today - self.released).days


@functools.cache
def images() -> Mapping[str, Image]:
    """Return the table by the names of the services."""
    text = (files("fovea.deploy") / "images.toml").read_text(encoding="utf-8")
    return {name: Image(name, **values) for name, values in tomllib.loads(text).items()}


def used(texts: Iterable[str]) -> list[Image]:
    """Return the images of the table that rendered files name."""
    whole = "\n".join(texts)
    return [each for each in images().values() if each.reference in whole]


def old(found: Iterable[Image], today: datetime.date) -> list[str]:
    """Return a sentence for each image whose release is more than MOST_DAYS ago."""
    return [
        f"{each.reference} was released on {each.released}, {each.days(today)} days ago; accepted: a release "
        f"of the last {MOST_DAYS} days, as [images] {each.name} of the spec"
        for each in found
        if each.days(today) > MOST_DAYS
    ]


def with_digest(image: str, run: Callable[[tuple[str, ...]], str]) -> str:
    """Return an image by tag and digest.

    image: the image by its tag.
    run: runs a command, and returns what it prints; "": its program is not installed, or it failed.
    Raises ConfigError if no program of RESOLVERS answers, or its answer is no digest.
    """
    for command in RESOLVERS:
        answer = run(tuple(part.replace("{image}", image) for part in command)).strip()
        if not answer:
            continue
        if not DIGEST.fullmatch(answer):
            raise ConfigError(
                f"{command[0]} says of {image}: {answer!r}; accepted: a digest, sha256:...", param="digests"
            )
        return f"{image.partition('@')[0]}@{answer}"
    names = ", ".join(command[0] for command in RESOLVERS)
    raise ConfigError(
        f"no program tells the digest of {image}; accepted: one of {names}, and a registry that answers",
        param="digests",
    )

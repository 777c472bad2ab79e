"""Reports all errors of a file or of a settings class at once, instead of the first one.

findings = Findings()
for number, entry in enumerate(entries, 1):
    with findings.part("pool", number):  # the place in the file
        read(entry)
findings.check()  # raises one ConfigError, whose `findings` are all errors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fovea.core.errors import ConfigError


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error for several. A single one stays what it is."""
    flat = list({(each.at, each.message): each for error in errors for each in error.findings}.values())
    if len(flat) == 1:
        return flat[0]
    return ConfigError("; ".join(each.message for each in flat), param=flat[0].param, findings=flat)


def renamed(error: ConfigError, where: str, *at: str | int) -> ConfigError:
    """Return an error whose messages begin with `where`, and whose places are within `at`."""
    start = f"{where}: " if where else ""
    return joined(
        [
            ConfigError(f"{start}{each.message}", param=each.param, code=each.code, at=(*at, *each.at))
            for each in error.findings
        ]
    )


class Findings:
    """Collects the errors of several parts.

    errors: those found until now.
    """

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    @contextmanager
    def part(self, *at: str | int) -> Iterator[None]:
        """Collect the ConfigError of a block, if it raises one. at: place of the part within the whole."""
        try:
            yield
        except ConfigError as error:
            self.errors.append(renamed(error, "", *at))

    def check(self) -> None:
        """Raise ConfigError if something was found."""
        if self.errors:
            raise joined(self.errors)

"""The report of a chaos day: tables for the console, and a summary for docs/reliability.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fovea.core.markdown import markdown_table
from tests.chaos.checker import Violation
from tests.chaos.faults import Log
from tests.chaos.levels import Level
from tests.chaos.load import NOTHING, Load

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
VERDICTS = ("ok", "degraded", "refused", "cut", "cancelled", "damaged", "wrong")
EXAMPLES = 3


@dataclass
class Report:
    """The results of one run. missing: what this machine did not permit."""

    seed: int
    minutes: float
    load: Load
    log: Log
    batches: Counter[str]
    before: Mapping[str, Level]
    after: Mapping[str, Level]
    violations: Sequence[Violation]
    missing: Sequence[str]
    questions: tuple[int, int]
    notes: Sequence[str] = field(default_factory=tuple)

    def summary(self) -> str:
        """Return the sums of the report as Markdown."""
        sums = sum((tally.verdicts for tally in self.load.tallies.values()), Counter[str]())
        times = [
            f"{kind} {sorted(each)[len(each) // 2]:.1f} ({max(each):.1f})"
            for kind, each in sorted(self.log.recoveries.items())
        ]
        levels = [
            f"{name} {old.resident_mib:.0f} to {self.after[name].resident_mib:.0f}"
            for name, old in self.before.items()
        ]
        lines = [
            f"In all: {', '.join(f'{sums[each]:,} {each}' for each in VERDICTS)}.",
            f"Median recovery in seconds, and the longest: {', '.join(times)}." if times else "",
            f"MiB after the warm-up and at the end: {', '.join(levels)}.",
        ]
        parts = [self._opening(), *lines, self._kept(), self._violations()]
        return "\n\n".join(part for part in parts if part)

    def text(self) -> str:
        """Return the report as Markdown."""
        parts = [
            self._opening(), self._faults(), self._media(), self._recoveries(), self._levels(), self._kept(),
            self._violations(),
        ]  # fmt: skip
        return "\n\n".join(part for part in parts if part)

    def _opening(self) -> str:
        total = sum(self.load.kinds.values())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.load.kinds.most_common())
        command = f"python -m tests.chaos.run --minutes {self.minutes:g} --seed {self.seed}"
        lines = [
            f"`{command}` at commit {commit()}: "
            f"{total:,} requests ({kinds}), {len(self.load.happened)} episodes, "
            f"{len(self.violations)} violations.",
            f"Known answers: {self.questions[0]} of {self.questions[1]} questions; the others vary with the "
            "size of a batch and are not asked.",
        ]
        if self.missing:
            lines.append(f"Not injected on this machine: {', '.join(self.missing)}.")
        return "\n".join([*lines, *self.notes])

    def _faults(self) -> str:
        rows = []
        for kind in [*sorted(set(self.load.tallies) - {NOTHING}), NOTHING]:
            tally = self.load.tallies.get(kind)
            if tally is None:
                continue
            injected = f"{self.log.counts[kind]:,}" if kind in self.log.counts else ""
            counts = [f"{tally.verdicts[each]:,}" for each in VERDICTS]
            rows.append([kind, injected, f"{tally.requests:,}", *counts])
        return markdown_table(["fault", "injected", "requests", *VERDICTS], rows)

    def _media(self) -> str:
        names = sorted({key.rpartition(" ")[0] for key in self.load.media})
        rows = [[name, *(f"{self.load.media[f'{name} {each}']:,}" for each in VERDICTS)] for name in names]
        return markdown_table(["fault of the media host", *VERDICTS], rows) if rows else ""

    def _recoveries(self) -> str:
        rows = [
            [kind, str(len(times)), f"{sorted(times)[len(times) // 2]:.1f}", f"{max(times):.1f}"]
            for kind, times in sorted(self.log.recoveries.items())
        ]
        return markdown_table(["fault", "times", "median recovery in s", "longest"], rows) if rows else ""

    def _levels(self) -> str:
        rows = []
        for name, old in self.before.items():
            new = self.after[name]
            again = "" if new.born == old.born else "started again"
            memory = [f"{old.resident_mib:.0f}", f"{new.resident_mib:.0f}"]
            rows.append([name, *memory, str(old.descriptors), str(new.descriptors), again])
        return markdown_table(
            ["program", "MiB after warm-up", "MiB at the end", "descriptors", "at the end", ""], rows
        )

    def _kept(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(self.batches.items()))
        whole, parts = len(self.load.receipts), len(self.load.parts)
        return (
            f"Batches and files: {counts}. Compared with the audit log: {whole:,} whole answers and "
            f"{parts:,} parts of streams."
        )

    def _violations(self) -> str:
        if not self.violations:
            return "No invariant was violated."
        rules = Counter(each.rule for each in self.violations)
        lines = []
        for rule, count in rules.most_common():
            lines.append(f"- **{rule}**: {count}")
            examples = [each for each in self.violations if each.rule == rule][:EXAMPLES]
            lines += [f"  - `{each.marker}` {each.detail}" for each in examples]
        return "\n".join(lines)


def write_page(page: Path, text: str) -> None:
    """Replace the part of a page between the two marks. Raises ValueError if the page lacks them."""
    old = page.read_text()
    if BEGIN not in old or END not in old:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    section = f"{BEGIN}\n\n{text}\n\n{END}"
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: section, old, flags=re.DOTALL))


def commit() -> str:
    """Return the commit of the working tree."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

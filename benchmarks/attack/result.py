"""The result of one attack: what its clients saw, and whether the server kept its promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from innocent import Log

SLACK_S = 1.0


@dataclass
class Result:
    """One row of the table.

    name, needs, story: of the attack.
    innocents: log of each innocent client during the attack, by kind.
    attacker: what became of the attacker's connections.
    baseline_mib, peak_mib: memory of the server's processes before the attack, and its peak during it.
    other_load: share of the processors that other programs took meanwhile, 0 to 1.
    problems: promises that the server did not keep; empty: it kept all of them.
    skipped: the reason why the attack was not carried out; empty: it was.
    """

    name: str
    needs: str
    story: str
    innocents: dict[str, Log] = field(default_factory=dict)
    attacker: Counter[str] = field(default_factory=Counter)
    baseline_mib: float = 0.0
    peak_mib: float = 0.0
    other_load: float = 0.0
    problems: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def verdict(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "FAIL: " + "; ".join(self.problems) if self.problems else "pass"

    def judge(self, quiet: dict[str, Log], ceiling_mib: float) -> None:
        """Add a problem for every promise that was broken.

        quiet: logs of the innocent clients without an attack. ceiling_mib: 0: 2,048 MiB above the baseline.
        """
        for kind, log in self.innocents.items():
            if log.failures:
                kinds = ", ".join(f"{count} x {what}" for what, count in log.failures.most_common(3))
                self.problems.append(f"{kind} requests failed ({kinds})")
            bound = 2 * quiet[kind].at(99) + SLACK_S
            if log.worst > bound:
                self.problems.append(f"{kind} waited {log.worst:.2f} s (bound {bound:.2f} s)")
        ceiling = ceiling_mib or self.baseline_mib + 2048
        if self.peak_mib > ceiling:
            self.problems.append(f"memory {self.peak_mib:.0f} MiB (ceiling {ceiling:.0f} MiB)")

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "needs": self.needs,
            "story": self.story,
            "innocents": {
                kind: {
                    "requests": len(log.seconds), "failures": dict(log.failures), "p50_s": log.at(50),
                    "p99_s": log.at(99), "worst_s": log.worst,
                }
                for kind, log in self.innocents.items()
            },
            "attacker": dict(self.attacker),
            "baseline_mib": self.baseline_mib,
            "peak_mib": self.peak_mib,
            "other_load": self.other_load,
            "verdict": self.verdict,
        }  # fmt: skip

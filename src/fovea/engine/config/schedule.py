"""Settings of the scheduler: the order of requests, the length of a step, and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting

POLICY_NAMES = ("dual", "fcfs", "priority", "detail")
WHEN_FULL = ("wait", "refuse")
WHEN_LATE = ("refuse", "degrade", "wait")


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Scheduling and admission."""

    policy: str = setting(
        "dual",
        "Which waiting request joins first: dual (text, follow-ups and known images do not wait behind new "
        "images), fcfs (order of arrival), priority (the request's own, then dual), detail (requests of "
        "similar visual cost together).",
        choices=POLICY_NAMES,
    )
    max_passes: int = setting(
        32, "How many later requests may join before one that waits.", low=0, high=1 << 20
    )
    pace: float = setting(
        2.5,
        "Longest step while prompts or images are computed beside decodes, in multiples of a step that only "
        "decodes. 0: no bound.",
        low=1,
        high=1000,
        or_zero=True,
    )
    target_itl_ms: int = setting(
        0,
        "Longest gap between tokens in milliseconds, kept by the percentage of gaps in target_percentile. It "
        "bounds steps beside pace, and the number of answers that are computed at a time. 0: none.",
        low=0,
        high=1 << 20,
    )
    target_ttft_ms: int = setting(
        0,
        "Longest time to the first token in milliseconds, kept by the percentage of requests in "
        "target_percentile. A request that would be later is treated as when_late says. 0: none.",
        low=0,
        high=1 << 24,
    )
    target_percentile: float = setting(
        95.0, "Percentage of gaps and of first tokens that should keep their target.", low=1, high=99.9
    )
    when_late: str = setting(
        "refuse",
        "Treatment of a request whose first token is expected after target_ttft_ms: refuse (429 with the "
        "figures), degrade (fewer visual tokens if that is enough, otherwise refuse), or wait.",
        choices=WHEN_LATE,
    )
    max_running: int = setting(64, "Sequences that share a step.", low=1, high=4096)
    max_step_tokens: int = setting(
        2048,
        "Tokens computed per step: decodes first, chunks of prompts in the rest.",
        low=1,
        high=1 << 20,
    )
    max_step_visual_tokens: int = setting(
        4096,
        "Visual tokens of the images that a step works on. One image is always accepted.",
        low=1,
        high=1 << 20,
    )
    max_draft_tokens: int = setting(
        16,
        "Most tokens that one step computes for an answer in addition to one, because its form leaves no "
        "choice about them, such as the keys of a JSON schema. 0: one step each.",
        low=0,
        high=256,
    )
    max_queue: int = setting(
        256, "Requests that may wait; more are refused with 429. 0: no bound.", low=0, high=1 << 20
    )
    when_full: str = setting(
        "wait",
        "Treatment of a request whose KV or pixels do not fit beside the requests in flight: wait, or "
        "refuse with 429.",
        choices=WHEN_FULL,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def room(self) -> int:
        """Answers that may run or wait; 0: no bound."""
        return self.max_running + self.max_queue if self.max_queue else 0

"""Output of answers and of their figures."""

from __future__ import annotations

import re
import sys

from fovea.core.types import Completion

# A terminal executes control characters, so text in a picture could make the model control the user's
# terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STAGES = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode")


def write_text(text: str) -> None:
    """Print a part of an answer at once. A terminal gets it without control characters, a pipe as it is."""
    sys.stdout.write(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def stats_table(answer: Completion) -> None:
    """Print the times and tokens of one answer to stderr, so that stdout has the answer alone."""
    timings, usage = answer.timings, answer.usage
    cells = [f"{name} {getattr(timings, name) * 1000:.1f}" for name in STAGES if getattr(timings, name) > 0]
    print(f"  ms: {'  '.join(cells)}  (first token after {timings.ttft * 1000:.1f})", file=sys.stderr)
    rate = f", {(usage.completion - 1) / timings.decode:.0f} tokens/s" if timings.decode > 0 else ""
    print(
        f"  tokens: prompt {usage.prompt} (visual {usage.image}, cached {usage.cached}), "
        f"answer {usage.completion}{rate}",
        file=sys.stderr,
    )

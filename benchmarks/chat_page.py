"""Measure the page in Debian's Chromium: how soon text is seen, and what a long answer costs the browser.

    PYTHONPATH=src:. python benchmarks/chat_page.py [--answers 50] [--chunks 1000]

A scripted server on this machine sends the page and the answers. It prints

- the milliseconds from the event with an answer's first text until the frame after the one that shows it;
- for one answer of many chunks, sent at once and one by one: the longest task of the page's thread (tasks
  below 50 ms count as 0), the frames, and the milliseconds in which the page's thread worked;
- the bytes of the page, and the milliseconds until it was loaded.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page
from tests.page.scripted import Scripted, scripted
from tests.page.support import BLOCK, MARKS, WIDE, ask, chromium, events, opened, text_chunk

from fovea.core.measure import percentile
from fovea.http.page import read_folder

WATCH = """
window.tasks = [];
window.frames_shown = 0;
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask" });
const count = () => { window.frames_shown += 1; requestAnimationFrame(count); };
requestAnimationFrame(count);
"""
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--answers", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=1000)
    args = parser.parse_args()
    with scripted() as script, chromium() as browser:
        results: Figures = {"browser": browser.version, "page": load_figures(browser, script)}
        with browser.new_context(viewport=WIDE) as context:
            context.add_init_script(WATCH)
            page = opened(context.new_page(), script.url)
            results["first_text_ms"] = first_text(page, script, args.answers)
            for name, pause_s in (("at_once", 0.0), ("one_by_one", 0.002)):
                results[name] = long_answer(page, script, args.chunks, pause_s)
    for name, figures in results.items():
        print(f"{name}: {figures}")
    print(json.dumps(results))


def load_figures(browser: Browser, script: Scripted) -> Figures:
    """Load the page in an empty profile."""
    with browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        began = time.perf_counter()
        opened(page, script.url)
        ready_ms = 1000 * (time.perf_counter() - began)
    files = read_folder()
    return {
        "files": len(files),
        "kib": round(sum(len(file.body) for file in files.values()) / 1024, 1),
        "ready_ms": round(ready_ms),
    }


def first_text(page: Page, script: Scripted, answers: int) -> Figures:
    """Milliseconds from an answer's first event until it is seen."""
    script.parts = lambda body: [events(text_chunk("First."), text_chunk("", "stop")).encode()]
    delays = []
    for _ in range(answers):
        page.get_by_role("button", name="New conversation").click()
        ask(page, "Say something.")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        event, visible = page.evaluate(
            "(names) => names.map((name) => performance.getEntriesByName(name).at(-1).startTime)", list(MARKS)
        )
        delays.append(visible - event)
    delays.sort()
    shares = {"p50": 50, "p95": 95, "max": 100}
    return {name: round(percentile(delays, share), 1) for name, share in shares.items()}


def long_answer(page: Page, script: Scripted, chunks: int, pause_s: float) -> Figures:
    """Show one answer of many chunks."""

    def parts(body: dict[str, Any]) -> Iterator[bytes]:
        for number in range(chunks):
            yield events(text_chunk(f"{BLOCK[number % len(BLOCK)]} "), done=False).encode()
            time.sleep(pause_s)
        yield events(text_chunk("", "stop")).encode()

    script.parts = parts
    page.get_by_role("button", name="New conversation").click()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    page.evaluate("() => { window.tasks.length = 0; window.frames_shown = 0; }")
    before, began = busy_s(devtools), time.perf_counter()
    ask(page, "Tell me more.")
    return {
        "longest_task_ms": round(max(page.evaluate("window.tasks"), default=0)),
        "frames": page.evaluate("window.frames_shown"),
        "busy_ms": round(1000 * (busy_s(devtools) - before)),
        "seconds": round(time.perf_counter() - began, 2),
    }


def busy_s(devtools: CDPSession) -> float:
    """Seconds in which the page's thread has worked so far."""
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


if __name__ == "__main__":
    main()

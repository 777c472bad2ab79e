"""Batches during the faults: nothing that the server accepted may be lost, and every line has one result."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.chaos.checker import Violation
from tests.chaos.client import Outcome, send
from tests.chaos.items import Item, chat_body, data_url

LINES, POLL_S, PAUSE_S, TIMEOUT_S = 8, 0.5, 2.0, 20.0
END_S = 120.0
"""Seconds after which a batch counts as hanging."""
ENDED = ("completed", "failed", "expired", "cancelled")
BOUNDARY = "chaos-form-boundary"


@dataclass
class Batches:
    """One client that uploads files and runs them as batches at an engine, one after the other.

    port: of the engine. full: whether the disk is, or was lately, full.
    counts: batches and files by what became of them.
    """

    port: int
    items: Sequence[Item]
    known: Mapping[str, str]
    seed: int
    full: Callable[[], bool]
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run batches until the event is set."""
        number = 0
        while not stopping.is_set():
            number += 1
            await self._one(f"batch-{number}", Random(f"{self.seed}/batch/{number}"))
            await asyncio.sleep(PAUSE_S)

    async def _one(self, name: str, rng: Random) -> None:
        chosen = [rng.choice(self.items) for _ in range(LINES)]
        lines: list[dict[str, Any]] = [
            {
                "custom_id": f"{name}-{number}", "method": "POST", "url": "/v1/chat/completions",
                "body": chat_body(item, [data_url(file) for file in item.images], stream=False),
            }
            for number, item in enumerate(chosen)
        ]  # fmt: skip
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        full = self.full()
        file = self._accepted("upload", name, await self._upload(data))
        if file is None:
            return
        body = json.dumps({"input_file_id": file["id"], "endpoint": "/v1/chat/completions",
                           "completion_window": "24h"}).encode()  # fmt: skip
        batch = self._accepted("batch", name, await self._call("POST", "/v1/batches", body))
        if batch is None:
            return
        ended = await self._wait(name, batch["id"])
        if ended is None:
            return
        self.counts[f"batches {ended['status']}"] += 1
        wanted = {line["custom_id"]: self.known[item.name] for line, item in zip(lines, chosen, strict=True)}
        await self._check(name, ended, wanted, full=full or self.full())
        content = await self._patient("GET", f"/v1/files/{file['id']}/content")
        if content.status != 200 or content.body != data:
            self._add("lost", name, f"the uploaded file reads as {content.status} {content.body[:200]!r}")
        self.counts["files read back"] += 1
        for made in (file["id"], ended.get("output_file_id"), ended.get("error_file_id")):
            if made:
                await self._patient("DELETE", f"/v1/files/{made}")

    async def _upload(self, data: bytes) -> Outcome:
        form = (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
            'content-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        ).encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        return await self._call("POST", "/v1/files", form + data + f"\r\n--{BOUNDARY}--\r\n".encode(), kind)

    async def _call(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> Outcome:
        return await send(self.port, method, path, {"content-type": kind}, body, TIMEOUT_S)

    def _accepted(self, what: str, name: str, outcome: Outcome) -> dict[str, Any] | None:
        """Return the object of an accepted call; None: it was refused, or nobody knows."""
        if outcome.ending == "complete" and outcome.status == 200:
            self.counts[f"{what} accepted"] += 1
            value: dict[str, Any] = json.loads(outcome.body)
            return value
        if outcome.ending == "complete":
            self.counts[f"{what} refused"] += 1
            try:
                message = json.loads(outcome.body)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = ""
            if not message or outcome.status == 500:
                self._add("error body", name, f"{what}: {outcome.status} {outcome.body[:200]!r}")
        else:
            self.counts[f"{what} without an answer"] += 1
        return None

    async def _patient(self, method: str, path: str) -> Outcome:
        """Send a request again until it is answered, because the engine may be away for some time."""
        end = time.monotonic() + END_S
        while True:
            outcome = await self._call(method, path)
            if (outcome.ending == "complete" and outcome.status < 500) or time.monotonic() > end:
                return outcome
            await asyncio.sleep(POLL_S)

    async def _wait(self, name: str, batch: str) -> dict[str, Any] | None:
        end = time.monotonic() + END_S
        while time.monotonic() < end:
            outcome = await self._patient("GET", f"/v1/batches/{batch}")
            if outcome.status != 200:
                self._add("lost", name, f"the batch reads as {outcome.status} {outcome.body[:200]!r}")
                return None
            value: dict[str, Any] = json.loads(outcome.body)
            if value["status"] in ENDED:
                return value
            await asyncio.sleep(POLL_S)
        self._add("hang", name, f"no end after {END_S:.0f} s: {outcome.body[:300]!r}")
        return None

    async def _check(
        self, name: str, batch: Mapping[str, Any], wanted: Mapping[str, str], *, full: bool
    ) -> None:
        results: list[dict[str, Any]] = []
        for field_name in ("output_file_id", "error_file_id"):
            if batch.get(field_name):
                outcome = await self._patient("GET", f"/v1/files/{batch[field_name]}/content")
                if outcome.status != 200:
                    self._add("lost", name, f"{field_name} reads as {outcome.status} {outcome.body[:200]!r}")
                    continue
                results += [json.loads(line) for line in outcome.body.splitlines()]
        self.violations += check_batch(name, str(batch["status"]), results, wanted, full=full)
        self.counts["lines answered"] += len(results)

    def _add(self, rule: str, name: str, detail: str) -> None:
        self.violations.append(Violation(rule, name, detail))


def check_batch(
    name: str, status: str, results: Sequence[Mapping[str, Any]], wanted: Mapping[str, str], *, full: bool
) -> list[Violation]:
    """Check the results of a batch: each line has exactly one, with the known answer or a clear error.

    wanted: known answers by custom_id. full: the disk was full, so the batch may have failed.
    """
    found = []
    seen = Counter(result["custom_id"] for result in results)
    for custom_id, times in seen.items():
        if times > 1 or custom_id not in wanted:
            found.append(Violation("lost", name, f"{custom_id} has {times} results"))
    if status != "completed" and not full:
        found.append(Violation("lost", name, f"the batch ended as {status}"))
    missing = sorted(set(wanted) - set(seen))
    if missing and status == "completed":
        found.append(Violation("lost", name, f"no result: {', '.join(missing)}"))
    for result in results:
        response = result.get("response")
        if response is not None and response["status_code"] == 200:
            text = response["body"]["choices"][0]["message"]["content"]
            if text != wanted.get(result["custom_id"]):
                crossed = text in wanted.values()
                rule = "crossing" if crossed else "wrong answer"
                found.append(Violation(rule, name, f"{result['custom_id']}: {text!r}"))
        elif response is not None and not response["body"].get("error", {}).get("message"):
            found.append(Violation("error body", name, f"{result['custom_id']}: {response}"))
    return found

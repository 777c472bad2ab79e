"""Run the CUDA tests, then measure speed against hardware limits and transformers; less than nine minutes.

    make gpu        # or: OUT=folder python benchmarks/gpu.py

It writes gpu.md (GPU, versions, date, test results, targets, figures) and the raw output to $OUT (default:
out).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from gpu_page import Shape, page

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS, SPEED_SECONDS = 170, 340


def run(command: list[str], log: Path, seconds: int) -> tuple[int, str]:
    """Run a command.

    Returns exit code (124 when the time ran out) and output, which is also written to `log`.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return code, log.read_text()


def last_result(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object. If the time ran out, it holds the part that was measured."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                result: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                continue
            return result
    return None


def main() -> int:
    import torch
    import transformers

    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device; nothing was run", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or "out")
    out.mkdir(parents=True, exist_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-W", "default"]
    tests, tests_text = run(pytest, out / "gpu-tests.txt", TEST_SECONDS)
    speed, speed_text = run([sys.executable, "benchmarks/gpu_speed.py"], out / "gpu-speed.txt", SPEED_SECONDS)
    result = last_result(speed_text)
    text = page(
        f"{torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}",
        f"torch {torch.__version__}, transformers {transformers.__version__}, CUDA {torch.version.cuda}",
        f"exit code {tests}: {tests_text.strip().splitlines()[-1] if tests_text.strip() else 'no output'}",
        result["measured"] if result else {},
        Shape(**result["shape"]) if result else None,
        f"benchmarks/gpu_speed.py ended with exit code {speed}; see gpu-speed.txt" if speed else "",
    )
    (out / "gpu.md").write_text(text)
    print(text)
    return tests or speed


if __name__ == "__main__":
    sys.exit(main())

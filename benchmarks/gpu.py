"""Everything that needs CUDA, in one run under nine minutes: tests, then speed against transformers.

    make gpu        # or: OUT=folder python benchmarks/gpu.py

Writes gpu.md (card, versions, date, test verdict, figures) and the raw output under $OUT (default: out).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS, BENCH_SECONDS = 210, 300


def run(command: list[str], log: Path, seconds: int) -> tuple[int, str]:
    """Exit code and output; 124 when the time ran out. The output is kept in `log` either way."""
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
    quick = [sys.executable, "benchmarks/quick.py", "--device", "cuda", "--threads", "8"]
    bench, bench_text = run(quick, out / "gpu-quick.txt", BENCH_SECONDS)
    lines = [
        f"# {torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, CUDA {torch.version.cuda}",
        "",
        f"Tests: exit code {tests}: {tests_text.strip().splitlines()[-1] if tests_text.strip() else 'no output'}",
        "",
    ]
    if bench == 0:
        result = json.loads(bench_text.strip().splitlines()[-1])
        lines += ["| figure | median |", "|---|---|"]
        lines += [f"| {name} | {value:.1f} |" for name, value in result["medians"].items()]
        lines += [f"| {name} | {value:.2f}x |" for name, value in result["ratios"].items()]
    else:
        lines.append(f"benchmarks/quick.py ended with exit code {bench}; see gpu-quick.txt")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return tests or bench


if __name__ == "__main__":
    sys.exit(main())

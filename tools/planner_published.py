"""Prints published measurements of other engines beside the planner's prediction, as a Markdown table.

python -m tools.planner_published

The figures are those of their authors, on their machines. docs/planner.md has the table, and a test compares
both. Nothing is fitted to them: the shares of the peaks are the defaults of the hardware table.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.markdown import markdown_table
from fovea.engine.vision.token_rules import known_rule
from fovea.planner.hardware import find, known_hardware
from fovea.planner.option import evaluate
from fovea.planner.precision import Precision
from fovea.planner.roofline import Setup
from fovea.planner.shape import find as find_model
from fovea.planner.stages import request_stages
from fovea.planner.steady import closed
from fovea.planner.workload import ImageTokens, Kind, Workload

QWEN = "https://github.com/QwenLM/Qwen2.5/blob/main/docs/source/benchmark/speed_benchmark.rst"
SGLANG = "https://github.com/sgl-project/sglang/pull/35318"
TENSTORRENT = "https://github.com/tenstorrent/tt-inference-server/issues/143"
VLLM = "https://github.com/vllm-project/vllm/pull/29217"


@dataclass(frozen=True)
class Published:
    """One published figure.

    model: the model, or one with the same decoder where the page measured that alone.
    what: "tokens/s", "requests/s", or "first token, ms".
    value: the figure.
    hardware, devices, precision: what it was measured on.
    kind: the requests.
    clients: how many are answered at once.
    engine, url: who measured it.
    """

    model: str
    what: str
    value: float
    hardware: str
    kind: Kind
    engine: str
    url: str
    clients: int = 1
    devices: int = 1
    precision: Precision = Precision()

    def predicted(self) -> float:
        """Return the planner's figure for the same case."""
        shape, rule = find_model(self.model), known_rule(self.model)
        assert shape is not None
        assert rule is not None
        device = find(self.hardware, known_hardware())
        setup = Setup(shape, device, self.precision, self.devices)

        def count(width: int, height: int) -> ImageTokens:
            tokens = rule.tokens(width, height)
            return ImageTokens(tokens, tokens)

        option = evaluate(setup, Workload((self.kind,), rate=1e-3), count)
        clients = max(1, min(self.clients, option.max_running))
        speed = closed(option.cost, option.mix, clients)
        if self.what == "first token, ms":
            _, prefill, _ = request_stages(option, option.kinds[0])
            return 1e3 * prefill.seconds
        if self.what == "tokens/s" and self.clients == 1:
            return 1 / speed.itl_s
        return speed.tokens_per_s if self.what == "tokens/s" else speed.requests_per_s


def text(prompt: int, answer: int) -> Kind:
    return Kind("text", text=prompt, answer=answer)


AWQ = Precision(dtype="float16", decoder="awq")
SEVEN, LARGE = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-72B-Instruct"
CASES = (
    Published(SEVEN, "tokens/s", 84.28, "A100-80GB", text(1, 2048), "vLLM 0.6.3", QWEN),
    Published(SEVEN, "tokens/s", 77.69, "A100-80GB", text(14336, 2048), "vLLM 0.6.3", QWEN),
    Published(SEVEN, "tokens/s", 70.33, "A100-80GB", text(30720, 2048), "vLLM 0.6.3", QWEN),
    Published(SEVEN, "tokens/s", 148.10, "A100-80GB", text(1, 2048), "vLLM 0.6.3", QWEN, precision=AWQ),
    Published(LARGE, "tokens/s", 32.37, "H100-SXM", text(128, 128), "vLLM", TENSTORRENT, devices=2),
    Published(LARGE, "first token, ms", 149.5, "H100-SXM", text(2048, 128), "vLLM", TENSTORRENT, devices=2),
    Published(LARGE, "first token, ms", 1063.8, "H100-SXM", text(8192, 128), "vLLM", TENSTORRENT, devices=2),
    Published(
        "Qwen/Qwen3-VL-32B-Instruct", "tokens/s", 621.91, "L40S", text(217, 190), "vLLM", VLLM,
        clients=1000, precision=Precision(decoder="fp8"),
    ),
    Published(
        SEVEN, "requests/s", 12.60, "H200", Kind("page", images=((640, 360),), answer=512), "SGLang", SGLANG,
        clients=32,
    ),
    Published(
        "PaddlePaddle/PaddleOCR-VL", "requests/s", 25.20, "H200",
        Kind("page", images=((640, 360),), answer=512), "SGLang", SGLANG, clients=32,
    ),
    Published(
        "PaddlePaddle/PaddleOCR-VL", "requests/s", 9.55, "H200",
        Kind("page", images=((1920, 1080),), answer=128), "SGLang", SGLANG, clients=32,
    ),
)  # fmt: skip


def markdown() -> str:
    """Return the table, without a line break at the end."""
    titles = ("model", "hardware", "requests", "figure", "measured", "predicted", "error", "source")
    rows = []
    for case in CASES:
        predicted = case.predicted()
        image = f"image {case.kind.images[0][0]}x{case.kind.images[0][1]}, " if case.kind.images else ""
        clients = f", {case.clients:,} at once" if case.clients > 1 else ""
        precision = case.precision.decoder
        rows.append(
            [
                case.model.partition("/")[2] + (f", {precision}" if precision else ""),
                (f"{case.devices} x " if case.devices > 1 else "") + case.hardware,
                f"{image}{case.kind.text:,} in, {case.kind.answer:,} out{clients}",
                case.what,
                f"{case.value:,.1f}",
                f"{predicted:,.1f}",
                f"{predicted / case.value - 1:+.0%}",
                f"[{case.engine}]({case.url})",
            ]
        )
    return markdown_table(titles, rows)


if __name__ == "__main__":
    print(markdown())

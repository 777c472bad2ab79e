"""Measure whether `relevance` follows the question, on pictures that were not made for Fovea.

    python benchmarks/relevance_pictures.py [MODEL] [--keep 0.1] [--out FILE]

pictures.toml has 40 questions about 20 photos, screenshots, diagrams and sheets of drawings from Debian's
packages; pictures.py downloads them. Every question is about one part of its picture, whose box is known.
The model (fovea-tiny if none is named) is asked this question and an unrelated one about another part of the
same picture. If relevance follows the question, the box gets more for its own question than for the other
one. Two figures say how much it gets:

  share   share of the regions' tokens that lie in the box. The tokens of a region are spread evenly over its
          area, and each counts for the part that overlaps the box; the tokens of the view of the whole do
          not count. A picture that is not divided is a single region, and the explanation does not say
          which of its tokens were kept, so it has no share (-). This happens to small pictures, and to
          questions that need all of the picture (how many, which of a list). Means of shares are over the
          questions that have one, together with their unrelated question.
  best    percentile of the most relevant cell of the box among all cells of the map, from 0 to 100; of equal
          cells, half count as lower. The cells of the box are those that overlap it by at least half of the
          largest overlap that any cell has. A large box has a high percentile on any map, so compare the
          figure with that of the unrelated question.

`area` is the share of the picture that is in the box, so it is the share of tokens that are spread evenly
over the picture.

The command writes one HTML page to --out, with both maps and the box of every question. The page holds the
pictures themselves, so it is large (about 8 MB) and not kept in the repository. The table alone is written
beside it, as Markdown. The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parent))

from fovea import Engine
from fovea.cli.sweep import aligned_markdown
from fovea.core.errors import FoveaError
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.core.types import AnswerBuilder, ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.processor.pixels import picture as pixels_of
from fovea.relevance.showing import drawn_size, show
from pictures import FOLDER, Box, Picture, PictureError, Question, download, read_list

OUT = Path(__file__).parent / "results/relevance_pictures.html"
METHOD = "relevance"
LONGEST_ANSWER = 48
WIDTH, QUALITY = 700, 80
"""Largest width in pixels of a picture on the page, and the quality of its JPEG."""
FRAME, FRAME_EDGE = (255, 0, 255), (255, 255, 255)
"""Colours of the asked box; `show` uses neither of them."""
WHOLE = [0.0, 0.0, 1.0, 1.0]
STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 1440px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: 2px 12px; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
section { display: grid; grid-template-columns: 1fr 1fr; gap: 0 16px; margin: 2.5em 0 }
h3 { grid-column: 1 / 3; margin: 0 } figure { margin: 0 } img { width: 100% }
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one explanation about one box.

    share: share of the regions' tokens that lie in the box; None: the picture is not divided.
    best: percentile of the most relevant cell of the box, 0 to 100.
    """

    share: float | None
    best: float


@dataclass(frozen=True, slots=True)
class Case:
    """One question about a picture: the answers, maps and figures for it and for the unrelated question.

    drawings: both maps as JPEG, the map of the question first.
    """

    picture: Picture
    question: Question
    own: Reading
    unrelated: Reading
    answers: tuple[str, str]
    drawings: tuple[bytes, bytes]


def read(explanation: Mapping[str, Any], box: Box) -> Reading:
    """Measure how much of an image a box got. explanation: the field `relevance` of an answer."""
    return Reading(token_share(explanation["regions"], box), best_percentile(explanation["map"], box))


def token_share(regions: Sequence[Mapping[str, Any]], box: Box) -> float | None:
    """Share of the regions' tokens that lie in the box, if each region's tokens are spread evenly over it.

    None: the image is one region, or no region has tokens.
    """
    total: int = sum(region["tokens"] for region in regions)
    if not total or [list(region["box"]) for region in regions] == [WHOLE]:
        return None
    inside: float = sum(
        region["tokens"] * _overlap(region["box"], box) / area(region["box"]) for region in regions
    )
    return inside / total


def best_percentile(cells: Sequence[Sequence[float]], box: Box) -> float:
    """Percentile of the most relevant cell of the box among all other cells, 0 to 100.

    cells: relevance of every cell, row by row.
    """
    relevance = np.asarray(cells, np.float64)
    rows, columns = relevance.shape
    down = _overlaps(rows, box[1], box[3])
    across = _overlaps(columns, box[0], box[2])
    overlap = down[:, None] * across[None]
    best = relevance[overlap >= overlap.max() / 2].max()
    others = relevance.size - 1
    lower, equal = (relevance < best).sum(), (relevance == best).sum() - 1
    return 100 * float(lower + equal / 2) / others if others else 100.0


def area(box: Sequence[float]) -> float:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Area that two boxes have in common."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _overlaps(count: int, start: float, end: float) -> NDArray[np.float64]:
    """Overlap of each of `count` equal parts of the range from 0 to 1 with a range, (count,)."""
    edges = np.arange(count + 1) / count
    overlaps: NDArray[np.float64] = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
    return overlaps.clip(0.0)


def ask(engine: Engine, image: Image, question: str, keep: float) -> tuple[str, Mapping[str, Any]]:
    """Ask about an image; return the answer and the explanation. Raises FoveaError."""
    budget = PixelBudget(visual=VisualTokens(METHOD, keep=keep, explain=True))
    prompt = ChatPrompt((Message("user", (ImagePart(image, budget), TextPart(question))),))
    builder = AnswerBuilder(1)
    for delta in engine.iterate(engine.request(prompt, temperature=0.0, max_tokens=LONGEST_ANSWER)):
        builder.add(delta)
    answer = builder.build()
    explanation = answer.images[0].relevance
    if explanation is None:
        raise SystemExit(f"the answer to {question!r} has no explanation; is --keep below 1?")
    return answer.text, explanation


def measure(engine: Engine, pictures: Iterable[Picture], folder: Path, keep: float) -> list[Case]:
    """Ask all questions, each followed by its unrelated one."""
    cases = []
    for picture in pictures:
        image = to_image(picture.file(folder))
        small = PIL.Image.fromarray(pixels_of(image))  # as the model sees it: turned upright, without alpha
        small.thumbnail((WIDTH, small.height))
        for question in picture.questions:
            texts, explanations = zip(
                *(ask(engine, image, text, keep) for text in (question.text, question.unrelated)),
                strict=True,
            )
            own, unrelated = (read(explanation, question.box) for explanation in explanations)
            first, second = (draw(small, explanation, question.box) for explanation in explanations)
            cases.append(Case(picture, question, own, unrelated, texts, (first, second)))
    return cases


def draw(picture: PIL.Image.Image, explanation: Mapping[str, Any], box: Box) -> bytes:
    """The map of an explanation, with a frame around the asked box, as JPEG."""
    canvas = show(picture, explanation)
    sides = drawn_size(picture.size)
    left, top, right, bottom = (share * sides[place % 2] for place, share in enumerate(box))
    pen = PIL.ImageDraw.Draw(canvas)
    for margin, width, colour in ((4, 5, FRAME_EDGE), (3, 3, FRAME)):
        pen.rectangle((left - margin, top - margin, right + margin, bottom + margin), None, colour, width)
    file = io.BytesIO()
    canvas.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """Means over cases.

    questions, divided: numbers of all questions, and of those that have a share.
    area, share, share_unrelated: means over the divided questions; null: there are none.
    share_higher: number of divided questions whose share is higher than with the unrelated question.
    best, best_unrelated, best_higher: likewise, over all questions.
    """
    shares = [
        (area(case.question.box), case.own.share, case.unrelated.share)
        for case in cases
        if case.own.share is not None and case.unrelated.share is not None
    ]
    areas, own, unrelated = zip(*shares, strict=True) if shares else ((), (), ())
    return {
        "questions": len(cases),
        "divided": len(shares),
        "area": _mean(areas),
        "share": _mean(own),
        "share_unrelated": _mean(unrelated),
        "share_higher": sum(here > there for here, there in zip(own, unrelated, strict=True)),
        "best": _mean([case.own.best for case in cases], 1),
        "best_unrelated": _mean([case.unrelated.best for case in cases], 1),
        "best_higher": sum(case.own.best > case.unrelated.best for case in cases),
    }


def summaries(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Summaries of all cases and of each kind of picture, by name."""
    kinds = dict.fromkeys(case.picture.kind for case in cases)
    return {
        "all": summary(cases),
        **{kind: summary([case for case in cases if case.picture.kind == kind]) for kind in kinds},
    }


def _mean(values: Sequence[float], digits: int = 4) -> float | None:
    return round(fmean(values), digits) if values else None


def summary_rows(cases: Sequence[Case]) -> list[list[str]]:
    """Rows of the table of means; the first one is its head."""
    head = ["pictures", "questions", "divided", "area", "share", "unrelated", "higher"]
    return [
        [*head, "best", "unrelated", "higher"],
        *(
            [
                kind,
                str(means["questions"]),
                str(means["divided"]),
                *(_percent(means[name]) for name in ("area", "share", "share_unrelated")),
                f"{means['share_higher']} of {means['divided']}",
                f"{means['best']:.1f}",
                f"{means['best_unrelated']:.1f}",
                f"{means['best_higher']} of {means['questions']}",
            ]
            for kind, means in summaries(cases).items()
        ),
    ]


def question_rows(cases: Sequence[Case]) -> list[list[str]]:
    """Rows of the table of questions; the first one is its head."""
    return [
        ["picture", "question", "area", "share", "unrelated", "best", "unrelated"],
        *(
            [
                case.picture.name,
                case.question.text,
                _percent(area(case.question.box)),
                _percent(case.own.share),
                _percent(case.unrelated.share),
                f"{case.own.best:.0f}",
                f"{case.unrelated.best:.0f}",
            ]
            for case in cases
        ),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def page(cases: Sequence[Case], title: str) -> str:
    """The HTML page, with the pictures in it."""
    head, *rows = summary_rows(cases)
    lines = [_row(head, "th"), *(_row(row, "td") for row in rows)]
    sections = "\n".join(_section(case) for case in cases)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n"
        "<p>Relevant cells are warm. The violet frame is the part that the question on the left asks about; "
        "the question on the right asks about another part. Share: the regions' tokens in that frame. Best: "
        "percentile of its most relevant cell.</p>\n"
        f"<table>\n{''.join(lines)}</table>\n{sections}\n"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def _section(case: Case) -> str:
    questions = case.question.text, case.question.unrelated
    figures = "\n".join(
        f'<figure><img alt="" loading="lazy" src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">'
        f"<figcaption><b>{html.escape(question)}</b> {html.escape(answer)}<br>"
        f"share {_percent(reading.share)}, best {reading.best:.0f}</figcaption></figure>"
        for data, question, answer, reading in zip(
            case.drawings, questions, case.answers, (case.own, case.unrelated), strict=True
        )
    )
    size = _percent(area(case.question.box))
    return (
        f"<section><h3>{case.picture.name} ({case.picture.kind}), frame {size} of the picture</h3>\n"
        f"{figures}</section>"
    )


def main() -> int:
    args = arguments()
    pictures = read_list()
    started = time.perf_counter()
    try:
        download(pictures, args.folder)
        with Engine.from_pretrained(args.model, threads=args.threads) as engine:
            loaded = time.perf_counter()
            cases = measure(engine, pictures, args.folder, args.keep)
    except (FoveaError, PictureError) as error:
        raise SystemExit(str(error)) from None
    seconds = time.perf_counter() - loaded
    title = f"{args.model}: relevance at {args.keep:g} of the tokens, {len(cases)} questions"
    tables = f"{aligned_markdown(summary_rows(cases))}\n\n{aligned_markdown(question_rows(cases))}\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(cases, title))
    args.out.with_suffix(".md").write_text(f"# {title}\n\n{tables}")
    print(f"{title}\n\n{tables}")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB; pictures and model {loaded - started:.0f} s")
    means = summaries(cases)
    print(json.dumps({"model": args.model, "keep": args.keep, "seconds": round(seconds, 1), **means}))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="fovea-tiny", metavar="MODEL")
    parser.add_argument("--keep", type=float, default=0.1, help="share of the tokens, below 1")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="the HTML page")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures are stored")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The tables of all judged figures: what a document says, what the arithmetic gives, and the verdict.

python -m tests.planner.documents.table
"""

from __future__ import annotations

from fovea.core.markdown import markdown_table
from tests.planner.documents.claim import VERDICTS, Claim, Document
from tests.planner.documents.optimization import OPTIMIZATION
from tests.planner.documents.production import PRODUCTION
from tests.planner.documents.serving import SERVING
from tests.planner.documents.tensorrt import TENSORRT

DOCUMENTS: tuple[Document, ...] = (SERVING, OPTIMIZATION, TENSORRT, PRODUCTION)
"""All documents whose figures are judged."""
_TITLES = ("section", "the document says", "arithmetic", "result", "verdict", "note")
_SIGNS = {"at least": "at least ", "at most": "at most "}


def counts() -> str:
    """Return how many figures of each document are right, rounded and wrong, as a Markdown table."""
    rows = [
        [document.title, *(str(_count(document, verdict)) for verdict in VERDICTS)] for document in DOCUMENTS
    ]
    return markdown_table(("document", *VERDICTS), rows)


def markdown() -> str:
    """Return the counts and the tables as Markdown, without a line break at the end."""
    parts = [counts()]
    for document in DOCUMENTS:
        parts += [
            f"### {document.title}",
            markdown_table(_TITLES, [_row(claim) for claim in document.claims]),
        ]
    return "\n\n".join(parts)


def _count(document: Document, verdict: str) -> int:
    return sum(claim.verdict == verdict for claim in document.claims)


def _row(claim: Claim) -> list[str]:
    verdict = f"**{claim.verdict}**" if claim.verdict == "wrong" else claim.verdict
    return [claim.section, claim.says, claim.formula, shown(claim), verdict, claim.why]


def shown(claim: Claim) -> str:
    """Return the result of a claim with its unit, to one digit more than printed, at least three digits."""
    sign = _SIGNS.get(claim.relation, "")
    if claim.result == round(claim.result):
        text = f"{claim.result:,.0f}"
    elif abs(claim.result) < 0.01:
        text = f"{claim.result:.7f}".rstrip("0")
    else:
        before = len(str(int(abs(claim.result)))) if abs(claim.result) >= 1 else 0
        text = f"{claim.result:,.{max(claim.digits + 1, 3 - before)}f}"
    return f"{sign}{text} {claim.unit}".strip()


if __name__ == "__main__":
    print(markdown())

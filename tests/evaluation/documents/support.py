"""Facts of a page by their names, as `Page.places` has them."""

from __future__ import annotations

from fovea.evaluation.documents.content import Content
from fovea.evaluation.documents.page import Page


def facts(content: Content) -> dict[str, str]:
    """The text of each fact of a document that is no chart."""
    named = {"title": content.title}
    named |= {f"field:{one.key}": one.value for one in content.fields}
    for number, table in enumerate(content.tables):
        for r, row in enumerate(table.rows):
            named |= {f"cell:{number}:{r}:{c}": text for c, text in enumerate(row)}
    return named | {f"paragraph:{number}": text for number, text in enumerate(content.paragraphs)}


def printed(page: Page) -> dict[str, str]:
    """The words of each fact, as they stand on the page."""
    return {at: " ".join(word.text for word in page.words if word.at == at) for at in page.places}


def in_order(page: Page) -> bool:
    """Tell whether every character begins within its word's box and not before the one to its left."""
    return all(
        word.box[0] - 1 <= word.starts[0]
        and list(word.starts) == sorted(word.starts)
        and word.starts[-1] <= word.box[2]
        and len(word.starts) == len(word.text)
        for word in page.words
    )

"""The models that come with Fovea, and the folder of each.

fovea-tiny is part of the package. fovea-page is larger and has a package of its own, which the extra `page`
installs. It also holds the pages on which documents are measured (`evaluation.documents.held_out`).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fovea.core.errors import CheckpointError

TINY, PAGE = "fovea-tiny", "fovea-page"
BUNDLED = (TINY, PAGE)
"""Names under which a model is found without a folder and without a hub."""
_PACKAGE = "fovea_page"


def bundled_model(name: str = TINY) -> Path:
    """Return the folder of one of BUNDLED. Raises CheckpointError if its package is not installed."""
    if name == TINY:
        return Path(__file__).resolve().parent.parent / "assets" / TINY
    return page_package() / "model"


def page_package() -> Path:
    """Return the folder of the package that holds fovea-page and pages. Raises CheckpointError without it."""
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"{PAGE} is not installed; install it with: pip install 'fovea[page]'")
    return Path(spec.submodule_search_locations[0])

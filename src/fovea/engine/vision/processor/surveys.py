"""Surveys of images as arrays.

A survey is the part of relevance that is computed from the pixels, before any question is known. A worker
thread computes the survey together with the pixels. The survey reaches the encoder as arrays of the
`ProcessedImage`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fovea.engine.vision.processor.base import Arrays, ProcessedImage
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.texture import Texture


def survey_arrays(pixels: NDArray[np.uint8], cell: int) -> Arrays:
    """Survey an image. Returns the arrays that `ProcessedImage` describes. CPU-bound, some milliseconds.

    pixels: (height, width, 3) bytes; height and width are multiples of `cell`.
    cell: side in pixels of the square that becomes one visual token.
    """
    result = survey(pixels, cell)
    return {
        "channels": result.texture.channels,
        "luma": result.texture.luma,
        "propositional": result.propositional,
        "perspectival": result.perspectival,
    }


def read_survey(image: ProcessedImage, cell: int) -> Survey:
    """The survey in an image's arrays. cell: as for `survey_arrays`."""
    arrays = image.arrays
    texture = Texture(arrays["channels"], arrays["luma"], cell)
    return Survey(texture, arrays["propositional"], arrays["perspectival"])

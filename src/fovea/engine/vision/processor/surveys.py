"""The survey of an image: what relevance reads from its pixels before any question is known.

It is made in a worker thread together with the pixels, and travels to the encoder as arrays of the `ProcessedImage`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fovea.engine.vision.processor.base import Arrays, ProcessedImage
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.texture import Texture


def survey_arrays(pixels: NDArray[np.uint8], cell: int) -> Arrays:
    """Survey an image. pixels: (height, width, 3); cell: side of a visual token's pixels.

    Returns the arrays that `ProcessedImage` describes. CPU-bound, some milliseconds.
    """
    result = survey(pixels, cell)
    return {
        "channels": result.texture.channels,
        "luma": result.texture.luma,
        "propositional": result.propositional,
        "perspectival": result.perspectival,
    }


def read_survey(image: ProcessedImage, cell: int) -> Survey:
    """The survey that `survey_arrays` put into an image's arrays."""
    arrays = image.arrays
    texture = Texture(arrays["channels"], arrays["luma"], cell)
    return Survey(texture, arrays["propositional"], arrays["perspectival"])

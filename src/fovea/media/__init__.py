"""Images in: from what a client wrote in `image_url.url` to decoded RGB pixels with a content identity.

    source -> fetched -> fetch | files -> probe -> decoded -> decode -> core.image.Image
              freshness  address, url     formats             colour, identity    load: all of it, for a whole request

The floor knows no model, no tokens and no HTTP server. Everything that arrives is hostile until it is decoded.
"""

from __future__ import annotations

from fovea.media.bundle import EncodedImage, ImageBundle, MediaTimings
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.image.decode import decode
from fovea.media.image.identity import from_array, from_pil
from fovea.media.image.probe import ImageHeader, probe
from fovea.media.limits import MediaLimits
from fovea.media.load import MediaLoader

__all__ = [
    "EncodedImage",
    "Fetcher",
    "ImageHeader",
    "ImageBundle",
    "MediaLimits",
    "MediaLoader",
    "MediaTimings",
    "decode",
    "from_array",
    "from_pil",
    "probe",
]

"""The texture of an image in torch, on any device: the twin of fovea.relevance.texture, which is numpy and holds no tensors.

Byte for byte the same luma and means of colour, so that what is made of them agrees to rounding. Images of one size may be
stacked; each is computed as if it were alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LUMA = 19595, 38470, 7471
"""Of red, green and blue, in 16 bits of fraction."""
SOBEL_LARGEST = 1020.0
TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
WHITE = 0.95047, 1.0, 1.08883


def texture(pixels: Tensor, cell: int) -> Tensor:
    """pixels (height, width, 3) or (images, height, width, 3) bytes, sides multiples of `cell`, to float32 channels
    ([images,] rows, columns, 13) on the same device, in the order of fovea.relevance.texture.CHANNELS."""
    height, width = pixels.shape[-3:-1]
    if height % cell or width % cell or not height or not width:
        raise ValueError(f"an image of {width}x{height} pixels is not made of cells of {cell}")
    stack = pixels.reshape(-1, height, width, 3)
    colour = _means(stack, cell)
    luma = _luma(stack)
    span = torch.tensor((100.0, 255.0, 255.0), device=pixels.device)
    middle = torch.tensor((0.0, 0.5, 0.5), device=pixels.device)
    edges, places = _edges(luma, cell), _places(height // cell, width // cell, pixels.device)
    channels = (
        colour,
        lab(colour) / span + middle,
        edges,
        places.expand(len(stack), -1, -1, -1),
        _range(luma, cell),
    )
    return torch.cat(channels, dim=-1).reshape(*pixels.shape[:-3], height // cell, width // cell, 13)


def lab(rgb: Tensor) -> Tensor:
    """sRGB in [0, 1] to CIE L*a*b* under D65, (..., 3)."""
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    matrix, white = (torch.tensor(table, device=rgb.device) for table in (TO_XYZ, WHITE))
    # Sums, because products of matrices may be rounded to fewer bits on a GPU.
    xyz = (linear.unsqueeze(-2) * matrix).sum(-1) / white
    root = torch.where(xyz > 216 / 24389, xyz.clamp(min=1e-9) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    x, y, z = root.unbind(-1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=-1)


def _means(stack: Tensor, cell: int) -> Tensor:
    """Of each cell's colour, rounded to bytes as Pillow's `reduce` does it, of 1; (images, rows, columns, 3)."""
    images, height, width, _ = stack.shape
    cells = stack.reshape(images, height // cell, cell, width // cell, cell, 3)
    area = cell * cell
    total = cells.sum(dim=(2, 4), dtype=torch.int64) + area // 2
    return ((total * int(2**24 / area)) >> 24).float() / 255


def _luma(stack: Tensor) -> Tensor:
    """Bytes of luminance as int32, (images, height, width)."""
    red, green, blue = stack.to(torch.int32).unbind(-1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 0x8000) >> 16


def _edges(luma: Tensor, cell: int) -> Tensor:
    """Means of Sobel x, Sobel y and of their magnitude; the image goes on as its border."""
    wide = functional.pad(luma[:, None].float(), (1, 1, 1, 1), mode="replicate")[:, 0]
    step = wide[:, :, 2:] - wide[:, :, :-2]
    across = step[:, :-2] + step[:, 2:] + 2 * step[:, 1:-1]
    step = wide[:, 2:] - wide[:, :-2]
    down = step[:, :, :-2] + step[:, :, 2:] + 2 * step[:, :, 1:-1]
    steps = torch.stack((across, down, torch.sqrt(across * across + down * down)), dim=1)
    means = functional.avg_pool2d(steps, cell) / SOBEL_LARGEST
    return means.permute(0, 2, 3, 1)


def _places(rows: int, columns: int, device: torch.device) -> Tensor:
    y, x = ((torch.arange(size, device=device) + 0.5) / size for size in (rows, columns))
    down, across = torch.meshgrid(y, x, indexing="ij")
    return torch.stack((down, across, torch.hypot(down - 0.5, across - 0.5) / 0.5**0.5), dim=-1)


def _range(luma: Tensor, cell: int) -> Tensor:
    images, height, width = luma.shape
    cells = luma.reshape(images, height // cell, cell, width // cell, cell)
    return ((cells.amax((2, 4)) - cells.amin((2, 4))).float() / 255).unsqueeze(-1)

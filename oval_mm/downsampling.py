"""The control that reads the whole image with fewer tokens: pixels are scaled down before the vision tower.

As VTC-Bench does it (the strongest cheap control): the image is shrunk until its tokens fit, not its features pooled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["downsampled", "downsampled_side"]


def downsampled_side(side: int, patch_size: int, share: float) -> int:
    """Returns the side in pixels of a square image whose patches are at most `share` of those of `side`.

    Args:
        side: pixels of the side that the tower is made for.
        patch_size: pixels of a patch's side.
        share: of the image tokens, above 0.
    """
    patches = side // patch_size
    fitting = max(1, math.isqrt(int(share * patches * patches + 1e-6)))
    return fitting * patch_size


def downsampled(image: Image, side: int, patch_size: int, share: float) -> Image:
    """Returns the image with the detail that `share` of its tokens can carry, in its own size.

    The tower has places for one size only, and so has the prompt: pixels are shrunk and enlarged again. What a model
    then answers is what it could answer from so few tokens at best; the time of fewer tokens is measured apart.

    Args:
        image: any size; what matters is the detail left when its shorter side becomes `side`.
        side: pixels of the side that the tower is made for.
        patch_size: pixels of a patch's side.
        share: of the image tokens.
    """
    factor = downsampled_side(side, patch_size, share) / side
    if factor >= 1:
        return image
    width, height = image.size
    shorter = min(width, height)
    # detail is measured at the tower's size: a large photograph is not left sharper than the tower would see it
    scale = factor * min(1.0, side / shorter)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    return image.resize(small).resize((width, height))

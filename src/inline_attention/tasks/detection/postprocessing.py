"""What a detector found in a resized image, in pixels of the original.

Shapes: `n` objects, `M` side of a mask as the model gives it, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from inline_attention.tasks.detection.evaluation import MASK_THRESHOLD


def at_original_size(
    found: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]
) -> dict[str, Tensor]:
    """Boxes enlarged or reduced; all else as it is, masks too, which are relative to their box.

    Args:
        found: As a detector returns it for one image.
        size: (height, width) of the image it was given.
        original: (height, width) of the original.
    """
    (height, width), (original_height, original_width) = size, original
    x, y = original_width / width, original_height / height
    return {**found, "boxes": found["boxes"].float() * found["boxes"].new_tensor([x, y, x, y])}


def whole_mask(probabilities: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """The mask of one object in its image.

    Of one, as a hundred of a large photograph would take gigabytes.

    Args:
        probabilities: `[1, M, M]`, as a detector gives it.
        box: `[4]` in pixels of the image.
        size: (height, width) of the image.

    Returns:
        `[H, W]` bool.
    """
    pasted = paste_masks_in_image(probabilities[None].float(), box[None].float(), size)
    return pasted[0, 0] > MASK_THRESHOLD


def with_whole_masks(found: Mapping[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
    """What was found, with masks `[n, 1, H, W]` bool of the image's size instead of relative ones."""
    if "masks" not in found:
        return dict(found)
    masks = found["masks"].new_empty((len(found["masks"]), 1, *size), dtype=torch.bool)
    for place, probabilities, box in zip(masks, found["masks"], found["boxes"], strict=True):
        place[0] = whole_mask(probabilities, box, size)
    return {**found, "masks": masks}

"""What a detector found in a resized image, in pixels of the original.

Shapes: `n` objects, `M` side of a mask as the model gives it, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


def whole_masks(found: Mapping[str, Tensor], size: tuple[int, int]) -> Iterator[Tensor]:
    """`whole_mask` of each object that was found, made when it is asked for."""
    for probabilities, box in zip(found["masks"], found["boxes"], strict=True):
        yield whole_mask(probabilities, box, size)

"""Small datasets kept decoded on the device, where batches are cut and augmented without the CPU.

Shapes: `N` samples, `B` batch, `C` channels, `H`, `W` height and width, `P` padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import Batches, EvaluationBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_transform

DECODING_BATCH = 256


@dataclass(frozen=True)
class MemoryImages:
    """Decoded pictures.

    Attributes:
        images: `[N, C, H, W]` uint8.
        targets: `[N]` class numbers.
        indices: `[N]` numbers in the dataset they are from.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def decode_to_memory(
    source: ImageSource,
    size: tuple[int, int],
    *,
    broken: BrokenImages,
    workers: int = 0,
    interpolation: str = "bicubic",
) -> MemoryImages:
    """Decode a whole dataset; broken pictures are left out.

    Args:
        source: The pictures.
        size: (height, width) to which those of another size are resized, without regard to their shape.
        broken: Where broken ones are noted.
        workers: Processes to decode with.
        interpolation: "bicubic", "bilinear" or "nearest".

    Raises:
        BrokenImagesError: If more are broken than allowed.
    """
    loader = ImageLoader(
        source,
        evaluation_transform(size, crop_pct=1.0, crop_mode="squash", interpolation=interpolation),
        EvaluationBatches(len(source), DECODING_BATCH),
        broken=broken,
        replace_broken=False,
        workers=workers,
    )
    batches = list(loader.epoch())
    loader.close()
    return MemoryImages(
        torch.cat([batch.images for batch in batches]).contiguous(),
        torch.cat([batch.targets for batch in batches]),
        torch.cat([batch.indices for batch in batches]),
    )


class MemoryLoader:
    """Batches of decoded pictures, cropped and flipped at random if asked.

    What happens to a sample depends on (seed, epoch, its number) alone: not on the device, the size of batches or the
    number of processes.
    """

    def __init__(
        self,
        data: MemoryImages,
        batches: Batches,
        *,
        normalize: Normalize,
        device: torch.device | str = "cpu",
        seed: int = 0,
        crop_padding: int = 0,
        flip: bool = False,
    ):
        """Move the pictures to the device.

        Args:
            data: The pictures.
            batches: Which samples make up which batch, by their number in `data`.
            normalize: Applied to each batch.
            device: Where they are kept, and batches are made.
            seed: Of crops and flips.
            crop_padding: Black pixels added on each side, from which the original size is cropped at random.
            flip: Mirror every other picture, at random.
        """
        self._device = torch.device(device)
        self._images = data.images.to(self._device)
        self._targets = data.targets.to(self._device)
        self._dataset_indices = data.indices.to(self._device)
        self._normalize = normalize.to(self._device)
        self._batches, self._seed = batches, seed
        self._crop_padding, self._flip = crop_padding, flip

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on."""
        # Drawn on the CPU, where they are the same for every device, and moved once: batches need not wait for them.
        generator = torch.Generator().manual_seed(derived_seed("crop and flip", self._seed, epoch))
        corners = torch.randint(2 * self._crop_padding + 1, (len(self._targets), 2), generator=generator)
        flips = torch.rand(len(self._targets), generator=generator) < (0.5 if self._flip else 0.0)
        corners, flips = corners.to(self._device), flips.to(self._device)
        for key in self._batches.keys(epoch, start_batch):
            chosen = key.indices.to(self._device, non_blocking=True)
            images = self._images[chosen]
            if self._crop_padding or self._flip:
                images = crop_and_flip(images, corners[chosen], flips[chosen], self._crop_padding)
            yield Batch(
                epoch, key.number, self._normalize(images), self._targets[chosen], self._dataset_indices[chosen]
            )


def crop_and_flip(images: Tensor, corners: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Pad, crop back to the original size, and mirror, each picture in its own way.

    Args:
        images: `[B, C, H, W]`.
        corners: `[B, 2]` top and left of the crop in the padded picture, from 0 to 2P.
        flips: `[B]` whether to mirror it left to right after that.
        padding: P, black pixels on each side.

    Returns:
        `[B, C, H, W]` in channels-last order.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding,) * 4)
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flips[:, None], columns.flip(0), columns)
    samples = torch.arange(len(images), device=images.device)
    cropped = padded[
        samples[:, None, None], :, (rows + corners[:, :1])[:, :, None], (columns + corners[:, 1:])[:, None, :]
    ]  # [B, H, W, C]
    return cropped.permute(0, 3, 1, 2)

"""Small datasets kept decoded on the device, where batches are cut and augmented without the CPU.

Shapes: `N` samples, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.data.batch import Batch
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader
from inline_attention.data.on_device import BatchAugmentation
from inline_attention.data.sampling import Batches, EvaluationBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_transform

DECODING_BATCH = 256


@dataclass(frozen=True)
class MemoryImages:
    """Decoded images.

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
    """Decode a whole dataset; broken images are left out.

    Args:
        source: The images.
        size: (height, width) to which those of another size are resized, without regard to their shape.
        broken: Collects broken images.
        workers: Processes to decode with.
        interpolation: "bicubic", "bilinear" or "nearest".

    Raises:
        BrokenImagesError: If more are broken than allowed.
    """
    transform = evaluation_transform(size, crop_pct=1.0, crop_mode="squash", interpolation=interpolation)
    batches = EvaluationBatches(len(source), DECODING_BATCH)
    loader = ImageLoader(source, transform, batches, broken=broken, replace_broken=False, workers=workers)
    decoded = [(batch.images, batch.targets, batch.indices) for batch in loader.epoch()]
    loader.close()
    images, targets, indices = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    return MemoryImages(images.contiguous(), targets, indices)


class MemoryLoader:
    """Batches of decoded images, augmented if asked.

    What happens to a sample depends on (seed, epoch, its number) alone: not on the device, the size of batches or the
    number of processes.
    """

    def __init__(
        self,
        data: MemoryImages,
        batches: Batches,
        *,
        augmentation: BatchAugmentation,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        """Move the images to the device.

        Args:
            data: The images.
            batches: Samples of each batch, by their number in `data`.
            augmentation: Augmentation of each batch; without any steps it only normalizes.
            device: Device that keeps the images and makes batches.
            seed: Random seed of the augmentation.
        """
        self._device = torch.device(device)
        self._images, self._targets, self._indices = (
            tensor.to(self._device) for tensor in (data.images, data.targets, data.indices)
        )
        self._augmentation = augmentation.to(self._device)
        self._batches, self._seed = batches, seed

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on."""
        plans = self._augmentation.draw(len(self._targets), self._seed, epoch, self._device)
        for key in self._batches.keys(epoch, start_batch):
            chosen = key.indices.to(self._device, non_blocking=True)
            images = self._augmentation(self._images[chosen], [plan[chosen] for plan in plans])
            yield Batch(epoch, key.number, images, self._targets[chosen], self._indices[chosen])

    def close(self) -> None:
        """There are no processes to end."""
